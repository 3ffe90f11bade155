"""The speculative loop: draft, verify in one forward of the target, keep what was accepted, repeat.

One loop serves one request and many, with any drafter or none: plain decoding is the same loop with empty drafts.
"""

import dataclasses
import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor

from runtime.drafters import Draft, Drafter, Outcome, Request
from runtime.drafters.model import PREFILL_ROWS, ModelDrafter
from runtime.errors import UserError
from runtime.metrics import Clock, Metrics
from runtime.rows import Out, Rows
from runtime.sampling import Distributions, Sampling, greedy_choices, require_finite
from runtime.verify import Rule, Verdict, coupled, greedy, paths, rejection
from runtime.vocabulary import Detokenizer, encode, require_same_vocabulary

if TYPE_CHECKING:
    from runtime.loading import Model

LosslessClass = Literal["exact", "measured", "distribution"]
MAX_DRAFT_LENGTH = 64


@dataclass(frozen=True)
class Piece:
    """What one round added to a text: its new tokens, and the text that they complete (whole characters only)."""

    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Result:
    """One finished text: `text` and `tokens` are the new part (a stop token is in `tokens`, not in `text`).

    finish  "stop": a stop token; "length": max_new_tokens, or the target's positions, are used up.
    """

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    finish: Literal["stop", "length"]
    metrics: Metrics


class NoDrafter:
    """Proposes nothing: plain decoding."""

    name = "none"

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """An empty draft each."""
        return [Draft() for _ in requests]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""

    def close(self, request: Request) -> None:
        """Nothing to forget."""


@dataclass
class _Live:
    """A request with its place in the target's cache, which holds all of its tokens but the last."""

    request: Request
    handle: int
    metrics: Metrics = field(default_factory=Metrics)


class Stream(Iterator[Piece]):
    """The pieces of one text as they come. `metrics` are complete, and `finish` is set, when it ends."""

    def __init__(self, pieces: Generator[Piece, None, None], request: Request, metrics: Metrics) -> None:
        self._pieces = pieces
        self._request = request
        self.metrics = metrics

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        """Why the text ended; None while it has not."""
        return _finish(self._request) if self._request.finished else None

    def close(self) -> None:
        """Ends the text now and frees its cache."""
        self._pieces.close()


class Speculator:
    """Decodes with a target and a drafter.

    target        what `runtime.load` returns.
    draft         another such model with the same vocabulary, any Drafter, or None for plain decoding.
    draft_length  γ: tokens drafted a round, 0 to 64.
    verify        the rule for requests that sample; greedy requests need none.

    Raises UserError for a draft length out of range, an unknown rule, or a draft with another vocabulary.
    """

    def __init__(
        self,
        target: "Model",
        draft: "Model | Drafter | None" = None,
        draft_length: int = 4,
        verify: Rule = "coupled",
    ) -> None:
        if not 0 <= draft_length <= MAX_DRAFT_LENGTH:
            raise UserError(
                f"draft_length must be from 0 to {MAX_DRAFT_LENGTH}, but is {draft_length}; choose another."
            )
        if verify not in get_args(Rule):
            raise UserError(
                f"verify must be one of {', '.join(get_args(Rule))}, but is {verify!r}; choose one of them."
            )
        self.target = target
        self.draft_length = draft_length
        self.verify: Rule = verify
        self.drafter = self._drafter(draft)
        self._decoder = target.decoder
        self._cache = target.decoder.new_cache()
        self._ids = itertools.count()

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[int] | None = None,
        **options: Any,
    ) -> Stream:
        """Continues one text; yields a Piece a round.

        stop     token ids that end the text; None: the model's own; (): none.
        options  fields of Sampling by name (temperature=0.8, seed=1), over `sampling`.

        Raises UserError for an empty or too long prompt and for values out of range, here and not at the first piece.
        """
        request = self._request(prompt, max_new_tokens, _sampling(sampling, options), stop)
        metrics = Metrics()
        return Stream(self._pieces(request, metrics), request, metrics)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int] | None = None,
        **options: Any,
    ) -> list[Result]:
        """Continues many texts at once, all live ones in the same forwards; arguments and errors as for `stream`.

        `sampling` may be one for each prompt. A text does not depend on its neighbours where the target is exact.
        """
        each = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise UserError(
                f"one sampling for each of the {len(prompts)} prompts was expected, but {len(each)} were given."
            )
        requests = [
            self._request(prompt, max_new_tokens, _sampling(one, options), stop)
            for prompt, one in zip(cast("Sequence[str | Sequence[int]]", prompts), each, strict=True)
        ]
        metrics = [Metrics() for _ in requests]
        for _ in self._rounds(requests, metrics, Clock()):
            pass
        return [self._result(request, measured) for request, measured in zip(requests, metrics, strict=True)]

    def _drafter(self, draft: "Model | Drafter | None") -> Drafter:
        if draft is None:
            return NoDrafter()
        if hasattr(draft, "propose"):
            return cast(Drafter, draft)
        require_same_vocabulary(self.target.tokenizer, draft.tokenizer)
        return ModelDrafter(draft, self.verify, self.target.decoder.vocab_size)

    def _request(
        self, prompt: str | Sequence[int], max_new_tokens: int, sampling: Sampling, stop: Sequence[int] | None
    ) -> Request:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, but is {max_new_tokens}; choose a larger number.")
        decoder = self._decoder
        tokens = encode(self.target.tokenizer, prompt, decoder.vocab_size, decoder.max_positions)
        return Request(
            id=next(self._ids),
            tokens=tokens,
            prompt_length=len(tokens),
            sampling=sampling,
            max_new_tokens=min(max_new_tokens, decoder.max_positions - len(tokens)),
            stop_tokens=self._stop_tokens() if stop is None else frozenset(stop),
        )

    def _stop_tokens(self) -> frozenset[int]:
        found = self.target.end_tokens
        if not found and self.target.tokenizer.eos_token_id is not None:
            return frozenset([self.target.tokenizer.eos_token_id])
        return found

    def _result(self, request: Request, metrics: Metrics) -> Result:
        prompt, new = request.tokens[: request.prompt_length], request.new_tokens
        text = Detokenizer(self.target.tokenizer, prompt).add(new, last=True)
        return Result(text, new, prompt, _finish(request), metrics)

    def _pieces(self, request: Request, metrics: Metrics) -> Generator[Piece, None, None]:
        clock = Clock()
        text = Detokenizer(self.target.tokenizer, request.tokens)
        shown = len(request.tokens)
        rounds = self._rounds([request], [metrics], clock)
        try:
            for _ in rounds:
                tokens = request.tokens[shown:]
                shown = len(request.tokens)
                piece = Piece(text.add(tokens, last=request.finished), tokens)
                clock.pause()
                yield piece
                clock.resume()
        finally:
            rounds.close()

    def _rounds(self, requests: list[Request], metrics: list[Metrics], clock: Clock) -> Generator[None, None, None]:
        """Runs the requests to their ends; yields after the prompts and after every round. Frees all caches."""
        live: list[_Live] = []
        try:
            for request, measured in zip(requests, metrics, strict=True):
                capacity = request.prompt_length + request.max_new_tokens
                live.append(_Live(request, self._cache.open(capacity), measured))
                self._prefill(live[-1], clock)
            self._retire(live)
            yield
            while live:
                self._round(live, clock)
                self._retire(live)
                yield
        finally:
            for one in live:
                self._close(one)

    def _prefill(self, one: _Live, clock: Clock) -> None:
        """Feeds the prompt in pieces; its last row gives the first new token."""
        started = clock.now()
        tokens = one.request.tokens
        for first in range(0, len(tokens), PREFILL_ROWS):
            piece = tokens[first : first + PREFILL_ROWS]
            at = [len(piece) - 1] if first + len(piece) == len(tokens) else []
            rows = Rows.chains([(one.handle, first, len(piece))])
            out = self._decoder.forward(torch.tensor(piece), rows, self._cache, torch.tensor(at, dtype=torch.long))
        one.metrics.requests, one.metrics.prompt_tokens, one.metrics.arrivals = 1, len(tokens), [[]]
        [outcome] = self._settle([one], [Draft()], out, clock)
        self.drafter.observe([outcome])
        spent = clock.now() - started
        one.metrics.prompt_seconds += spent
        one.metrics.seconds += spent

    def _round(self, live: list[_Live], clock: Clock) -> None:
        """Drafts for every live request, verifies all drafts in one forward, and settles each."""
        started = clock.now()
        requests = [one.request for one in live]
        budgets = [self._budget(request) for request in requests]
        drafts = self.drafter.propose(requests, budgets)
        for draft, budget in zip(drafts, budgets, strict=True):
            _require_sound(draft, budget, self._decoder.vocab_size)
        drafted = clock.now()
        lengths = [len(request.tokens) for request in requests]
        tokens, rows = _verification_rows(live, drafts)
        out = self._decoder.forward(tokens, rows, self._cache)
        outcomes = self._settle(live, drafts, out, clock)
        verified = clock.now()
        self.drafter.observe(outcomes)
        share = 1 / len(live)
        for one, draft, outcome, length in zip(live, drafts, outcomes, lengths, strict=True):
            m, depths = one.metrics, _depths(draft)
            m.count_draft(depths, [depths[i] for i in outcome.path])
            m.rounds += 1
            m.gained += len(one.request.tokens) - length
            m.target_forwards += 1
            m.target_rows += len(draft.tokens) + 1
            m.draft_seconds += (drafted - started) * share
            m.target_seconds += (verified - drafted) * share
            m.seconds += (clock.now() - started) * share

    def _budget(self, request: Request) -> int:
        # A round adds the target's own token as well, so the last token of a text needs no draft.
        return min(self.draft_length, request.max_new_tokens - len(request.new_tokens) - 1)

    def _settle(self, live: list[_Live], drafts: list[Draft], out: Out, clock: Clock) -> list[Outcome]:
        """Judges each draft, appends what was accepted, and rolls the cache back to it."""
        require_finite(out.logits, "target")
        outcomes, base = [], 0
        for one, draft in zip(live, drafts, strict=True):
            count = len(draft.tokens) + 1
            verdict = self._judge(one.request, draft, out.logits[base : base + count])
            request, before = one.request, len(one.request.tokens)
            gained = [*(draft.tokens[i] for i in verdict.path), verdict.next_token]
            stopped = next((i for i, token in enumerate(gained) if token in request.stop_tokens), None)
            if stopped is not None:
                gained = gained[: stopped + 1]
            path = verdict.path[: len(gained)]
            request.tokens += gained
            request.finished = stopped is not None or len(request.new_tokens) >= request.max_new_tokens
            self._roll_back(one, before, path)
            hidden = out.hidden[[base, *(base + 1 + i for i in path)]] if len(out.hidden) else None
            outcomes.append(Outcome(request, path, len(path), hidden))
            one.metrics.arrivals[0] += [clock.now()] * len(gained)
            base += count
        return outcomes

    def _judge(self, request: Request, draft: Draft, logits: Tensor) -> Verdict:
        sampling, position = request.sampling, len(request.tokens)
        context = (sampling, request.tokens, paths(draft), request.prompt_length)
        if sampling.greedy:
            return greedy(greedy_choices(logits, *context), draft)
        rule = coupled if self.verify == "coupled" else rejection
        return rule(Distributions(logits, *context), draft, position, sampling.seed)

    def _roll_back(self, one: _Live, before: int, path: list[int]) -> None:
        """Leaves in the cache the `before` tokens of the text so far and the accepted path."""
        if path == list(range(len(path))):
            self._cache.truncate(one.handle, before + len(path))
        else:
            self._cache.keep(one.handle, before, path)

    def _retire(self, live: list[_Live]) -> None:
        for one in [one for one in live if one.request.finished]:
            # Out of the list first: an interrupt between the two must not free a handle twice.
            live.remove(one)
            self._close(one)

    def _close(self, one: _Live) -> None:
        self._cache.close(one.handle)
        self.drafter.close(one.request)


def _sampling(sampling: Sampling | None, options: dict[str, Any]) -> Sampling:
    return dataclasses.replace(sampling if sampling is not None else Sampling(), **options)


def _finish(request: Request) -> Literal["stop", "length"]:
    return "stop" if request.tokens[-1] in request.stop_tokens else "length"


def _depths(draft: Draft) -> list[int]:
    """How many draft tokens stand between each draft token and the text."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _require_sound(draft: Draft, budget: int, vocab_size: int) -> None:
    """Raises ValueError for a draft that breaks the drafter's contract (a programming error, not a user's)."""
    count = len(draft.tokens)
    if count > max(budget, 0) or len(draft.parents) != count:
        raise ValueError(f"a draft of {count} tokens and {len(draft.parents)} parents for a budget of {budget}")
    if any(not -1 <= parent < index for index, parent in enumerate(draft.parents)):
        raise ValueError(f"draft parents must come before their children, found {draft.parents}")
    if any(not 0 <= token < vocab_size for token in draft.tokens):
        raise ValueError(f"draft tokens must be in the vocabulary 0..{vocab_size - 1}, found {draft.tokens}")
    if draft.probs is not None and tuple(draft.probs.shape) != (count, vocab_size):
        raise ValueError(f"draft probabilities must be {(count, vocab_size)}, found {tuple(draft.probs.shape)}")


def _verification_rows(live: list[_Live], drafts: list[Draft]) -> tuple[Tensor, Rows]:
    """Per request its last token and its draft: (T,) tokens and where they stand."""
    tokens: list[int] = []
    request: list[int] = []
    position: list[int] = []
    parent: list[int] = []
    for one, draft in zip(live, drafts, strict=True):
        base, length = len(tokens), len(one.request.tokens)
        tokens += [one.request.tokens[-1], *draft.tokens]
        request += [one.handle] * (1 + len(draft.tokens))
        position += [length - 1, *(length + depth for depth in _depths(draft))]
        parent += [-1, *(base + 1 + above for above in draft.parents)]
    return torch.tensor(tokens), Rows(torch.tensor(request), torch.tensor(position), torch.tensor(parent))


def lossless_class(target: "Model", verify: Rule, sampling: Sampling) -> LosslessClass:
    """What speculation promises: "exact" or "measured" (the same tokens as plain decoding), or "distribution".

    "measured": the target's kernels do not promise the same bits at every width, so mismatches have to be counted.
    """
    if verify == "rejection" and not sampling.greedy:
        return "distribution"
    return "exact" if target.decoder.exact else "measured"
