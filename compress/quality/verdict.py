"""The verdict on a compressed model: better, same, worse, or cannot tell, from paired losses and paired choices.

Each of the two tests is two-sided at the level, so that an equal model is called worse by either at most half the level
of the time, and at most the level by both together. "Same" takes a test of its own, that of equivalence (Schuirmann,
1987): no sign of a change is no sign of there being none.
"""

import math

from compress.quality import mcnemar
from compress.quality.figures import Call, Flips, Part, Verdict
from compress.quality.intervals import LEVEL, POWER, normal, student
from compress.quality.paired import PairedLosses

# Within these a change is none that matters: of perplexity, relative; of right choices, a share of all.
MARGIN, CHOICES_MARGIN = 0.01, 0.02
# Standard errors that a margin has to span for two equal models to be called the same at the power.
_EQUIVALENCE = normal(1 - LEVEL) + normal((1 + POWER) / 2)


def judge(losses: PairedLosses, flips: Flips | None) -> Verdict:
    """The verdict of paired losses, and of choices where there are any."""
    freedom = losses.blocks - 1
    low, high = _interval(losses, student(1 - LEVEL / 2, freedom))
    near = [abs(bound) < MARGIN for bound in _interval(losses, student(1 - LEVEL, freedom))]
    signs: dict[Part, int] = {"losses": 1 if low > 0 else -1 if high < 0 else 0, "choices": 0}
    alike = True
    if flips is not None:
        if flips.p_value <= LEVEL:
            signs["choices"] = 1 if flips.lost > flips.won else -1
        bounds = mcnemar.interval(flips.lost, flips.won, flips.choices, normal(1 - LEVEL))
        alike = max(map(abs, bounds)) < CHOICES_MARGIN
    call: Call
    by: list[Part]
    if 1 in signs.values():
        call, by = "worse", [name for name, sign in signs.items() if sign > 0]
    elif -1 in signs.values():
        call, by = "better", [name for name, sign in signs.items() if sign < 0]
    else:
        call, by = "same" if all(near) and alike else "cannot tell", ["losses"] if flips is None else [*signs]
    open_ = call == "cannot tell"
    return Verdict(
        call=call,
        level=LEVEL,
        power=POWER,
        change=math.expm1(losses.mean),
        ci95=(low, high),
        blocks=losses.blocks,
        unit=losses.unit,
        margin=MARGIN,
        choices_margin=CHOICES_MARGIN,
        within_margin=all(near),
        smallest_change=math.expm1((student(1 - LEVEL / 2, freedom) + student(POWER, freedom)) * losses.error),
        by=by,
        needs_tokens=needed_tokens(losses) if open_ and not all(near) else None,
        needs_choices=None if flips is None or not open_ or alike else needed_choices(flips),
    )


def needed_tokens(losses: PairedLosses) -> int:
    """Tokens of such text with which equal models are called the same at the power; two digits, rounded up."""
    return _rounded(losses.tokens * (_EQUIVALENCE * losses.error / math.log1p(MARGIN)) ** 2, losses.tokens)


def needed_choices(flips: Flips) -> int:
    """The same of choices, with as large a share of flips."""
    discordant = (flips.lost + flips.won) / flips.choices
    return _rounded(mcnemar.needed_pairs(discordant, CHOICES_MARGIN, _EQUIVALENCE), flips.choices)


def _rounded(needed: float, had: int) -> int:
    """Two digits, rounded up; never fewer than there were, which were too few."""
    digits = 10 ** max(0, math.floor(math.log10(max(needed, had, 1))) - 1)
    return math.ceil(max(needed, had + 1) / digits) * digits


def _interval(losses: PairedLosses, spread: float) -> tuple[float, float]:
    """The change of perplexity at `spread` errors to each side."""
    return math.expm1(losses.mean - spread * losses.error), math.expm1(losses.mean + spread * losses.error)
