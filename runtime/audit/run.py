"""The audit of an engine: which checks, in which order, within how many requests and seconds."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from time import monotonic

from runtime.audit import greedy, logprobs
from runtime.audit.asks import Ask, Budget, Engine
from runtime.audit.known import LETTERS
from runtime.audit.report import Accused, Audit, GreedyRow, LogprobsEntry, SamplingRow, judge
from runtime.audit.sampled import PROMPTS, SETTINGS, Known, Samples, Setting, asks, gather, is_broad, p_values
from runtime.audit.statistics import accusations, needed


@dataclass(frozen=True)
class Plan:
    """What to check.

    prompts     texts for greedy decoding; none: the known model's own.
    settings    how tokens are sampled.
    requests, seconds  bounds of the whole audit.
    new_tokens  of each sampled text; greedy_tokens  of each greedy one, which is asked for `repeats` times.
    effect      total variation of a sampled distribution from the model's that has to be found.
    tolerance   nats by which log-probabilities may be off.
    seed        the first request's; the others follow it.
    """

    prompts: tuple[Ask, ...] = ()
    settings: tuple[Setting, ...] = SETTINGS
    requests: int = 3000
    seconds: float = 300.0
    new_tokens: int = 24
    greedy_tokens: int = 48
    repeats: int = 2
    effect: float = 0.05
    tolerance: float = 0.05
    seed: int = 1


def audit(
    engine: Engine, known: Known | None, plan: Plan, progress: Callable[[str], None] = lambda said: None
) -> Audit:
    """Runs the checks; what the bounds left out is in the verdict. Raises UserError for an engine that fails."""
    budget = Budget(plan.requests, plan.seconds)
    model = None if known is None else known.target
    progress("greedy texts")
    texts = plan.prompts or (() if known is None else known_prompts(known, plan.greedy_tokens))
    found = greedy.check(engine, texts, budget, plan.repeats, model if not plan.prompts else None)
    greedy_rows = [
        GreedyRow(
            way=way.name,
            drafts=way.drafts,
            texts=way.texts,
            equal=way.equal,
            first_difference=None if way.first is None else _told(way.first),
        )
        for way in found.ways
    ]
    sampling, errors, skipped, unsure = [], [], [], []
    if not engine.has_plain:
        skipped.append("no plain decoding to compare with (--plain-url or --send-plain)")
        if known is None:
            unsure.append("nothing to compare greedy texts with: give --plain-url or --send-plain, or --known")
    if known is None:
        skipped.append("sampling and log-probabilities (they need --known: a model of known distributions)")
    else:
        progress("log-probabilities")
        errors = [
            LogprobsEntry(**vars(row)) for row in logprobs.check(engine, known, budget, plan.new_tokens, plan.seed)
        ]
        if not errors:
            skipped.append("log-probabilities (the engine returned none)")
        sampling = sample(engine, known, plan, budget, progress)
    if not any(row.drafts for row in greedy_rows):
        unsure.append("no greedy text was asked for within the bounds")
    verdict, sentence = judge(greedy_rows, sampling, errors, plan.tolerance, plan.new_tokens, unsure)
    return Audit(
        engine=engine.name,
        versions=versions(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        requests=plan.requests - budget.requests,
        seconds=round(monotonic() - budget.started, 1),
        greedy_reference=found.reference,
        greedy=greedy_rows,
        effect=plan.effect,
        sampling=sampling,
        logprobs=errors,
        logprobs_tolerance=plan.tolerance,
        skipped=skipped,
        verdict=verdict,
        sentence=sentence,
    )


def sample(
    engine: Engine, known: Known, plan: Plan, budget: Budget, progress: Callable[[str], None]
) -> list[SamplingRow]:
    """One row a setting with drafts; of those that are accused one without drafts, too: whose fault it is."""
    gathered: list[tuple[Setting, Samples, bool]] = []
    each = budget.requests // max(1, len(plan.settings))
    for number, setting in enumerate(plan.settings):
        progress(f"sampling at {setting}")
        asked = asks(known, setting, each, plan.new_tokens, plan.seed + number * each, True)
        gathered.append((setting, gather(engine, known, setting, asked, budget), True))
    rows = judged(gathered, plan)
    accused = [(number, row) for number, row in enumerate(rows) if row.accused]
    if not accused or not engine.has_plain:
        return rows
    # The bounds are for the verdict; who is to blame takes as many requests again.
    again = Budget(sum(row.requests for _, row in accused), plan.seconds)
    plain = []
    for number, _ in accused:
        setting, samples, _ = gathered[number]
        progress(f"sampling at {setting}, without drafts")
        asked = asks(known, setting, len(samples.tokens), plan.new_tokens, plan.seed + number * each, False)
        plain.append((setting, gather(engine, known, setting, asked, again), False))
    budget.requests -= sum(len(samples.tokens) for _, samples, _ in plain)
    return rows + judged(plain, plan)


def judged(gathered: Sequence[tuple[Setting, Samples, bool]], plan: Plan) -> list[SamplingRow]:
    """The tests of all settings together, so that their number is corrected for once."""
    halves: list[dict[str, float]] = [{}, {}]
    for number, (_, samples, _) in enumerate(gathered):
        for half in (0, 1):
            found = p_values(samples.half(half), plan.seed + half)
            halves[half] |= {f"{number} {name}": p for name, p in found.items()}
    broad = [name for name in halves[0] if is_broad(name.split(" ", 1)[1])]
    wrong = accusations(halves[0], halves[1], broad)
    rows = []
    for number, (setting, samples, drafts) in enumerate(gathered):
        own = f"{number} "
        rows.append(
            SamplingRow(
                setting=str(setting),
                drafts=drafts,
                requests=len(samples.tokens),
                tokens=int(samples.counted.sum()),
                tokens_needed=needed(plan.effect, len(LETTERS), max(1, len(broad))),
                tests=sum(name.startswith(own) for name in halves[0]),
                accused=[
                    Accused(test=one.test.removeprefix(own), p=one.p) for one in wrong if one.test.startswith(own)
                ],
            )
        )
    return rows


def known_prompts(known: Known, new_tokens: int) -> tuple[Ask, ...]:
    """Greedy prompts of the known model: its own, and beginnings of each letter."""
    texts = (*PROMPTS, *(letter + LETTERS[(3 * at) % len(LETTERS)] for at, letter in enumerate(LETTERS)))
    return tuple(Ask(tuple(known.target.encode(text)), text, new_tokens) for text in texts)


def versions() -> dict[str, str]:
    """What took part on this side."""
    found = {"python": platform.python_version(), "specpress": "not installed"}
    for package in ("specpress", "numpy", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _told(difference: greedy.Difference) -> str:
    gap = "" if difference.gap is None else f", where float64's two best logits are {difference.gap:.2g} apart"
    return (
        f"prompt {difference.prompt + 1} after {difference.place} tokens: {difference.expected} expected,"
        f" {difference.found} found{gap}"
    )
