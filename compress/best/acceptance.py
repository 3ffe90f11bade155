"""How many drafted tokens each drafter gets accepted, by depth: measured once, on the original, with long drafts."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from compress.best.costs import WIDTHS
from compress.progress import Progress
from compress.report.pairing import Drafting, is_tree
from compress.report.schema_speed import PLAIN
from runtime.speculative.costs import width_cost

# The longest draft: one more row in a forward than that is the widest that is timed.
LENGTH = WIDTHS[-1] - 1
_BESIDE_LENGTH, _BESIDE_PROMPTS, _BESIDE_TOKENS = 4, 6, 33


@dataclass(frozen=True)
class Drafts:
    """One drafter's rounds.

    drafted, accepted  by depth: tokens a round, on average over all rounds.
    milliseconds       of drafting, for a drafted token.
    beside             milliseconds of a round that this drafter costs beside drafting: a draft model leaves other data
                       in the caches, and keeps count.
    """

    drafter: str
    drafted: tuple[float, ...]
    accepted: tuple[float, ...]
    milliseconds: float
    beside: float = 0.0

    def shares(self, length: int) -> list[float]:
        """Of rounds with drafts of 0, 1, … `length` tokens, where that is the most: long ones and none cost otherwise
        than as many of the mean length."""
        reached = [1.0, *self.drafted[:length], 0.0]
        return [max(0.0, at - above) for at, above in itertools.pairwise(reached)]


@dataclass(frozen=True)
class Pace:
    """Who is predicted to decode the fastest: `draft_length` γ, its drafter, and tokens a second."""

    drafter: str
    draft_length: int
    tokens_per_second: float


def measure(drafting: Drafting, prompts: Sequence[Sequence[int]], new_tokens: int, progress: Progress) -> list[Drafts]:
    """Drafts of LENGTH tokens by every drafter that proposes chains, for the original (the target)."""
    names = [name for name in drafting.names if not is_tree(name) and name != "nested"]
    found: list[Drafts] = []
    for done, name in enumerate(names):
        progress("acceptance", done, len(names))
        speculator = drafting.speculator(name, LENGTH)
        counts = [speculator.generate([prompt], max_new_tokens=new_tokens, stop=())[0].metrics for prompt in prompts]
        rounds = max(1, sum(one.rounds for one in counts))
        depths = range(LENGTH)
        drafted = tuple(sum(dict(enumerate(one.drafted_at)).get(d, 0) for one in counts) / rounds for d in depths)
        accepted = tuple(sum(dict(enumerate(one.accepted_at)).get(d, 0) for one in counts) / rounds for d in depths)
        # The first drafts read the prompt, which longer texts pay off.
        tokens = sum(one.drafted - one.first_drafted for one in counts)
        spent = sum(one.draft_seconds - one.first_seconds for one in counts)
        found.append(Drafts(name, drafted, accepted, 1e3 * max(0.0, spent) / tokens if tokens > 0 else 0.0))
    progress("acceptance", len(names), len(names))
    return found


def beside(
    drafting: Drafting, names: Sequence[str], prompts: Sequence[Sequence[int]], rounds: Mapping[int, float]
) -> dict[str, float]:
    """Milliseconds of a round that each drafter costs beside drafting, 0 for one that drafts nothing here.

    drafting  of a model whose forwards are short, so that they hide nothing.
    rounds    milliseconds of its rounds by width, without drafts.
    """
    over = {width: spent / rounds[1] for width, spent in rounds.items()}
    found = {}
    for name in names:
        speculator, more = drafting.speculator(name, _BESIDE_LENGTH), []
        for prompt in prompts[:_BESIDE_PROMPTS]:
            metrics = speculator.generate([prompt], max_new_tokens=_BESIDE_TOKENS, stop=())[0].metrics
            if metrics.rounds and metrics.drafted:
                spent = metrics.seconds - metrics.prompt_seconds - metrics.draft_seconds
                width = 1 + metrics.drafted / metrics.rounds
                more.append(1e3 * spent / metrics.rounds - rounds[1] * width_cost(over, width))
        found[name] = max(0.0, median(more)) if more else 0.0
    return found


def pace(rounds: Mapping[int, float], drafts: Sequence[Drafts]) -> Pace:
    """The fastest of plain decoding and all drafters at all γ, for rounds of so many milliseconds by width."""
    over = {width: spent / rounds[1] for width, spent in rounds.items()}
    best = Pace(PLAIN, 0, 1e3 / rounds[1])
    for one in drafts:
        for length in range(1, LENGTH + 1):
            drafted, gained = sum(one.drafted[:length]), 1.0 + sum(one.accepted[:length])
            forwards = sum(share * width_cost(over, 1 + n) for n, share in enumerate(one.shares(length)))
            spent = one.milliseconds * drafted + one.beside + rounds[1] * forwards
            if (rate := 1e3 * gained / spent) > best.tokens_per_second:
                best = Pace(one.drafter, length, rate)
    return best


def to_dict(drafts: Drafts) -> dict[str, Any]:
    """Plain data; `from_dict` reads it."""
    return {
        "drafter": drafts.drafter,
        "drafted": list(drafts.drafted),
        "accepted": list(drafts.accepted),
        "milliseconds": drafts.milliseconds,
        "beside": drafts.beside,
    }


def from_dict(data: Mapping[str, Any]) -> Drafts:
    return Drafts(
        str(data["drafter"]),
        tuple(data["drafted"]),
        tuple(data["accepted"]),
        float(data["milliseconds"]),
        float(data["beside"]),
    )
