"""The learning rate of a step: up, and down again by a cosine, or late and straight (warm-up, stable, decay)."""

import math

from compress.recipe.training import Settings


def learning_rate_at(step: int, steps: int, settings: Settings) -> float:
    """The learning rate of a step (0 … steps - 1).

    Linear up over the share `warmup` of the steps. Then cosine: half a cosine down to the share `min_lr_ratio` of the
    rate at the last step (SGDR without restarts, Loshchilov and Hutter 2017); wsd: constant, then linear down to it
    over the share `decay` (MiniCPM, Hu et al. 2024).
    """
    if not 0 <= step < steps:
        raise ValueError(f"expected a step from 0 to {steps - 1}, found {step}")
    warm, falling = (min(round(share * steps), steps) for share in (settings.warmup, settings.decay))
    floor, first = settings.min_lr_ratio, steps - falling
    if step < warm:
        share = (step + 1) / (warm + 1)
    elif settings.schedule == "cosine":
        done = (step - warm) / max(steps - 1 - warm, 1)
        share = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
    else:
        share = 1.0 if step < first else 1 - (1 - floor) * (step - first + 1) / falling
    return settings.learning_rate * share
