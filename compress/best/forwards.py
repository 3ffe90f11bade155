"""Whole forwards timed, and what a round takes beyond its forward: what products alone do not tell of a model.

Beside the original run stand-ins of random codes, all layers held alike.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from compress.best.costs import KEPT, WIDTHS, Costs, alike, products_alone
from compress.best.space import Assignment, Unit
from compress.best.stand_in import stand_in
from compress.progress import Progress
from runtime.checkpoints.directory import Checkpoint
from runtime.contract import HasDecoder
from runtime.model.layers import weight_bytes
from runtime.model.load import Model
from runtime.speculate import Speculator
from runtime.speculative.costs import Prober
from runtime.speculative.draft import Draft, EachText, Request

_LENGTH = WIDTHS[-1] - 1
# Samples of each model, fewer once the seconds are spent, but at least so many.
_MOST, _LEAST, _SECONDS = 21, 5, 4.0
_ROUNDS, _TOKENS = 5, 25
_ROUND_WIDTHS = (1, 2, 5, 9)

Forwards = dict[int, float]
"""Milliseconds by width, for each of costs.WIDTHS."""


def time_model(
    original: Model, checkpoint: Checkpoint, units: tuple[Unit, ...], text: Sequence[int], progress: Progress
) -> Costs:
    """All times that predictions are made of.

    text  tokens that forwards come after.

    Raises UserError where no kernel takes a layer.
    """
    decoder: Any = original.decoder
    dtype = checkpoint.tensor(f"{units[0].prefixes[0]}.weight").dtype
    alone = products_alone(decoder.kernel, units, dtype, weight_bytes(decoder.parts), progress)
    ways = sorted({key[2] for key in alone.products} - {KEPT})

    def made(how: str) -> Model | None:
        progress("forwards", ways.index(how), len(ways))
        return stand_in(original, checkpoint, units, _alike(units, how))

    own, others = beside(original, [partial(made, how) for how in ways], text)
    progress("forwards", len(ways), len(ways))
    timed = [(how, found) for how, found in zip(ways, others, strict=True) if found is not None]
    fitted = alone.fitted(units, [(KEPT, own), *timed])
    beyond = beyond_forwards(shortest(original, checkpoint, units, fitted)[0], text)
    return replace(fitted, beyond=tuple(beyond[width] for width in WIDTHS))


def shortest(original: Model, checkpoint: Checkpoint, units: tuple[Unit, ...], costs: Costs) -> tuple[Model, Forwards]:
    """Of the stand-ins the one with the shortest forward, and its rounds by width; the original where there is none."""
    ways = {key[2] for key in costs.products}
    chosen = min((_alike(units, how) for how in sorted(ways)), key=lambda one: costs.forward(units, one)[1])
    model = stand_in(original, checkpoint, units, chosen)
    return (original, costs.round(units, _alike(units, KEPT))) if model is None else (model, costs.round(units, chosen))


def _alike(units: tuple[Unit, ...], how: str) -> Assignment:
    return {unit.name: option for unit, option in alike(units, how).items()}


def whole_forward(model: HasDecoder, text: Sequence[int]) -> Forwards:
    """Of a model's forwards after the text: medians."""
    prober = Prober(model, text, _LENGTH, WIDTHS)
    _sample([prober])
    return {width: median(prober.times[width]) for width in WIDTHS}


def beside(
    original: HasDecoder, others: Sequence[Callable[[], HasDecoder | None]], text: Sequence[int]
) -> tuple[Forwards, list[Forwards | None]]:
    """Forwards of the original, and of others, each made, timed in turns with the original, and let go of again.

    A machine's pace changes from minute to minute: what counts of another one is its ratio to the original, sample by
    sample. None for another one that there cannot be.
    """
    base = Prober(original, text, _LENGTH, WIDTHS)
    ratios: list[Forwards | None] = []
    for make in others:
        model = make()
        if model is None:
            ratios.append(None)
            continue
        prober, before = Prober(model, text, _LENGTH, WIDTHS), base.samples
        _sample([base, prober])
        ratios.append(
            {
                width: median(b / a for a, b in zip(base.times[width][before:], prober.times[width], strict=True))
                for width in WIDTHS
            }
        )
    if not base.samples:
        _sample([base])
    own = {width: median(base.times[width]) for width in WIDTHS}
    found = [None if one is None else {width: own[width] * one[width] for width in WIDTHS} for one in ratios]
    return own, found


def beyond_forwards(model: Model, prompt: Sequence[int]) -> Forwards:
    """Milliseconds of a round beyond its forward and its draft, by width: choosing and checking tokens, keeping count.

    It is the same for every model: one whose forwards are short tells it best.
    """
    prober = Prober(model, prompt, _LENGTH, _ROUND_WIDTHS)
    more: dict[int, list[float]] = {width: [] for width in _ROUND_WIDTHS}
    speculators = {width: Speculator(model, _SameTokens(), width - 1) for width in _ROUND_WIDTHS}
    for _ in range(_ROUNDS):
        prober.sample()
        for width, speculator in speculators.items():
            metrics = speculator.generate([prompt], max_new_tokens=_TOKENS, stop=())[0].metrics
            spent = metrics.seconds - metrics.prompt_seconds - metrics.draft_seconds
            more[width].append(1e3 * spent / max(1, metrics.rounds) - prober.times[width][-1])
    known = {width: max(0.0, median(found)) for width, found in more.items()}
    return {width: interpolated(known, width) for width in WIDTHS}


class _SameTokens(EachText[None]):
    """Drafts as many tokens as it may, all the same: wrong ones cost what right ones do."""

    name = "same tokens"

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See Drafter."""
        return [Draft.chain([1] * budget) for budget in budgets]


def interpolated(known: Mapping[int, float], width: float) -> float:
    """Linear between known widths, and flat beyond them."""
    return float(np.interp(width, list(known), list(known.values())))


def _sample(probers: Sequence[Prober]) -> None:
    """Samples of all, in turns."""
    started = time.monotonic()
    for number in range(_MOST):
        if number >= _LEAST and time.monotonic() - started > _SECONDS:
            break
        for prober in probers:
            prober.sample()
