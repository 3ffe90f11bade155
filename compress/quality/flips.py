"""Choices of both models, paired: which are right, which flip, and how small a loss they could have shown."""

from collections.abc import Sequence

import numpy as np

from compress.quality import mcnemar
from compress.quality.choices import OPTIONS, Choice
from compress.quality.figures import Flips
from compress.quality.intervals import LEVEL, POWER, normal
from compress.quality.statistics import Floats


def lengths(choices: Sequence[Choice], sizes: dict[tuple[int, ...], int]) -> Floats:
    """UTF-8 bytes (choices, options) of every option, by its tokens; at least 1."""
    return np.array([[max(1, sizes[option]) for option in choice.options] for choice in choices], dtype=np.float64)


def flips(original: Floats, compressed: Floats, sizes: Floats) -> Flips:
    """Of the log-likelihoods (n, options) of both models, nats; the true option is the first.

    sizes  bytes (n, options): a model chooses the highest log-likelihood per byte, as evaluation harnesses
           do where options differ in length (`acc_norm`). The true one has to be above all others.
    """
    chosen = [np.argmax((scores / sizes)[:, ::-1], axis=1) for scores in (original, compressed)]
    before, after = (picked == OPTIONS - 1 for picked in chosen)
    count, lost, won = len(before), int((before & ~after).sum()), int((~before & after).sum())
    return Flips(
        choices=count,
        options=OPTIONS,
        original=float(before.mean()),
        compressed=float(after.mean()),
        lost=lost,
        won=won,
        changed=int((chosen[0] != chosen[1]).sum()),
        p_value=mcnemar.p_value(lost, won),
        ci95=mcnemar.interval(lost, won, count, normal(1 - LEVEL / 2)),
        smallest_loss=mcnemar.smallest_loss(count, (lost + won) / count, LEVEL, POWER),
        power=POWER,
    )
