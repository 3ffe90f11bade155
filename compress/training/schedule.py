"""The learning rate of a step: up, and down again by a cosine, or late and straight (warm-up, stable, decay)."""

import math

from compress.recipe.training import Settings


def learning_rate_at(step: int, steps: int, settings: Settings) -> float:
    """The learning rate of a step (0 … steps - 1)."""
    return settings.learning_rate * share(step, steps, settings)


def share(step: int, steps: int, settings: Settings) -> float:
    """The share of the peak rate, 0 to 1."""
    if settings.schedule == "cosine":
        return cosine(step, steps, settings.warmup, settings.min_lr_ratio)
    return warmup_stable_decay(step, steps, settings.warmup, settings.decay, settings.min_lr_ratio)


def cosine(step: int, steps: int, warmup: float, floor: float) -> float:
    """Linear up over the share `warmup` of the steps, then half a cosine down to `floor` at the last one.

    SGDR without restarts (Loshchilov and Hutter 2017).
    """
    _check(step, steps)
    warm = _count(warmup, steps)
    if step < warm:
        return (step + 1) / (warm + 1)
    done = (step - warm) / max(steps - 1 - warm, 1)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def warmup_stable_decay(step: int, steps: int, warmup: float, decay: float, floor: float) -> float:
    """Linear up, constant, then linear down over the share `decay` to `floor` at the last step.

    The schedule of MiniCPM (Hu et al. 2024).
    """
    _check(step, steps)
    warm, falling = _count(warmup, steps), _count(decay, steps)
    if step < warm:
        return (step + 1) / (warm + 1)
    first = steps - falling
    if step < first:
        return 1.0
    return 1 - (1 - floor) * (step - first + 1) / falling


def _count(share: float, steps: int) -> int:
    return min(round(share * steps), steps)


def _check(step: int, steps: int) -> None:
    if not 0 <= step < steps:
        raise ValueError(f"expected a step from 0 to {steps - 1}, found {step}")
