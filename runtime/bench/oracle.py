"""A drafter for benchmarks: the right token with a given probability, at a real draft model's cost."""

from collections.abc import Mapping, Sequence

from runtime.contract import HasDecoder
from runtime.errors import UserError
from runtime.sampling.distribution import Logits
from runtime.sampling.noise import Stream, uniforms
from runtime.speculative.draft import Request
from runtime.speculative.drafters.model import Drafting, ModelDrafter


class OracleDrafter(ModelDrafter):
    """Puts the target's own token in the place of each one the draft would choose, with probability `acceptance`.

    The draft's forwards run all the same, one a token, and its cache holds what was drafted, as with a draft of this
    acceptance per token. Shows what speculation gains at a known acceptance, not that any draft has it.

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

    def _add_token(self, drafting: Drafting, logits: Logits, best: int) -> None:
        request = drafting.request
        place = len(request.new_tokens) + len(drafting.tokens)
        if request.id not in self._texts_of:
            self._texts_of[request.id] = self._known.get(tuple(request.tokens[: request.prompt_length]), ())
        text = self._texts_of[request.id]
        if place >= len(text):
            drafting.tokens.append(best)
            return
        key = request.id << 32 | self._seed
        right = uniforms(key, request.prompt_length + place, Stream.DRAFT, 1)[0] < self._acceptance
        drafting.tokens.append(text[place] if right else (text[place] + 1) % self._vocab_size)
