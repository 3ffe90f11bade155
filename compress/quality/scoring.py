"""Log-likelihoods of the options of choices: a window is read once, and options branch off where they could stand."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from compress.errors import UserError
from compress.logits import log_probabilities, token_nll
from compress.quality.choices import MOST_TOKENS, OPTIONS, Choice
from compress.quality.statistics import Floats
from runtime.contract import Cache, CacheKind, Decoder, Rows, integers, no_trees

# Tokens of a window in one forward, the branches come on top; logits in float64 at a time.
_BLOCK = 64
_ELEMENTS = 1 << 22


@dataclass
class _Batch:
    """One forward: a chain of `length` tokens, then branches. `terms` are (row, its next token, choice, option)."""

    start: int
    length: int
    tokens: list[int]
    positions: list[int]
    parents: list[int]
    terms: list[tuple[int, int, int, int]] = field(default_factory=list)

    def branch(self, row: int, tokens: Sequence[int], choice: int, option: int) -> None:
        """Lets an option follow a row of the chain; its last token is predicted, and not read."""
        self.terms.append((row, tokens[0], choice, option))
        for place, (token, following) in enumerate(itertools.pairwise(tokens)):
            self.parents.append(row if place == 0 else len(self.parents) - 1)
            self.positions.append(self.start + row + 1 + place)
            self.tokens.append(token)
            self.terms.append((len(self.tokens) - 1, following, choice, option))


def score(
    decoder: Decoder,
    windows: Tensor,
    choices: Sequence[Choice],
    kind: CacheKind = "float32",
    on_step: Callable[[int, int], None] | None = None,
) -> Floats:
    """Log-likelihood (choices, options) float64, nats, of every option behind its window's beginning.

    windows  (E, L) int64, L at most the decoder's positions; the cache is of `kind`.
    on_step  told (windows done, windows with choices) after each.

    Raises UserError for logits that are NaN or infinite.
    """
    found = np.zeros((len(choices), OPTIONS))
    members: defaultdict[int, list[int]] = defaultdict(list)
    for number, choice in enumerate(choices):
        members[choice.window].append(number)
    for done, (window, mine) in enumerate(members.items(), 1):
        tokens = windows[window].tolist()
        if no_trees(decoder):
            _score_chains(decoder, tokens, choices, mine, kind, found)
        else:
            _score_trees(decoder, tokens, choices, mine, kind, found)
        if on_step is not None:
            on_step(done, len(members))
    return found


def _score_trees(
    decoder: Decoder, tokens: list[int], choices: Sequence[Choice], mine: Sequence[int], kind: CacheKind, found: Floats
) -> None:
    batches = _batches(tokens, choices, mine)
    cache = decoder.new_cache(kind)
    request = cache.open(len(tokens) + max(len(batch.tokens) for batch in batches))
    for batch in batches:
        rows = Rows(integers([request] * len(batch.tokens)), integers(batch.positions), integers(batch.parents))
        _add(decoder, cache, batch.tokens, rows, batch.terms, found)
        cache.keep(request, batch.start, range(batch.length))
    cache.close(request)


def _batches(tokens: list[int], choices: Sequence[Choice], mine: Sequence[int]) -> list[_Batch]:
    """A window's forwards, up to the last token that an option needs."""
    end = max(choices[number].at + len(choices[number].options[0]) for number in mine)
    batches = []
    for start in range(0, end, _BLOCK):
        chain = tokens[start : min(start + _BLOCK, end)]
        batch = _Batch(start, len(chain), [*chain], [*range(start, start + len(chain))], [-1, *range(len(chain) - 1)])
        for number in mine:
            true, *others = choices[number].options
            row = choices[number].at - start
            # The true line is the window's own text, which may go on in the next forward.
            batch.terms += [
                (row + place, token, number, 0) for place, token in enumerate(true) if 0 <= row + place < len(chain)
            ]
            if 0 <= row < len(chain):
                for option, line in enumerate(others, 1):
                    batch.branch(row, line, number, option)
        batches.append(batch)
    return batches


def _score_chains(
    decoder: Decoder, tokens: list[int], choices: Sequence[Choice], mine: Sequence[int], kind: CacheKind, found: Floats
) -> None:
    """The same for a decoder without trees: every option is read by a copy of the request."""
    cache = decoder.new_cache(kind)
    request, start = cache.open(len(tokens) + MOST_TOKENS), 0
    for number in sorted(mine, key=lambda one: choices[one].at):
        choice = choices[number]
        _read(decoder, cache, request, tokens[start : choice.at], start)
        start = choice.at
        for option, line in enumerate(choice.options):
            copied = cache.fork(request)
            chain = [tokens[start], *line[:-1]]
            terms = [(row, token, number, option) for row, token in enumerate(line)]
            _add(decoder, cache, chain, Rows.chains([(copied, start, len(chain))]), terms, found)
            cache.close(copied)
    cache.close(request)


def _read(decoder: Decoder, cache: Cache, request: int, tokens: list[int], start: int) -> None:
    for first in range(0, len(tokens), _BLOCK):
        piece = tokens[first : first + _BLOCK]
        rows = Rows.chains([(request, start + first, len(piece))])
        with torch.inference_mode():
            decoder.forward(integers(piece), rows, cache, integers([len(piece) - 1]))


def _add(
    decoder: Decoder,
    cache: Cache,
    tokens: list[int],
    rows: Rows,
    terms: Sequence[tuple[int, int, int, int]],
    found: Floats,
) -> None:
    """One forward, and the log-probabilities of its terms added to what they belong to."""
    wanted = sorted({row for row, *_ in terms})
    places = {row: place for place, row in enumerate(wanted)}
    with torch.inference_mode():
        logits = decoder.forward(integers(tokens), rows, cache, integers(wanted or [len(tokens) - 1])).logits
    if not bool(torch.isfinite(logits).all()):
        raise UserError("choices of the next line: expected finite logits, found others: a kernel is broken")
    step = max(1, _ELEMENTS // logits.shape[1])
    for first in range(0, len(terms), step):
        part = terms[first : first + step]
        picked = logits[integers([places[row] for row, *_ in part]).to(logits.device)]
        targets = integers([token for _, token, *_ in part]).to(logits.device)
        values = -token_nll(log_probabilities(picked), targets).cpu().numpy()
        np.add.at(found, ([choice for *_, choice, _ in part], [option for *_, option in part]), values)
