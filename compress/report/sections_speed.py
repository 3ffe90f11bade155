"""The plain data that both templates show, and the sections on speed, and on what speculation gains and costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from compress.report.schema import Report
from compress.report.schema_speed import Baseline, Decoding, Pairing, Speed
from compress.report.wording import NO_GAIN, NOT_MEASURED, number, percent, times, tokens

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its name; the others are figures. `wide`: it needs a line of the page for itself."""

    headers: Row
    rows: Sequence[Row]
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page: the plot's name and what it shows, paragraphs, tables."""

    title: str
    plot: str
    plot_text: str
    text: list[str]
    tables: list[Table]


def speed(speed: Speed) -> Section:
    """Tokens per second of the three ways, times between tokens, the baselines."""
    plot = "Bars: tokens per second of original, compressed, speculative, baselines"
    if speed.original is None:
        return Section("Speed", "speed", plot, ["Not measured: see the reasons below."], [])
    text = [
        f"{speed.prompts} held-out prompts, {speed.new_tokens} new tokens each, greedy, {speed.threads} "
        f"{'thread' if speed.threads == 1 else 'threads'}, all three in the same runtime and interleaved; of each "
        f"prompt the median time of {speed.repeats} {'repeat' if speed.repeats == 1 else 'repeats'}."
    ]
    ways = {"original": speed.original, "compressed": speed.compressed, "speculative": speed.speculative}
    headers = ("", "tokens/s", "first token", "between tokens p50 / p90 / p99", "whole text", "mean width")
    note = "Tokens that one round gains arrive together: the time between them is 0." if speed.speculative else ""
    tables = [Table(headers, [_decoding(name, way) for name, way in ways.items()], note)]
    if speed.baselines:
        rows = [(row.name, number(row.tokens_per_second, 1), row.why or _over(row, speed)) for row in speed.baselines]
        note = speed.baselines[0].note
        named = ("baseline", "tokens/s", "the best of ours is")
        tables.append(Table(named, rows, f"{note[0].upper()}{note[1:]}.", wide=True))
    return Section("Speed", "speed", plot, text, tables)


def _decoding(name: str, way: Decoding | None) -> Row:
    if way is None:
        return (name, *[NOT_MEASURED] * 5)
    gaps = " / ".join(number(gap, 1) for gap in (way.itl_ms.p50, way.itl_ms.p90, way.itl_ms.p99))
    return (
        name,
        number(way.tokens_per_second, 1),
        number(way.ttft_ms, 1, " ms"),
        f"{gaps} ms",
        number(way.latency_ms, 0, " ms"),
        number(way.mean_width, 2),
    )


def _over(row: Baseline, speed: Speed) -> str:
    return f"{times(speed.best / row.tokens_per_second)} as fast" if row.tokens_per_second else ""


def acceptance(report: Report) -> Section:
    """What was accepted, what it cost, what was predicted, and the advice on the draft length."""
    speed, gain = report.speed, report.speed.speedup
    assert gain is not None  # it is measured wherever speculative decoding is
    who = drafter_name(report)
    rows = [
        ("acceptance rate α, greedy", number(speed.acceptance_rate, 3)),
        (f"α at temperature 1 ({speed.acceptance_rate_t1_verify})", number(speed.acceptance_rate_t1, 3)),
        ("same most probable token as the draft, teacher-forced", number(speed.teacher_forced_agreement, 3)),
        ("chance of acceptance at temperature 1, teacher-forced", number(speed.teacher_forced_agreement_t1, 3)),
        ("tokens gained a round τ", number(speed.tokens_per_round, 2)),
        ("drafted a round γ", number(speed.mean_draft_length, 2)),
        ("cost of a draft step c, in target steps", number(speed.draft_cost_ratio, 3)),
        ("cost of verifying a draft v, in target steps", number(speed.width_cost_ratio, 3)),
        ("repeated 4-grams in the output", percent(speed.repeated_4gram_share)),
    ]
    ours = next((row for row in speed.pairings or [] if row.drafter == speed.fastest_drafter), None)
    predictions = [
        ("τ / (γc + v), all measured", number(speed.predicted_speedup, 2)),
        ("textbook form, one fitted acceptance", number(speed.iid_speedup, 2)),
        ("measured, prompt included", number(None if ours is None else ours.speedup, 2)),
    ]
    if speed.pays:
        predictions += [
            ("measured, decoding only", number(gain.decode_over_compressed, 2)),
            ("measured over the original, prompt included", number(gain.over_original, 2)),
        ]
    tables = [
        pairings(report),
        Table((who, ""), rows),
        Table((f"speed over plain decoding: {who}", ""), predictions),
    ]
    if speed.groups:
        groups = [
            (
                group.name,
                str(group.prompts),
                percent(group.repeated_4gram_share),
                number(group.acceptance_rate, 3),
                number(group.tokens_per_round, 2),
                number(group.speedup_over_compressed, 2),
            )
            for group in speed.groups
        ]
        tables.append(Table((who, "prompts", "repeated 4-grams", "α", "τ", "speed-up"), groups))
    if speed.width_costs:
        costs = [(str(cost.width), number(cost.ms, 2, " ms"), number(cost.ratio, 2)) for cost in speed.width_costs]
        tables.append(Table(("tokens in one forward", "median", "over one token"), costs))
    advice = speed.advice
    if advice is None:
        text = [f"No advice on drafting: {report.reason('speed.advice')}."]
    elif advice.draft_length:
        text = [f"Advice: draft {tokens(advice.draft_length)} a round. {advice.why}"]
    else:
        text = [f"Advice: do not speculate. {advice.why}"]
    if speed.pairings and not speed.pays and not (advice and not advice.draft_length):
        text.insert(0, f"{NO_GAIN}: plain decoding is the fastest of what was timed.")
    plot = "Bars: share of drafts accepted up to each position"
    return Section("Speculation and draft length", "acceptance", plot, text, tables)


def pairings(report: Report) -> Table:
    """Every drafter that there was, the best first."""
    names = ("drafter", "tokens/s", "over plain", "α", "τ", "γ", "predicted")
    note = (
        "The best first; over plain: tokens/s over plain decoding's of the same prompts, which a drafter must beat by "
        "1 % to count as faster; predicted: τ / (γc + v), without the prompts' time. "
    )
    note += "γ is chosen every round." if report.asked.draft_length is None else "γ was asked for."
    if any(row.measured == "trial" for row in report.speed.pairings or []):
        note += " Drafters marked trial were clearly slower on a few tokens, and were timed on no more."
    return Table(names, [_pairing(row) for row in report.speed.pairings or []], note, wide=True)


def _pairing(row: Pairing) -> Row:
    if row.measured is None:
        return (row.drafter, row.why or NOT_MEASURED, *["–"] * 5)
    drafted = [(row.acceptance_rate, 3), (row.tokens_per_round, 2), (row.draft_length, 2), (row.predicted_speedup, 2)]
    return (
        f"{row.drafter} (trial)" if row.measured == "trial" else row.drafter,
        number(row.tokens_per_second, 1),
        "–" if row.speedup is None else times(row.speedup),
        *("–" if value is None else number(value, digits) for value, digits in drafted),
    )


def drafter_name(report: Report) -> str:
    """The drafter that the figures on acceptance are of, in words."""
    name = report.speed.fastest_drafter
    return "drafter: none" if name is None else f"drafter: {name}"
