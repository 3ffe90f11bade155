"""Which rows go into a round's forward: texts that go on with their drafts, and pieces of the prompts in turns."""

from collections.abc import Callable, Sequence

from runtime.contract import Cache
from runtime.engine.logprobs import PROMPT_LOGIT_BYTES, scored_rows
from runtime.engine.round import NO_ROWS, RequestState, ScheduledRequest

# Rows of prompts in one forward: all of them where nobody waits for a next token, fewer where others do.
PREFILL_ROWS = 512
MIXED_ROWS = 128
# By number, how many tokens may be drafted for each of these requests, which are decoding; the second argument says
# whether no prompt shares the forward.
Budgets = Callable[[Sequence[RequestState], bool], dict[int, int]]


def no_budgets(decoding: Sequence[RequestState], alone: bool) -> dict[int, int]:
    """Budgets of rounds without drafts."""
    return {state.number: 0 for state in decoding}


def plan_round(
    running: Sequence[RequestState],
    cache: Cache,
    vocab_size: int,
    budgets: Budgets,
) -> list[ScheduledRequest]:
    """The decoding requests with their drafts, and pieces of the prompts as far as the rows go."""
    # Most rounds are of decoding requests alone, and cheap models feel each microsecond of them.
    decoding: list[RequestState] = []
    held: list[int] = []
    reading: list[tuple[RequestState, int]] = []
    for state in running:
        first, tokens = cache.length(state.handle), state.request.tokens
        held.append(first)
        if len(tokens) == first + 1 and state.metrics.arrivals[0]:
            decoding.append(state)
        else:
            reading.append((state, len(tokens) - first))
    if not reading:
        drafted = budgets(decoding, True)
        return [
            ScheduledRequest(state, first, 1, drafted[state.number], True, True)
            for state, first in zip(running, held, strict=True)
        ]
    drafted = budgets(decoding, False) if decoding else {}
    pieces = prompt_pieces(reading, MIXED_ROWS if decoding else PREFILL_ROWS)
    scoring = max(1, PROMPT_LOGIT_BYTES // (4 * vocab_size))
    batch = []
    for state, first in zip(running, held, strict=True):
        if state.number in drafted:
            batch.append(ScheduledRequest(state, first, 1, drafted[state.number], True, True))
            continue
        request, piece, scored = state.request, pieces[state.number], NO_ROWS
        if piece:
            piece = cache.piece_end(state.handle, first + piece, len(request.tokens)) - first
        if request.wanted.prompt_logprobs is not None and piece:
            scored = scored_rows(request, first, piece)
            if len(scored) > scoring:
                piece = scored.start + scoring - first
                scored = scored_rows(request, first, piece)
            scoring -= len(scored)
        if piece > 0:
            last = first + piece == len(request.tokens)
            batch.append(ScheduledRequest(state, first, piece, 0, last and request.missing > 0, False, scored))
    return batch


def prompt_pieces(reading: Sequence[tuple[RequestState, int]], rows: int) -> dict[int, int]:
    """By number, how many tokens of each prompt are read, of those that are left of it: `rows` in all.

    Half of the rows are the oldest request's, so that it comes to its end whatever else comes; of the rest those with
    the least left are read first, so that a long prompt keeps nobody waiting for long.
    """
    oldest = min(reading, key=lambda one: one[0].number)[0].number
    pieces = {state.number: 0 for state, _ in reading}
    left = {state.number: count for state, count in reading}
    pieces[oldest] = min(left[oldest], rows - rows // 2)
    rows -= pieces[oldest]
    for number in sorted(left, key=lambda number: (left[number] - pieces[number], number)):
        more = min(rows, left[number] - pieces[number])
        pieces[number] += more
        rows -= more
    return pieces
