"""Rounds of drafting and verifying: one loop for one request and for many, with any drafter or none.

Draft, verify all drafts in one forward of the target, keep what was accepted, repeat. The target's cache holds all of
a request's tokens but the last, which is fed together with the next draft.
"""

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from runtime.drafters import Draft, Drafter, Outcome, Request
from runtime.drafters.model import PREFILL_ROWS
from runtime.metrics import Clock, Metrics
from runtime.rows import Decoder, Out, Rows, integers
from runtime.sampling import Distributions, Logits, finite_choices, greedy_choices, host
from runtime.stopping import kept
from runtime.verify import Rule, Verdict, coupled, depths, greedy, paths, rejection, require_sound


@dataclass(eq=False)
class Live:
    """A request with its place in the target's cache, and what has been counted of it."""

    request: Request
    handle: int
    metrics: Metrics


class Loop:
    """Runs requests to their ends.

    decoder, cache  the target, and a cache of its making.
    draft_length    γ: the most tokens drafted a round.
    rule            judges the drafts of requests that sample.
    """

    def __init__(self, decoder: Decoder, drafter: Drafter, draft_length: int, rule: Rule) -> None:
        self._decoder = decoder
        self._drafter = drafter
        self._draft_length = draft_length
        self._rule: Rule = rule
        self._cache = decoder.new_cache()

    def run(self, requests: list[Request], metrics: list[Metrics], clock: Clock) -> Generator[None, None, None]:
        """Runs the requests to their ends; yields after the prompts and after every round. Frees all caches."""
        live: list[Live] = []
        try:
            for request, measured in zip(requests, metrics, strict=True):
                capacity = request.prompt_length + request.max_new_tokens
                live.append(Live(request, self._cache.open(capacity), measured))
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

    def _prefill(self, one: Live, clock: Clock) -> None:
        """Feeds the prompt in pieces; its last row gives the first new token."""
        started = clock.now()
        tokens = one.request.tokens
        for first in range(0, len(tokens), PREFILL_ROWS):
            piece = tokens[first : first + PREFILL_ROWS]
            at = [len(piece) - 1] if first + len(piece) == len(tokens) else []
            rows = Rows.chains([(one.handle, first, len(piece))])
            out = self._decoder.forward(integers(piece), rows, self._cache, integers(at))
        one.metrics.requests, one.metrics.prompt_tokens, one.metrics.arrivals = 1, len(tokens), [[]]
        [outcome] = self._settle([one], [Draft()], out, clock)
        self._drafter.observe([outcome])
        spent = clock.now() - started
        one.metrics.prompt_seconds += spent
        one.metrics.seconds += spent

    def _round(self, live: list[Live], clock: Clock) -> None:
        """Drafts for every live request, verifies all drafts in one forward, and settles each."""
        started = clock.now()
        requests = [one.request for one in live]
        budgets = [self._budget(request) for request in requests]
        drafts = self._drafter.propose(requests, budgets)
        for draft, budget in zip(drafts, budgets, strict=True):
            require_sound(draft, budget, self._decoder.vocab_size)
        drafted = clock.now()
        lengths = [len(request.tokens) for request in requests]
        tokens, rows = _verification_rows(live, drafts)
        out = self._decoder.forward(tokens, rows, self._cache)
        outcomes = self._settle(live, drafts, out, clock)
        verified = clock.now()
        self._drafter.observe(outcomes)
        share = 1 / len(live)
        for one, draft, outcome, length in zip(live, drafts, outcomes, lengths, strict=True):
            m, at = one.metrics, depths(draft)
            m.count_draft(at, [at[i] for i in outcome.path])
            m.rounds += 1
            m.gained += len(one.request.tokens) - length
            m.target_forwards += 1
            m.target_rows += len(draft.tokens) + 1
            m.draft_seconds += (drafted - started) * share
            m.target_seconds += (verified - drafted) * share
            m.seconds += (clock.now() - started) * share

    def _budget(self, request: Request) -> int:
        # A round adds the target's own token as well, so the last token of a text needs no draft.
        return min(self._draft_length, request.missing - 1)

    def _settle(self, live: list[Live], drafts: list[Draft], out: Out, clock: Clock) -> list[Outcome]:
        """Judges each draft, appends what was accepted, and rolls the cache back to it."""
        logits = host(out.logits)
        choices = finite_choices(logits, "target")
        outcomes, base = [], 0
        for one, draft in zip(live, drafts, strict=True):
            end = base + len(draft.tokens) + 1
            verdict = self._judge(one.request, draft, logits[base:end], choices[base:end])
            request, before = one.request, len(one.request.tokens)
            gained = [*(draft.tokens[i] for i in verdict.path), verdict.next_token]
            count, stopped = kept(gained, request.stop_tokens, request.stop_strings)
            gained = gained[:count]
            path = verdict.path[: len(gained)]
            request.tokens += gained
            request.noise.forget(len(request.tokens))
            request.finished = stopped or request.missing <= 0
            self._roll_back(one, before, path)
            outcomes.append(Outcome(request, path, len(path), _along(out.hidden[base:end], path)))
            one.metrics.arrivals[0] += [clock.now()] * len(gained)
            one.metrics.kv_bytes = len(request.tokens) * self._cache.bytes_per_token()
            base = end
        return outcomes

    def _judge(self, request: Request, draft: Draft, logits: Logits, choices: list[int]) -> Verdict:
        """`choices`: the argmax of each row of the logits."""
        sampling, position = request.sampling, len(request.tokens)
        if sampling.greedy and sampling.plain:
            return greedy(choices, draft)
        context = (sampling, request.tokens, paths(draft), request.prompt_length, request.stop_tokens)
        if sampling.greedy:
            return greedy(greedy_choices(logits, *context), draft)
        rows = Distributions(logits, *context)
        if self._rule == "coupled":
            return coupled(rows, draft, position, sampling.seed, request.noise.exponential)
        return rejection(rows, draft, position, sampling.seed)

    def _roll_back(self, one: Live, before: int, path: list[int]) -> None:
        """Leaves in the cache the `before` tokens of the text so far and the accepted path."""
        if path == list(range(len(path))):
            self._cache.truncate(one.handle, before + len(path))
        else:
            self._cache.keep(one.handle, before, path)

    def _retire(self, live: list[Live]) -> None:
        for one in [one for one in live if one.request.finished]:
            # Out of the list first: an interrupt between the two must not free a handle twice.
            live.remove(one)
            self._close(one)

    def _close(self, one: Live) -> None:
        one.request.noise.forget()
        self._cache.close(one.handle)
        self._drafter.close(one.request)


def _verification_rows(live: list[Live], drafts: list[Draft]) -> tuple[Tensor, Rows]:
    """Per request its last token and its draft: (T,) tokens and where they stand."""
    tokens: list[int] = []
    request: list[int] = []
    position: list[int] = []
    parent: list[int] = []
    for one, draft in zip(live, drafts, strict=True):
        base, length = len(tokens), len(one.request.tokens)
        tokens += [one.request.tokens[-1], *draft.tokens]
        request += [one.handle] * (1 + len(draft.tokens))
        position += [length - 1, *(length + depth for depth in depths(draft))]
        parent += [-1, *(base + 1 + above for above in draft.parents)]
    return integers(tokens), Rows(integers(request), integers(position), integers(parent))


def _along(hidden: Tensor, path: list[int]) -> Tensor | None:
    """Of hidden (n + 1, hidden), of the text's last token and a draft, the rows of the text and the accepted path.

    A copy: the decoder may use its memory again. None where the decoder gives no hidden states.
    """
    if not len(hidden):
        return None
    if path == list(range(len(path))):
        return hidden[: len(path) + 1].clone()
    return hidden[[0, *(1 + i for i in path)]]
