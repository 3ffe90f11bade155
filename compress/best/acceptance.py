"""How many drafted tokens each drafter gets accepted, by depth: measured once, on the original, with long drafts.

Plain decoding is among what is measured: what a round takes beyond the forward (choosing a token, keeping count) is the
same for every model and drafter, and more than the forward where the model is small.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from compress.best.costs import WIDTHS
from compress.progress import Progress
from compress.report.pairing import Drafting, is_tree
from compress.report.schema_speed import PLAIN
from runtime.speculate import Speculator
from runtime.speculative.costs import width_cost

# The longest draft: one more row in a forward than that is the widest that is timed.
LENGTH = WIDTHS[-1] - 1


@dataclass(frozen=True)
class Drafts:
    """One drafter's rounds.

    drafted, accepted  by depth: tokens a round, on average over all rounds.
    milliseconds       of drafting, for a drafted token; of PLAIN: a whole round.
    """

    drafter: str
    drafted: tuple[float, ...]
    accepted: tuple[float, ...]
    milliseconds: float


@dataclass(frozen=True)
class Pace:
    """Who is predicted to decode the fastest: `draft_length` γ, its drafter, and tokens a second."""

    drafter: str
    draft_length: int
    tokens_per_second: float


def measure(drafting: Drafting, prompts: Sequence[Sequence[int]], new_tokens: int, progress: Progress) -> list[Drafts]:
    """PLAIN, then drafts of LENGTH tokens by every drafter that proposes chains, for the original (the target)."""
    names = [name for name in drafting.names if not is_tree(name) and name != "nested"]
    plain = Speculator(drafting.target)
    plain.generate(prompts[:1], max_new_tokens=new_tokens, stop=())
    alone = [plain.generate([prompt], max_new_tokens=new_tokens, stop=())[0].metrics for prompt in prompts]
    rates = [1e3 / rate for one in alone if (rate := one.decode_tokens_per_second)]
    found = [Drafts(PLAIN, (), (), median(rates) if rates else 0.0)]
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


def pace(forward: Mapping[int, float], drafts: Sequence[Drafts], beyond: float) -> Pace:
    """The fastest of plain decoding and all drafters at all γ, for forwards of so many milliseconds by width.

    beyond  milliseconds of a round beyond its forward.
    """
    over = {width: spent / forward[1] for width, spent in forward.items()}
    best = Pace(PLAIN, 0, 1e3 / (forward[1] + beyond))
    for one in drafts:
        for length in range(1, LENGTH + 1):
            drafted, gained = sum(one.drafted[:length]), 1.0 + sum(one.accepted[:length])
            spent = beyond + one.milliseconds * drafted + forward[1] * width_cost(over, 1 + drafted)
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
    }


def from_dict(data: Mapping[str, Any]) -> Drafts:
    return Drafts(str(data["drafter"]), tuple(data["drafted"]), tuple(data["accepted"]), float(data["milliseconds"]))
