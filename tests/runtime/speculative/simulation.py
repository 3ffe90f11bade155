"""Machines and drafters of known cost, and the rounds that a controller has with them."""

from collections.abc import Callable, Iterator

import numpy as np

from runtime.speculative.draft_length import Controller
from runtime.speculative.measured import Drafted, Prior, Round


def simulate(
    controller: Controller,
    rounds: int,
    accept: Callable[[int, np.random.Generator], int],
    step: float,
    forward: Callable[[int], float],
    batch: int = 1,
    seed: int = 0,
    noise: float = 0.05,
) -> tuple[float, list[int]]:
    """Tokens per second, and every γ chosen, with accept(γ, random) tokens of each chain accepted."""
    rng = np.random.default_rng(seed)
    tokens, seconds, chosen = 0, 0.0, []
    for _ in range(rounds):
        resting = controller.resting(batch)
        gamma, requests = (0, batch) if resting else controller.next_budget(batch, 1000)
        drafts = [Drafted(gamma, accept(gamma, rng)) for _ in range(requests)] if gamma else []
        width = batch + requests * gamma
        spent = [gamma * step, forward(width)]
        draft, target = (one * rng.lognormal(0, noise) for one in spent)
        if resting:
            controller.rested(draft + target)
        else:
            controller.observe(Round(batch, gamma, tuple(drafts), width, draft, target))
        tokens += batch + sum(draft.accepted for draft in drafts)
        seconds += draft + target
        chosen.append(gamma)
    return tokens / seconds, chosen


def per_token(probability: float) -> Callable[[int, np.random.Generator], int]:
    """Each token is accepted with this probability if the one before it was."""

    def accept(gamma: int, rng: np.random.Generator) -> int:
        misses = np.flatnonzero(rng.random(gamma) >= probability)
        return int(misses[0]) if len(misses) else gamma

    return accept


def flat(width: int) -> float:
    """A forward at the memory's limit: hardly dearer when wider."""
    return 1.0 + 0.02 * (width - 1)


def linear(width: int) -> float:
    """A forward at the arithmetic's limit: eight rows cost eight times as much."""
    return float(width)


def mixture(width: int) -> float:
    """A forward that reads the more experts the more rows it has: of 64 experts and 8 a row, as they were seen."""
    return float(np.interp(width, (1, 2, 3, 4, 5, 8, 17, 33), (1.0, 1.4, 1.72, 2.0, 2.25, 2.8, 3.7, 4.4)))


def bent(width: int) -> float:
    """A forward at the memory's limit for a few rows, and at the arithmetic's for more."""
    return 1 + 0.02 * (width - 1) + 0.15 * max(0, width - 6)


def four_billion(width: int) -> float:
    """A forward of a model of four billion parameters at int4."""
    return float(np.interp(width, (1, 2, 4, 8, 17), (1.0, 1.01, 1.04, 1.16, 1.9)))


def wavering(seed: int) -> Iterator[float]:
    """How many times as long a machine's rounds take, one by one: by 30 % for a while, and now and then three times."""
    rng, slow = np.random.default_rng(seed), 0.0
    while True:
        slow = 0.9 * slow + 0.3 * (1 - 0.9**2) ** 0.5 * rng.normal()
        yield float(np.exp(slow)) * (3 if rng.random() < 0.04 else 1)


def expected(p: float, gamma: int, step: float, forward: Callable[[int], float], batch: int = 1) -> float:
    gained = gamma + 1 if p == 1 else (1 - p ** (gamma + 1)) / (1 - p)
    return batch * gained / (gamma * step + forward(batch * (gamma + 1)))


# Texts of a few hundred tokens, of a drafter that proposes seven at most, whatever γ.
LENGTH, TOKENS = 7, 192


def text(
    controller: Controller | int,
    p: float,
    forward: Callable[[int], float],
    seed: int,
    noise: float = 0.1,
    tokens: int = TOKENS,
    paces: Iterator[float] | None = None,
) -> float:
    """The time that a text takes on a machine without noise, where γ is chosen (or given) on one that has it.

    paces  of the machine, round by round, beside the noise of each time; None: one.
    """
    accepting, machine, took, found = np.random.default_rng(seed), np.random.default_rng(seed + 1), 0.0, 1
    accept = per_token(p)
    while found < tokens:
        room = tokens - found - 1
        if isinstance(controller, int):
            gamma = min(controller, room)
        else:
            gamma = 0 if (resting := controller.resting(1)) else controller.next_budget(1, room)[0]
        drafted = min(gamma, LENGTH)
        accepted = accept(drafted, accepting)
        spent = 0.15 + 0.01 * drafted if gamma else 0.0, forward(1 + drafted)
        pace = 1.0 if paces is None else next(paces)
        draft, target = (pace * one * machine.lognormal(0, noise) for one in spent)
        if not isinstance(controller, int):
            if resting:
                controller.rested(target)
            else:
                drafts = (Drafted(drafted, accepted),) if gamma else ()
                controller.observe(Round(1, gamma, drafts, 1 + drafted, draft, target))
        took += sum(spent)
        found += 1 + accepted
    return took


def known(p: float, forward: Callable[[int], float], length: int = 4) -> Prior:
    """What a report says of a drafter whose tokens are accepted with probability p."""
    accepted = tuple(p ** (depth + 1) for depth in range(length))
    return Prior(accepted, length, 0.15 + 0.01 * length, {width: forward(width) for width in (1, 2, 3, 5, 9)})
