"""A drafter for benchmarks: the right token with a given probability, at a real draft model's cost."""

from collections.abc import Mapping, Sequence

import torch

from runtime.contract import HasDecoder
from runtime.errors import UserError
from runtime.sampling.distribution import Logits
from runtime.sampling.noise import Stream, uniforms
from runtime.speculative.draft import DeferredDrafts, Request
from runtime.speculative.drafters.model import Drafting, ModelDrafter


class OracleDrafter(ModelDrafter):
    """Puts the target's own token in the place of each one the draft would choose, with probability `acceptance`.

    The draft's forwards run all the same, one a token, as with a draft of this acceptance per token. Shows what
    speculation gains at a known acceptance, not that any draft has it.

    known  by prompt (token ids): the text that plain decoding continues it with. Another prompt, or a text beyond its
           end, gets the draft's tokens.

    Raises UserError for an acceptance outside 0..1.
    """

    name = "oracle"

    def __init__(
        self,
        model: HasDecoder,
        known: Mapping[tuple[int, ...], Sequence[int]],
        acceptance: float,
        seed: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        if not 0 <= acceptance <= 1:
            raise UserError(f"the oracle's acceptance must be from 0 to 1, but is {acceptance}; choose another")
        super().__init__(model, vocab_size=vocab_size)
        # Each token is replaced before the next step: no chain in one call.
        self._chains = None
        self._known = known
        self._acceptance = acceptance
        self._seed = seed
        self._texts_of: dict[int, Sequence[int]] = {}

    def close(self, request: Request) -> None:
        """Frees the request's cache."""
        self._texts_of.pop(request.id, None)
        super().close(request)

    def propose_deferred(
        self, requests: Sequence[Request], budgets: Sequence[int], device: torch.device
    ) -> DeferredDrafts | None:
        """The draft's own chains, at what they cost, and the oracle's tokens in the place of theirs.

        The draft's cache holds its own tokens then, which no later token of the oracle asks for.
        """
        deferred = super().propose_deferred(requests, budgets, device)
        if deferred is None:
            return None
        drafting = [request for request, count in zip(requests, deferred.counts, strict=True) if count]
        steps = range(deferred.tokens.shape[1])
        said = [[self._token(request, step) for step in steps] for request in drafting]
        # −1: the text ends before it, or is not known.
        told = torch.tensor([[-1 if token is None else token for token in row] for row in said]).to(device)
        return DeferredDrafts(torch.where(told < 0, deferred.tokens, told), deferred.counts)

    def _add_token(self, drafting: Drafting, logits: Logits, best: int) -> None:
        token = self._token(drafting.request, len(drafting.tokens))
        drafting.tokens.append(best if token is None else token)

    def _token(self, request: Request, step: int) -> int | None:
        """The oracle's token number `step` of a draft; None where it does not know the text."""
        place = len(request.new_tokens) + step
        if request.id not in self._texts_of:
            self._texts_of[request.id] = self._known.get(tuple(request.tokens[: request.prompt_length]), ())
        text = self._texts_of[request.id]
        if place >= len(text):
            return None
        key = request.id << 32 | self._seed
        right = uniforms(key, request.prompt_length + place, Stream.DRAFT, 1)[0] < self._acceptance
        return text[place] if right else (text[place] + 1) % self._vocab_size
