"""`Speculator`: prompts in, texts out, as a stream or as a batch; engine/engine.py has the rounds."""

import dataclasses
import itertools
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from runtime.cache.options import CONTIGUOUS, CacheOptions
from runtime.contract import no_drafts
from runtime.engine.engine import Engine
from runtime.engine.metrics import Metrics
from runtime.engine.requests import (
    NO_OPTIONS,
    RequestOptions,
    finish_reason,
    make_request,
    require_draft_length,
    require_rule,
    shown,
)
from runtime.errors import UserError
from runtime.sampling.detokenize import Detokenizer
from runtime.sampling.grammar import GrammarCompiler
from runtime.sampling.params import Sampling
from runtime.sampling.stopping import Stop, resolve
from runtime.sampling.structure import Structure
from runtime.speculative.draft import Drafter, NoDrafter, Request, Rule
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.for_requests import request_drafters
from runtime.speculative.drafters.other_tokenizer import model_drafter
from runtime.speculative.measured import Prior
from runtime.speculative.wanted import TokenLogprob

if TYPE_CHECKING:
    from runtime.model.load import Model

LosslessClass = Literal["exact", "measured", "distribution", "lossy"]


@dataclass(frozen=True)
class Piece:
    """What one round added to a text: its new tokens, and the text that they complete (whole characters only).

    logprobs  one for each token, where they were asked for.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """One finished text: `text` and `tokens` are the new part.

    What ended the text is in `tokens`, not in `text`: a stop token, or the tokens of a stop string.
    finish  "stop": a stop token or string; "length": max_new_tokens, or the target's positions, are used up.
    logprobs, prompt_logprobs  one for each token, where they were asked for; the prompt's first is None.
    """

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    finish: Literal["stop", "length"]
    metrics: Metrics
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)


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
        return _finish(self._request) if self._request.finished and self._request.error is None else None

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None]:
        """One for each token of the prompt, where they were asked for; whole when the first piece has come."""
        return self._request.found.prompt_logprobs

    def close(self) -> None:
        """Ends the text now and frees its cache."""
        self._pieces.close()


class Speculator:
    """Decodes with a target and a drafter. Threads may share it: their texts take turns, round by round.

    target        what `runtime.load` returns.
    draft         another such model, any Drafter, or None for plain decoding; a model with another vocabulary
                  drafts text, which is encoded again for the target (`drafter.name` says so). Requests may name another
                  drafter: none, grammar, lookup, suffix, prediction.
    draft_length  γ: tokens drafted a round, 0 to 64; None: what pays most, chosen every round by what was measured.
    verify        the rule for requests that sample; greedy requests need none.
    lossy         allows the rule `typical`, whose text is not distributed as the target's.
    cache         what all requests share: how keys and values are held, and whether in pages.
    max_batch     requests in one forward; further ones wait.
    prior         what is known of the drafter, from which γ is first chosen; None: a few rounds try it out.

    Where the target's cache cannot be rolled back, it decodes plainly whatever drafts (`no_drafts` of its decoder says
    why), and `drafter` is none.

    Raises UserError for a draft length or batch out of range, an unknown rule, or a lossy one without `lossy`.
    """

    def __init__(
        self,
        target: "Model",
        draft: "Model | Drafter | None" = None,
        draft_length: int | None = None,
        verify: Rule = "coupled",
        lossy: bool = False,
        cache: CacheOptions = CONTIGUOUS,
        max_batch: int = 256,
        prior: Prior | None = None,
    ) -> None:
        if max_batch < 1:
            raise UserError(f"max_batch must be at least 1, but is {max_batch}; choose a larger number.")
        if draft_length is not None:
            require_draft_length(draft_length)
        require_rule(verify)
        _require_allowed(verify, lossy)
        self.target = target
        self.draft_length = draft_length
        self.verify: Rule = verify
        self._lossy = lossy
        if draft is None or no_drafts(target.decoder):
            self.drafter: Drafter = NoDrafter()
        else:
            known = hasattr(draft, "propose")
            self.drafter = cast(Drafter, draft) if known else model_drafter(target, cast("Model", draft), verify)
        self._drafters = request_drafters(self.drafter)
        self._length: int | dict[str, Controller] = (
            {name: Controller(prior=prior if name == self.drafter.name else None) for name in self._drafters}
            if draft_length is None
            else draft_length
        )
        self._cache = cache.make(target.decoder)
        self._max_batch = max_batch
        self._ids = itertools.count()
        # Cache, drafter and controller serve all texts: threads take turns, a round each.
        self._turn = threading.RLock()

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Stop | None = None,
        structure: Structure | None = None,
        **options: Any,
    ) -> Stream:
        """Continues one text; yields a Piece a round.

        stop     token ids and texts that end the text; None: the model's own ids; (): none. Ids replace the model's
                 own, texts come on top of them.
        structure  what the text must keep to (extra `serve`).
        options  fields of Sampling by name (temperature=0.8, seed=1), over `sampling`, and of RequestOptions
                 (logprobs=3, draft_length=4).

        Raises UserError for an empty prompt, one too long for the target or the cache, and values out of range, here
        and not at the first piece.
        """
        asked, rest = _split(options)
        request = self._request(prompt, max_new_tokens, _sampling(sampling, rest), stop, structure, asked)
        metrics, engine = Metrics(), self._engine()
        engine.clock.pause()
        with self._turn:
            engine.add(request, metrics)
        return Stream(self._pieces(engine, request), request, metrics)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Stop | None = None,
        structure: Structure | None = None,
        **options: Any,
    ) -> list[Result]:
        """Continues many texts at once, all live ones in the same forwards; arguments and errors as for `stream`.

        `sampling` may be one for each prompt. A text does not depend on its neighbours where the target is exact.
        Raises UserError for one text instead of a list of them.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
            raise UserError("prompts must be a list of texts, found one text; put it into a list, or use stream")
        each = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise UserError(
                f"one sampling for each of the {len(prompts)} prompts was expected, but {len(each)} were given."
            )
        asked, rest = _split(options)
        requests = [
            self._request(prompt, max_new_tokens, _sampling(one, rest), stop, structure, asked)
            for prompt, one in zip(cast("Sequence[str | Sequence[int]]", prompts), each, strict=True)
        ]
        metrics = [Metrics() for _ in requests]
        engine = self._engine()
        try:
            with self._turn:
                for request, measured in zip(requests, metrics, strict=True):
                    engine.add(request, measured)
            while engine.busy:
                with self._turn:
                    _raise_errors(engine.step())
        finally:
            with self._turn:
                engine.close()
        results = []
        for request, measured in zip(requests, metrics, strict=True):
            prompt, new = request.tokens[: request.prompt_length], request.new_tokens
            text = shown(request, Detokenizer(self.target.tokenizer, prompt), new)
            found = request.found
            results.append(Result(text, new, prompt, _finish(request), measured, found.logprobs, found.prompt_logprobs))
        return results

    def _engine(self) -> Engine:
        decoder = self.target.decoder
        return Engine(decoder, self._drafters, self._length, self.verify, self._cache, max_batch=self._max_batch)

    def _request(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop: Stop | None,
        structure: Structure | None,
        options: RequestOptions,
    ) -> Request:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, but is {max_new_tokens}; choose a larger number.")
        _require_allowed(options.verify, self._lossy)
        grammar = None if structure is None else self._grammars.compile(structure)
        return make_request(
            self.target, prompt, max_new_tokens, sampling, stop, options, id=next(self._ids), grammar=grammar
        )

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        decoder, (ends, _) = self.target.decoder, resolve(None, self.target, self.target.decoder.vocab_size)
        return GrammarCompiler(self.target.tokenizer, decoder.vocab_size, ends)

    def _pieces(self, engine: Engine, request: Request) -> Generator[Piece, None, None]:
        text = Detokenizer(self.target.tokenizer, request.tokens)
        before = len(request.tokens)
        engine.clock.resume()
        try:
            while engine.busy:
                with self._turn:
                    stepped = engine.step()
                _raise_errors(stepped)
                if not stepped:
                    continue
                tokens = request.tokens[before:]
                before = len(request.tokens)
                piece = Piece(shown(request, text, tokens), tokens, request.found.logprobs[-len(tokens) :])
                engine.clock.pause()
                yield piece
                engine.clock.resume()
        finally:
            with self._turn:
                engine.close()


def _split(options: dict[str, Any]) -> tuple[RequestOptions, dict[str, Any]]:
    """What of named options is RequestOptions', and the others."""
    names = {item.name for item in dataclasses.fields(RequestOptions)}
    ours = {name: value for name, value in options.items() if name in names}
    if not ours:
        return NO_OPTIONS, options
    return RequestOptions(**ours), {name: value for name, value in options.items() if name not in names}


def _require_allowed(rule: Rule | None, lossy: bool) -> None:
    if rule == "typical" and not lossy:
        raise UserError(
            "verify typical changes the distribution of the text, which has to be asked for; "
            "add lossy=True (--lossy), or choose coupled or rejection."
        )


def _sampling(sampling: Sampling | None, options: dict[str, Any]) -> Sampling:
    return dataclasses.replace(sampling if sampling is not None else Sampling(), **options)


def _finish(request: Request) -> Literal["stop", "length"]:
    reason = finish_reason(request)
    assert reason != "error", "errors are raised where they are seen"
    return reason


def _raise_errors(stepped: Sequence[Request]) -> None:
    for request in stepped:
        if request.error is not None:
            raise request.error


def lossless_class(target: "Model", verify: Rule, sampling: Sampling) -> LosslessClass:
    """What speculation promises: "exact" or "measured" (the same tokens as plain decoding), "distribution", or "lossy".

    "measured": the target's kernels do not promise the same bits at every width, so mismatches have to be counted.
    """
    if verify != "coupled" and not sampling.greedy:
        return "distribution" if verify == "rejection" else "lossy"
    return "exact" if target.decoder.exact else "measured"
