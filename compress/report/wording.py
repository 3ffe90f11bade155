"""What the report says in words: how figures are written, the three headlines, the findings (of sizes, quality, speed
and of stages that trained), the lossless class."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compress.export import told
from compress.records import ExpertRecord
from compress.report import verdict_words
from compress.report.schema import Interval95, Report, Sparsity
from compress.report.schema_speed import PLAIN, Speed
from compress.report.training_words import training_findings

NOT_MEASURED = "not measured"
NO_GAIN = "Speculation does not pay on this machine"

_CLASSES = {
    "exact": (
        "exact: speculative greedy decoding gives the same tokens as plain decoding by construction, because a token's "
        "result has the same bits however many tokens share the forward"
    ),
    "measured": (
        "measured: these kernels do not promise the same bits at every width, so speculative output is compared with "
        "plain output token for token and the differences are counted"
    ),
    "distribution": (
        "distribution: sampled text follows exactly the compressed model's distribution, without being the same text "
        "that plain decoding gives"
    ),
    "lossy": "lossy: speculation was asked to accept tokens that the compressed model would not have chosen",
}
# What was done with experts that saw too little text; the keys are those of ExpertRecord.handled.
_HANDLED = {
    "all tokens": "calibrated on all tokens instead of their own",
    "rounded to nearest": "rounded to nearest without calibration",
}
_NAMED_EXPERTS = 6


@dataclass(frozen=True)
class Headline:
    """One of the three large figures. `tone`: good, bad or none."""

    label: str
    value: str
    caption: str
    tone: str


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure with its unit, or "not measured"."""
    return NOT_MEASURED if value is None else f"{value:,.{digits}f}{unit}"


def nats(value: float) -> str:
    """A divergence: four digits behind the point, or two that count where those were zeros."""
    return f"{value:.4f}" if value >= 1e-3 or value <= 0 else f"{value:.2g}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return NOT_MEASURED if value is None else f"{100 * value:.{digits}f} %"


def megabytes(value: int | float | None) -> str:
    """Bytes in MB (10⁶), or kB where that would be 0.0."""
    if value is None:
        return NOT_MEASURED
    return f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value / 1e3:,.1f} kB"


def tokens(count: int) -> str:
    """1 token, 2 tokens."""
    return f"{count} token{'' if count == 1 else 's'}"


def times(value: float) -> str:
    """A ratio: 1.62×."""
    return f"{value:.2f}×" if value < 100 else f"{value:,.0f}×"


def change_interval(found: Interval95) -> str:
    """The change of perplexity on the same resamples: -0.10 to +2.30 %."""
    low, high = (100 * (bound - 1) for bound in found.ratio)
    return f"{low:+.2f} to {high:+.2f} %"


def headlines(report: Report) -> list[Headline]:
    """Size, quality, speed."""
    return [_size(report), _quality(report), _speed(report)]


def _size(report: Report) -> Headline:
    size = report.size
    caption = f"{megabytes(size.compressed_bytes)} instead of {megabytes(size.original_bytes)} on disk"
    if size.bits_per_weight is not None:
        caption += f"; {size.bits_per_weight:.2f} bits per quantised weight"
    smaller = size.ratio >= 1
    return Headline("smaller" if smaller else "size ratio", times(size.ratio), caption, "good" if smaller else "bad")


def _quality(report: Report) -> Headline:
    found = report.quality.perplexity
    if found.compressed is None or found.original is None:
        return Headline("quality", "–", _because(report, "quality.perplexity"), "none")
    change = found.compressed / found.original - 1
    caption = f"{found.original:.2f} becomes {found.compressed:.2f} on held-out text"
    verdict = report.quality.verdict
    if verdict is not None:
        caption = (
            f"{verdict_words.caption(verdict)}{caption}; 95 % interval of the change {verdict_words.interval(verdict)}"
        )
    elif found.ci95 is not None:
        caption += f"; 95 % interval of the change {change_interval(found.ci95)}"
    label = "perplexity" if verdict is None else f"perplexity: {verdict.call}"
    return Headline(label, f"{100 * change:+.2f} %", caption, "bad" if change > 0.05 else "good")


def _speed(report: Report) -> Headline:
    speed = report.speed
    if speed.original is None:
        return Headline("speed", "–", _because(report, "speed.original"), "none")
    name = "compressed" if speed.speculative is None else "speculative"
    start, pace = speed.pace("original"), speed.pace(name)
    ratio = pace / start
    caption = f"{pace:,.1f} tokens/s {name} against {start:,.1f} for the original, same runtime"
    if speed.speculative is not None and not speed.pays:
        caption = (
            f"{pace:,.1f} tokens/s compressed against {start:,.1f} for the original, same runtime; {_no_gain(speed)}"
        )
    elif speed.speedup and speed.speedup.over_compressed:
        caption += f"; {times(speed.speedup.over_compressed)} over plain decoding of the compressed model"
    return Headline("the original's speed", times(ratio), caption, "good" if ratio >= 1 else "bad")


def _because(report: Report, path: str) -> str:
    return f"{NOT_MEASURED}: {report.reason(path)}"


def findings(report: Report) -> tuple[str, ...]:
    """What an engineer should know before using the artifact, slowdowns first-class."""
    return told(
        *_ternary_findings(report),
        verdict_words.sentence(report),
        *training_findings(report.calibration.training),
        _quality_finding(report),
        _sparsity_finding(report.size.sparsity),
        _expert_finding(report.calibration.experts),
        *_speed_findings(report),
    )


def _speed_findings(report: Report) -> Iterator[str]:
    speed = report.speed
    if speed.original is None:
        yield f"Speed: {_because(report, 'speed.original')}."
        return
    start, plain = speed.pace("original"), speed.pace("compressed")
    yield (
        f"Without speculation the compressed model decodes at {'' if plain >= start else 'only '}{plain / start:.2f}"
        f" times the original's speed ({plain:,.1f} against {start:,.1f} tokens/s)."
    )
    if speed.speculative is None:
        yield f"Speculation: {_because(report, 'speed.speculative')}."
    elif speed.speedup is not None and speed.speedup.over_compressed is not None:
        yield from _speculation_findings(report)
    paces = [(row.tokens_per_second, row.name) for row in speed.baselines or [] if row.tokens_per_second]
    fastest, name = max(paces, default=(0.0, ""))
    if fastest > speed.best:
        yield (
            f"The fastest baseline is faster than anything here: {name} on the original gives {fastest:,.1f} "
            f"tokens/s, {times(fastest / speed.best)} the best of ours."
        )


def _ternary_findings(report: Report) -> list[str]:
    """Rounding to ternary is a way to measure, never one to compress: whoever reads on must have read this."""
    trained = [stage["warning"] for stage in report.calibration.training.values() if "warning" in stage]
    if trained:
        return trained
    stages = report.asked.recipe.get("stages", [])
    ruined = [s for stage in stages if (s := stage.get("quantize", {}).get("scheme")) in ("ternary", "ternary-1.25")]
    if not ruined:
        return []
    found = report.quality.perplexity
    measured = ""
    if found.original and found.compressed:
        factor = times(found.compressed / found.original)
        measured = f" Perplexity is {factor} the original's: {found.compressed:.2f} instead of {found.original:.2f}."
    return [
        f"WARNING: this model is RUINED. Its weights were rounded to {ruined[0]} without training, which no model"
        f" survives.{measured} Use its size and speed; for a model that writes sense train it, with the recipe"
        f" {ruined[0]}."
    ]


def _quality_finding(report: Report) -> str:
    quality = report.quality
    if quality.kl_divergence is None:
        return f"Quality: {_because(report, 'quality.kl_divergence')}."
    return (
        f"On {quality.protocol.tokens:,} held-out tokens both models put the same token first at "
        f"{percent(quality.top1_agreement)} of the positions; the mean KL divergence is "
        f"{nats(quality.kl_divergence.mean)} nats per token."
    )


def _sparsity_finding(found: Sparsity | None) -> str | None:
    if found is None:
        return None
    layers = "1 pruned layer" if found.layers == 1 else f"{found.layers} pruned layers"
    store = "cannot hold them: the zeros do not lie two in every four."
    if found.two_of_four_bytes is not None:
        sizes = (
            f"{megabytes(found.two_of_four_bytes)} for these layers' values instead of {megabytes(found.value_bytes)}"
        )
        store = f"would take {sizes}."
    return (
        f"{percent(found.zero_share, 2)} of the weights of {layers} are zeros. That saves neither bytes nor time "
        "here: a dense file stores zeros like any other number, and dense kernels multiply them. "
        f"A 2:4 store {store}"
    )


def _expert_finding(experts: Sequence[ExpertRecord]) -> str | None:
    few = [expert for expert in experts if expert.handled != "calibrated"]
    if not few:
        return None
    named = ", ".join(f"{e.block}.{e.expert} ({e.tokens:,})" for e in few[:_NAMED_EXPERTS])
    more = f" and {len(few) - _NAMED_EXPERTS} more" if len(few) > _NAMED_EXPERTS else ""
    how = " or ".join(_HANDLED[way] for way in sorted({expert.handled for expert in few}))
    return (
        f"{len(few)} of {len(experts)} experts were routed fewer calibration tokens than the recipe asks for and "
        f"were {how}; block, expert and tokens: {named}{more}."
    )


def _no_gain(speed: Speed) -> str:
    return f"{NO_GAIN[0].lower()}{NO_GAIN[1:]}: {times(1.0)} over plain decoding"


def _speculation_findings(report: Report) -> Iterator[str]:
    speed, drafts = report.speed, [row for row in report.speed.pairings or [] if row.measured and row.drafter != PLAIN]
    best = next((row for row in drafts if row.drafter == speed.fastest_drafter), None)
    if best is None:
        yield f"Speculation: {_because(report, 'speed.fastest_drafter')}."
        return
    name = f"the draft {report.draft}" if best.drafter == "model" and report.draft else f"the drafter {best.drafter}"
    chosen = "chosen every round" if report.asked.draft_length is None else "asked for"
    drafting = f"{number(best.draft_length, 1)} tokens a round ({chosen})"
    accepted = ""
    if best.acceptance_rate is not None:
        accepted = (
            f" {percent(best.acceptance_rate)} of the drafted tokens were accepted, "
            f"{number(best.tokens_per_round, 2)} tokens gained a round."
        )
    if speed.pays:
        others = f", the fastest of {len(drafts)} drafters" if len(drafts) > 1 else ""
        yield (
            f"Speculation with {name}{others}, {drafting}, speeds plain decoding up: {times(best.speedup or 0.0)} its "
            f"speed.{accepted}"
        )
    else:
        of = f"the fastest of {len(drafts)} drafters" if len(drafts) > 1 else "it was the only drafter to be timed"
        yield (
            f"{NO_GAIN}: {name}, {of}, gave {times(best.speedup or 0.0)} the speed of plain decoding, {drafting}."
            f"{accepted}"
        )
    measured = speed.speedup.decode_over_compressed if speed.speedup and speed.pays else None
    if speed.predicted_speedup is not None and measured is not None:
        yield (
            f"From the measured acceptance and costs {speed.predicted_speedup:.2f} times was to be expected; "
            f"{measured:.2f} times was measured (without the prompt's time)."
        )
    if speed.repeated_4gram_share is not None:
        yield (
            f"{percent(speed.repeated_4gram_share)} of the output's 4-grams are repetitions, which are easy to "
            "draft: the more there are, the less the acceptance rate says about other text."
        )


def lossless(report: Report) -> str:
    """The lossless class in a sentence, with the counts."""
    found = report.lossless
    if found.class_ is None:
        return f"Lossless class {_because(report, 'lossless.class')}."
    counts = (
        f"{found.tokens_compared:,} tokens compared, {found.mismatches:,} "
        f"{'mismatch' if found.mismatches == 1 else 'mismatches'}"
    )
    said = f"Lossless class {_CLASSES[found.class_]}. Counted here ({found.verify}): {counts}."
    if report.certificate is not None:
        said += " Any machine repeats the report's certificate: python -m runtime.audit certificate RUN."
    return said
