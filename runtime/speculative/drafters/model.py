"""A small language model as the proposer, with a cache of its own that follows each text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.contract import Cache, ChainNoise, Decoder, GreedyChains, HasDecoder, Rows, SampledChains, integers
from runtime.model.on_device import NON_FINITE, DeviceRounds
from runtime.sampling.distribution import Distributions, Logits, argmax_tokens, host, not_finite
from runtime.sampling.noise import Stream, pick, race, uniforms
from runtime.sampling.params import Sampling
from runtime.speculative.draft import DeferredDrafts, Draft, EachText, Request
from runtime.speculative.verify import Rule, sampled_on_device

# Prompts go through the model in pieces of this many rows, which bounds the memory of one forward.
PREFILL_ROWS = 512


def prefill(decoder: Decoder, cache: Cache, handle: int, tokens: Sequence[int], fed: int) -> int:
    """Feeds a text, of which `fed` tokens are in the cache, until PREFILL_ROWS or fewer are left; how many are fed."""
    while len(tokens) - fed > PREFILL_ROWS:
        rows = Rows.chains([(handle, fed, PREFILL_ROWS)])
        decoder.forward(integers(tokens[fed : fed + PREFILL_ROWS]), rows, cache, integers([]))
        fed += PREFILL_ROWS
    return fed


class HasHandle(Protocol):
    """A text in a draft's cache."""

    handle: int


Followed = TypeVar("Followed", bound=HasHandle)


class DraftModel(EachText[Followed]):
    """What drafters with a model of their own share: its decoder, and a cache that follows each text.

    model       the draft.
    verify      the rule that will verify.
    vocab_size  the target's number of logits, where it differs from the draft's (padded embeddings): the draft proposes
                nothing beyond it, and its distributions have that many columns.
    """

    def __init__(self, model: HasDecoder, verify: Rule = "coupled", vocab_size: int | None = None) -> None:
        super().__init__()
        self._decoder, self._cache = model.decoder, model.decoder.new_cache()
        self._rule: Rule = verify
        self._vocab_size = vocab_size if vocab_size is not None else model.decoder.vocab_size

    def close(self, request: Request) -> None:
        text = self._texts.pop(request.id, None)
        if text is not None:
            self._cache.close(text.handle)

    def _affordable(self, request: Request, budget: int, known: int) -> int:
        """The budget, cut where the draft's positions end; 0 for a token that the draft has no embedding for.

        known  tokens of the text that were looked at before.
        """
        if max(request.tokens[known:], default=0) >= self._decoder.vocab_size:
            return 0
        # The text and all drafted tokens but the last go through the draft.
        return max(0, min(budget, self._capacity(request) - len(request.tokens) + 1))

    def _capacity(self, request: Request) -> int:
        """Tokens of this request that the draft ever sees."""
        return min(request.prompt_length + request.max_new_tokens, self._decoder.max_positions)


@dataclass
class _Text:
    """What the draft's cache holds of one request.

    `fed` are the tokens in the cache; the first `agreed` of them are known to be the request's own.
    """

    handle: int
    fed: list[int] = field(default_factory=list)
    agreed: int = 0


@dataclass
class Drafting:
    """One request's draft while it grows."""

    request: Request
    budget: int
    tokens: list[int] = field(default_factory=list)
    probs: list[NDArray[np.float64]] = field(default_factory=list)


class ModelDrafter(DraftModel[_Text]):
    """Drafts token by token with a model that shares the target's tokenizer; arguments as for `DraftModel`.

    Greedy requests draft the argmax; `coupled` samples with the noise that the target will use at the same position;
    `rejection` samples with noise of its own and hands over the distributions. A draft is shorter than its budget where
    the draft model's positions end.
    """

    name = "model"

    def __init__(self, model: HasDecoder, verify: Rule = "coupled", vocab_size: int | None = None) -> None:
        super().__init__(model, verify, vocab_size)
        self._chains = model.decoder if isinstance(model.decoder, GreedyChains) else None
        drawn = verify == "coupled" and isinstance(model.decoder, SampledChains)
        self._sampled: SampledChains | None = model.decoder if drawn else None  # type: ignore[assignment]

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One chain per request: one forward for all missing tokens of all texts, then one per drafted token."""
        drafting = [Drafting(r, n) for r, n in zip(requests, self._lengths(requests, budgets), strict=True)]
        growing = [d for d in drafting if d.budget > 0]
        if growing:
            missing = [self._catch_up(d.request) for d in growing]
            if self._chains is not None and all(self._in_one_call(d.request.sampling) for d in growing):
                self._continue(self._chains, growing, missing)
                growing = []
            while growing:
                logits, best = self._feed([d.request for d in growing], missing)
                for i, d in enumerate(growing):
                    self._add_token(d, logits[i : i + 1], best[i])
                # The last token of a draft is not fed: only if it is accepted will its keys be needed.
                growing = [d for d in growing if len(d.tokens) < d.budget]
                missing = [d.tokens[-1:] for d in growing]
        return [Draft.chain(d.tokens, stacked(d.probs, self._vocab_size)) for d in drafting]

    def propose_deferred(
        self, requests: Sequence[Request], budgets: Sequence[int], device: torch.device
    ) -> DeferredDrafts | None:
        """See DeferredDrafter: greedy and `coupled` drafts of a model on the same device."""
        decoder = self._decoder
        if not isinstance(decoder, DeviceRounds) or decoder.device != device:
            return None
        counts = self._lengths(requests, budgets)
        growing = [request for request, count in zip(requests, counts, strict=True) if count]
        if not growing or not all(sampled_on_device(request.sampling, self._rule) for request in growing):
            return None
        pieces = [self._catch_up(request) for request in growing]
        texts = [self._texts[request.id] for request in growing]
        tokens, rows = _rows(texts, pieces)
        limit = min(self._vocab_size, decoder.vocab_size)
        steps, samplings = [count for count in counts if count], [request.sampling for request in growing]
        drafted = decoder.draft(tokens, rows, self._cache, steps, limit, samplings)
        for text, piece in zip(texts, pieces, strict=True):
            text.fed += piece
        return DeferredDrafts(drafted, counts)

    def settle(
        self, requests: Sequence[Request], deferred: DeferredDrafts, tokens: Sequence[Sequence[int]]
    ) -> list[Draft]:
        drafts, found = [], iter(tokens)
        for request, count in zip(requests, deferred.counts, strict=True):
            drafted = list(next(found)[:count]) if count else []
            if NON_FINITE in drafted:
                raise not_finite("draft")
            if drafted:
                self._texts[request.id].fed += drafted[:-1]
            drafts.append(Draft.chain(drafted))
        return drafts

    def revise(self, request: Request, length: int) -> None:
        """Says that the request's tokens have changed from index `length` on, which those of a text never do."""
        if request.id in self._texts:
            text = self._texts[request.id]
            text.agreed = min(text.agreed, length)

    def _lengths(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[int]:
        """Tokens to draft for each request."""
        known = [self._texts[request.id].agreed if request.id in self._texts else 0 for request in requests]
        return [self._affordable(*one) for one in zip(requests, budgets, known, strict=True)]

    def _catch_up(self, request: Request) -> list[int]:
        """Rolls the cache back to where it and the text part, feeds all but the last piece, and returns that piece."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = _Text(self._cache.open(self._capacity(request)))
        tokens = request.tokens
        # The text's last token is fed in any case: the draft starts from its logits.
        common = min(text.agreed, len(text.fed), len(tokens) - 1)
        while common < min(len(text.fed), len(tokens) - 1) and text.fed[common] == tokens[common]:
            common += 1
        self._cache.truncate(text.handle, common)
        del text.fed[common:]
        text.fed += tokens[common : prefill(self._decoder, self._cache, text.handle, tokens, common)]
        text.agreed = len(tokens)
        return tokens[len(text.fed) :]

    def _in_one_call(self, sampling: Sampling) -> bool:
        """Whether nothing but the logits and a position's noise decides on a token."""
        whole = not (sampling.top_k or sampling.min_p) and sampling.top_p == 1
        return argmax_alone(sampling) or (self._sampled is not None and sampling.plain and whole)

    def _noise(self, drafting: Drafting) -> ChainNoise | None:
        """What the target will sample its next tokens with; None for a greedy request."""
        request, sampling = drafting.request, drafting.request.sampling
        if sampling.greedy:
            return None
        places = range(len(request.tokens), len(request.tokens) + drafting.budget)
        # Of the target's whole vocabulary, so that it is drawn once for both.
        steps = [request.noise.exponential(sampling.seed, place, self._vocab_size) for place in places]
        return ChainNoise(sampling.temperature, steps)

    def _continue(self, decoder: GreedyChains, growing: Sequence[Drafting], pieces: Sequence[list[int]]) -> None:
        """Appends a piece to each request's cache and drafts all tokens, in one call."""
        texts = [self._texts[d.request.id] for d in growing]
        tokens, rows = _rows(texts, pieces)
        limit = min(self._vocab_size, self._decoder.vocab_size)
        try:
            asked = (tokens, rows, self._cache, [d.budget for d in growing], limit)
            noise = [self._noise(d) for d in growing]
            if self._sampled is not None and any(noise):
                drafted = self._sampled.continue_sampled(*asked, noise).tolist()
            else:
                drafted = decoder.continue_greedy(*asked).tolist()
        except FloatingPointError as error:
            raise not_finite("draft") from error
        for d, text, piece, row in zip(growing, texts, pieces, drafted, strict=True):
            d.tokens += row[: d.budget]
            text.fed += piece + d.tokens[:-1]

    def _feed(self, requests: Sequence[Request], pieces: Sequence[list[int]]) -> tuple[Logits, list[int]]:
        """Appends a piece to each request's cache; logits (requests, V) after each last token, and their argmax."""
        texts = [self._texts[request.id] for request in requests]
        tokens, rows = _rows(texts, pieces)
        # Where every token is a last one, all rows are asked for.
        ends = accumulate(len(piece) for piece in pieces)
        last = None if len(tokens) == len(pieces) else integers([end - 1 for end in ends])
        out = self._decoder.forward(tokens, rows, self._cache, last)
        logits = host(out.logits)
        best = argmax_tokens(out.logits, "draft")
        for text, piece in zip(texts, pieces, strict=True):
            text.fed += piece
        if logits.shape[1] <= self._vocab_size:
            return logits, best
        known = logits[:, : self._vocab_size]
        return known, argmax_tokens(known, "draft")

    def _add_token(self, drafting: Drafting, logits: Logits, best: int) -> None:
        add_token(self._rule, drafting, logits, best)


def add_token(rule: Rule, drafting: Drafting, logits: Logits, best: int) -> None:
    """Drafts one token after logits (1, V), whose argmax is `best`; `rule` will verify."""
    request, drafted = drafting.request, drafting.tokens
    sampling, position = request.sampling, len(request.tokens) + len(drafted)
    if argmax_alone(sampling):
        drafted.append(best)
        return
    rows = Distributions(logits, sampling, request.tokens, [drafted], request.prompt_length, request.stop_tokens)
    if sampling.greedy:
        drafted += rows.argmax()
        return
    row = rows.array(0)
    if rule == "coupled":
        drafted.append(race(row, request.noise.exponential(sampling.seed, position, len(row))))
        return
    # Every round has noise of its own: verifying looks at tokens that are not accepted, too.
    fresh = uniforms(sampling.seed, len(request.tokens), Stream.DRAFT, 1, lane=len(drafted) + 1)
    drafted.append(pick(row, fresh[0]))
    drafting.probs.append(row)


def stacked(rows: Sequence[NDArray[np.float64]], vocab_size: int) -> Tensor | None:
    """Distributions as (n, vocab_size), with zeros where the draft has fewer logits; None without any."""
    if not rows:
        return None
    out = np.zeros((len(rows), vocab_size))
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out)


def argmax_alone(sampling: Sampling) -> bool:
    """Whether the logits' argmax is the choice, whatever the text."""
    return sampling.greedy and sampling.plain


def _rows(texts: Sequence[_Text], pieces: Sequence[list[int]]) -> tuple[Tensor, Rows]:
    """The next tokens of each text, and where they stand."""
    spans = [(text.handle, len(text.fed), len(piece)) for text, piece in zip(texts, pieces, strict=True)]
    return integers([token for piece in pieces for token in piece]), Rows.chains(spans)
