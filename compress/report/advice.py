"""How many tokens to draft, if any: what was measured, and the usual bands beside it. Pure functions."""

from collections.abc import Mapping, Sequence

from compress.report.schema_speed import Advice, Pairing
from runtime.engine.metrics import predicted_speedup
from runtime.speculative.costs import width_cost

MAX_DRAFT_LENGTH = 16
# A longer draft must gain at least this much over a shorter one: less is within the noise of a measurement.
_WORTH_LENGTHENING = 1.01

LONG, SHORT, NONE = "7 to 10", "3 to 5", "another draft or none"


def band(acceptance_rate: float) -> str:
    """The usual draft lengths at this α: 7 to 10 from 0.7 on, 3 to 5 from 0.5 on, else another draft or none."""
    return LONG if acceptance_rate >= 0.7 else SHORT if acceptance_rate >= 0.5 else NONE


def fit_acceptance(survival: Sequence[float]) -> float:
    """The per-token acceptance p that explains the survival best, were every token accepted independently.

    survival[i]  share of drafts of which at least i + 1 tokens were accepted (report.json's `accepted_by_position`).
    Token i is judged where the i before it were accepted, so p = Σ survival[i] / Σ survival[i − 1], survival[−1] = 1:
    the maximum-likelihood estimate. Raises ValueError without positions.
    """
    if not survival:
        raise ValueError("no drafted position to fit")
    return sum(survival) / sum([1.0, *survival[:-1]])


def tokens_per_round(survival: Sequence[float], draft_length: int) -> float:
    """τ at another draft length: 1 + Σ survival, continued beyond what was measured by the fitted p."""
    known = list(survival[:draft_length])
    p = fit_acceptance(survival) if survival else 0.0
    while len(known) < draft_length:
        known.append((known[-1] if known else 1.0) * p)
    return 1.0 + sum(known)


def iid_speedup(p: float, draft_length: float, c: float, v: float) -> float:
    """The textbook's (1 − p^(γ+1)) / ((1 − p)(γc + v)) (Leviathan et al., 2211.17192, theorem 3.8, where v = 1)."""
    tau = draft_length + 1.0 if p >= 1 else (1 - p ** (draft_length + 1)) / (1 - p)
    return predicted_speedup(tau, draft_length, c, v)


def expected_speedup(survival: Sequence[float], draft_length: int, c: float, widths: Mapping[int, float]) -> float:
    """Speed over plain decoding at any draft length, from measured acceptance, draft cost and width costs."""
    tau = tokens_per_round(survival, draft_length)
    return predicted_speedup(tau, draft_length, c, width_cost(widths, draft_length + 1))


def advise(acceptance_rate: float, survival: Sequence[float], c: float, widths: Mapping[int, float]) -> Advice:
    """The draft length in 0..16 with the most expected tokens per time, and why, in plain words.

    survival  share of drafts accepted up to each position; c  draft step over a target forward of width 1; widths
    measured costs of target forwards over width 1. Of lengths within 1 % of each other the shorter one is taken: it
    stands on measured positions rather than on extrapolated ones.
    """
    usual = band(acceptance_rate)
    speeds = [expected_speedup(survival, length, c, widths) for length in range(MAX_DRAFT_LENGTH + 1)]
    best = max(speeds)
    length = next(i for i, speed in enumerate(speeds) if speed * _WORTH_LENGTHENING >= best)
    suggestion = f"drafting {usual} tokens" if usual != NONE else usual
    opening = f"An acceptance rate of {acceptance_rate:.2f} alone suggests {suggestion}."
    if length == 0:
        nearest = max(range(1, MAX_DRAFT_LENGTH + 1), key=speeds.__getitem__)
        why = (
            f"{opening} Speculation does not pay here: a draft step costs {c:.2f} of a target step and verifying "
            f"{nearest + 1} tokens at once {width_cost(widths, nearest + 1):.2f}, so even the best draft length "
            f"({nearest}) promises {speeds[nearest]:.2f} times the plain speed."
        )
        return Advice(band=usual, draft_length=0, why=why)
    why = (
        f"{opening} With a draft step at {c:.2f} of a target step and {length + 1} tokens verified at "
        f"{width_cost(widths, length + 1):.2f} of one, {length} drafted "
        f"{'token gives' if length == 1 else 'tokens give'} the most: {speeds[length]:.2f} times the plain speed is "
        "expected."
    )
    if length > len(survival):
        why += f" Acceptance beyond position {len(survival)} is extrapolated."
    return Advice(band=usual, draft_length=length, why=why)


def settled(row: Pairing, draft_length: int, chosen: bool) -> Advice:
    """What the timing says: `row` is the fastest drafter's, with an α.

    draft_length  what its rounds drafted; 0: it does not pay.
    chosen        γ was chosen every round; otherwise it was the same in all of them.
    """
    gamma, gained = row.draft_length or 0.0, row.speedup or 0.0
    usual = band(row.acceptance_rate or 0.0)
    how = f"γ chosen every round, {gamma:.1f} on average," if chosen else f"{gamma:.1f} tokens drafted a round"
    if not draft_length:
        why = (
            f"Speculation does not pay on this machine: the fastest drafter, {row.drafter}, with {how} gave "
            f"{gained:.2f} times the plain speed."
        )
        return Advice(band=usual, draft_length=0, why=why)
    why = f"The fastest way was measured: the drafter {row.drafter} with {how} gave {gained:.2f} times the plain speed."
    return Advice(band=usual, draft_length=draft_length, why=why)
