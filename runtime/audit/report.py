"""What an audit says: a record of every check, and one verdict made of them."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["lossless", "differs", "cannot tell"]


class Record(BaseModel):
    """Parts of an audit's JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GreedyRow(Record):
    """Texts of one way of asking; `first_difference` from the reference, in words."""

    way: str
    drafts: bool
    texts: int
    equal: int
    first_difference: str | None


class Accused(Record):
    """A test that failed: its p-value on the half that confirms, corrected for the number of tests."""

    test: str
    p: float


class SamplingRow(Record):
    """One sampling setting. `tests` were made; tokens are of the requests that were answered, needed for `effect`."""

    setting: str
    drafts: bool
    requests: int
    tokens: int
    tokens_needed: int
    tests: int
    accused: list[Accused]


class LogprobsEntry(Record):
    """Errors against float64 in nats."""

    drafts: bool
    tokens: int
    largest: float
    mean: float


class Audit(Record):
    """An audit of one engine.

    effect   the total variation between what is sampled and what should be that would have been found.
    skipped  what was not checked, and why.
    """

    schema_version: Literal[1] = 1
    engine: str
    versions: dict[str, str]
    date: str
    requests: int
    seconds: float
    greedy_reference: str
    greedy: list[GreedyRow]
    effect: float
    sampling: list[SamplingRow]
    logprobs: list[LogprobsEntry]
    logprobs_tolerance: float
    skipped: list[str]
    verdict: Verdict
    sentence: str


def judge(
    greedy: list[GreedyRow],
    sampling: list[SamplingRow],
    logprobs: list[LogprobsEntry],
    tolerance: float,
    new_tokens: int,
    unsure: list[str],
) -> tuple[Verdict, str]:
    """The verdict and its sentence. `unsure`: why something that was asked for says nothing."""
    findings = [*_greedy(greedy), *_sampling(sampling), *_logprobs(logprobs, tolerance)]
    if findings:
        return "differs", "; ".join(findings)
    short = sum(max(0, row.tokens_needed - row.tokens) for row in sampling if row.drafts)
    if short:
        unsure = [*unsure, f"needs {-(-short // new_tokens)} more requests"]
    if unsure:
        return "cannot tell", "; ".join(unsure)
    parts = []
    if drafted := [row for row in greedy if row.drafts]:
        parts.append(f"{sum(row.equal for row in drafted)} greedy texts with drafts are equal to the reference")
    if sampled := [row for row in sampling if row.drafts]:
        tokens = sum(row.tokens for row in sampled)
        parts.append(f"{tokens} sampled tokens are the model's by {sum(row.tests for row in sampled)} tests")
    if logprobs:
        parts.append(f"log-probabilities are right within {max(row.largest for row in logprobs):.1g}")
    return "lossless", "; ".join(parts)


def _greedy(rows: list[GreedyRow]) -> list[str]:
    wrong = [row for row in rows if row.equal < row.texts]
    if not wrong:
        return []
    plain = [row for row in wrong if not row.drafts]
    # Where it is not the drafts that change texts, that is said first.
    shown = plain[0] if plain else wrong[0]
    count = f"{shown.texts - shown.equal} of {shown.texts} greedy texts {shown.way} differ ({shown.first_difference})"
    return [count + (", so that batches and repeats alone change them" if plain else "")]


def _sampling(rows: list[SamplingRow]) -> list[str]:
    found = []
    for row in (row for row in rows if row.drafts and row.accused):
        plain = next((other for other in rows if not other.drafts and other.setting == row.setting), None)
        tests = ", ".join(f"{one.test} (p = {one.p:.1g})" for one in row.accused[:3])
        more = f" and {len(row.accused) - 3} more" if len(row.accused) > 3 else ""
        cause = ""
        if plain is not None:
            cause = ", without drafts too" if plain.accused else ", not without drafts"
        found.append(f"sampling at {row.setting} is not the model's{cause}: {tests}{more}")
    return found


def _logprobs(rows: list[LogprobsEntry], tolerance: float) -> list[str]:
    return [
        f"log-probabilities {'with' if row.drafts else 'without'} drafts are off by up to {row.largest:.3g} nats"
        for row in rows
        if row.largest > tolerance
    ]
