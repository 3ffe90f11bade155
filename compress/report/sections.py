"""What the report shows in tables, as plain data for both templates."""

from dataclasses import dataclass
from typing import Any

from compress.report import plots
from compress.report.wording import NOT_MEASURED, megabytes, number, percent, reason_for, times

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its name; the others are figures. `wide`: it needs a line of the page for itself."""

    headers: Row
    rows: list[Row]
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


def asked(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What was asked, and of what."""
    wanted, quality = report["asked"], report["quality"]
    corpus = quality["corpus"]["name"]
    if quality["corpus"]["python"]:
        corpus += f", Python {quality['corpus']['python']}"
    return [
        ("model", report["model"]),
        ("recipe", f"{report['recipe']}: {describe_recipe(wanted['recipe'])}"),
        ("draft", _draft(report)),
        ("text", f"{corpus} (sha256 {quality['corpus']['sha256'][:12]}…)"),
        (
            "evaluation",
            f"{quality['protocol']['tokens']:,} tokens predicted in windows of {quality['protocol']['window']}, head "
            f"{'as it was' if quality['protocol']['head'] == 'keep' else quality['protocol']['head']}",
        ),
        ("calibration", _calibration(report["calibration"])),
        ("seed", str(report["seed"])),
    ]


def _draft(report: dict[str, Any]) -> str:
    if report["speed"]["drafter"] == "medusa":
        beside = "" if report["draft"] is None else f"; {report['draft']} lies beside them"
        return f"Medusa heads of the model's own{beside}"
    return report["draft"] or "none: the drafter is prompt lookup"


def describe_recipe(recipe: dict[str, Any]) -> str:
    """The stages of a recipe in one line."""
    parts = []
    for stage in recipe.get("stages", []):
        for kind, options in stage.items():
            details = [f"{key} {value}" for key, value in options.items() if isinstance(value, (str, int, float))]
            parts.append(f"{kind} ({', '.join(details)})" if details else str(kind))
    return ", then ".join(parts) or "nothing"


def _calibration(found: dict[str, Any]) -> str:
    if found["samples_used"] is None:
        return "none needed by this recipe"
    windows = f"{found['samples_used']} of {found['samples_requested']} windows asked for"
    return f"{windows}, {number(found['tokens'], 0)} tokens of {found['source']}"


def measured(report: dict[str, Any]) -> list[Section]:
    """The sections with plots, in the order of the page."""
    out = [_size(report), _quality(report), _speed(report)]
    if report["speed"]["speculative"] is not None:
        out.append(_acceptance(report))
    if report["calibration"]["experts"]:
        out.append(_experts(report))
    if plots.stages(report):
        out.append(_training(report))
    if report.get("exports"):
        out.append(_exports(report))
    return out


def _exports(report: dict[str, Any]) -> Section:
    """The model in other engines' forms: its bytes there, and what the forms could not hold."""
    rows: list[Row] = []
    for entry in report["exports"]:
        lost, worst = entry["requantized"], entry["worst"]
        mean = sum(loss["error"] for loss in lost) / len(lost) if lost else 0.0
        rows.append(
            (
                entry["name"],
                megabytes(entry["bytes"]),
                str(entry["repacked"]),
                str(len(lost)),
                "none" if not lost else f"{mean:.2g}",
                "none" if worst is None else f"{worst['error']:.2g} ({worst['layer']})",
            )
        )
    headers = ("export", "weights", "layers as they are", "layers rounded again", "their error, mean", "worst")
    said = [(e["name"], (*e["notes"], *(e.get("measured") or {"notes": ()})["notes"])) for e in report["exports"]]
    text = [f"{name}: {note}" for name, notes in said for note in notes]
    note = "Errors are relative, ‖W' − W‖ / ‖W‖ of the export's weights against this artifact's."
    tables = [Table(headers, rows, note, wide=True)]
    if found := [_export_figures(entry) for entry in report["exports"] if entry.get("measured")]:
        names = ("export", "runs on", "perplexity", "artifact's", "tokens/s", "speculative", "drafter", "α", "differ")
        tokens = next(e["measured"]["tokens"] for e in report["exports"] if e.get("measured"))
        note = (
            f"Perplexities are of the same {tokens:,} held-out tokens. Differ: tokens of speculative output that are"
            " not plain greedy output's on the same sessions, of those compared."
        )
        tables.append(Table(names, found, note, wide=True))
    return Section("Exports", "", "", text, tables)


def _export_figures(entry: dict[str, Any]) -> Row:
    found = entry["measured"]
    speed = found["speed"] or {}
    compared = speed.get("tokens_compared")
    return (
        entry["name"],
        found["engine"],
        number(found["perplexity"], 3),
        number(found["artifact_perplexity"], 3),
        number(speed.get("tokens_per_second"), 1),
        number(speed.get("speculative_tokens_per_second"), 1),
        speed.get("drafter") or NOT_MEASURED,
        number(speed.get("acceptance_rate"), 3),
        NOT_MEASURED if compared is None else f"{speed['mismatches']:,} of {compared:,}",
    )


def _training(report: dict[str, Any]) -> Section:
    headers = ("stage", "budget", "steps", "tokens", "time", "held-out loss before", "best, which is kept")
    tables = [Table(headers, plots.rows(report), wide=True)]
    if found := plots.perplexities(report):
        tables.append(Table(("stage", "model", "perplexity of the held-out windows"), found))
    shown = "Curves: training loss and held-out loss in nats over tokens, and the weights that were kept"
    return Section("Training", "training", shown, plots.sources(report), tables)


def _size(report: dict[str, Any]) -> Section:
    size = report["size"]
    cache = size["kv_bytes_per_token"]
    rows: list[Row] = [
        ("weights on disk", f"{size['original_bytes']:,} B", f"{size['compressed_bytes']:,} B", times(size["ratio"])),
        ("cache per token", _bytes(cache["original"]), _bytes(cache["compressed"]), _ratio(cache)),
    ]
    others: list[Row] = [
        ("bits per quantised weight, scales included", number(size["bits_per_weight"], 3)),
        ("draft on disk", "none" if size["draft_bytes"] is None else f"{size['draft_bytes']:,} B"),
        (
            "peak memory of this process" if report["machine"]["device"] == "cpu" else "peak memory on the GPU",
            megabytes(size["peak_memory_bytes"]),
        ),
    ]
    zeros = size.get("sparsity")
    if zeros is not None:
        others += [
            (f"zeros in {zeros['layers']} pruned layers", percent(zeros["zero_share"], 2)),
            ("their values in this dense file", megabytes(zeros["value_bytes"])),
            ("their values in a 2:4 store", megabytes(zeros["two_of_four_bytes"])),
        ]
    tables = [Table(("", "original", "compressed", "ratio"), rows), Table(("", ""), others)]
    return Section("Size", "size", "Bars: megabytes on disk of original, compressed and draft", [], tables)


def _bytes(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,.0f} B"


def _ratio(pair: dict[str, float | None]) -> str:
    before, after = pair["original"], pair["compressed"]
    return times(before / after) if before and after else NOT_MEASURED


def _quality(report: dict[str, Any]) -> Section:
    quality = report["quality"]
    found, bits = quality["perplexity"], quality["bits_per_byte"]
    rows: list[Row] = [
        ("perplexity per token", number(found["original"], 3), number(found["compressed"], 3)),
        ("bits per byte", number(bits["original"], 4), number(bits["compressed"], 4)),
    ]
    if found["ci95"]:
        both = (f"{low:.2f} to {high:.2f}" for low, high in (found["ci95"]["original"], found["ci95"]["compressed"]))
        rows.insert(1, ("95 % interval over windows", *both))
    divergence = quality["kl_divergence"] or {"mean": None, "p99": None}
    others: list[Row] = [
        ("KL(original ‖ compressed), mean", number(divergence["mean"], 5, " nats")),
        ("KL, 99th percentile", number(divergence["p99"], 4, " nats")),
        ("same most probable token", percent(quality["top1_agreement"], 2)),
    ]
    if quality["kv_perplexity"] is not None:
        change = quality["kv_perplexity"] / found["compressed"] - 1
        through = f"{number(quality['kv_perplexity'], 3)} ({change:+.2%} over a float32 cache)"
        others.append(("compressed, through its quantised cache: perplexity", through))
    text = [
        "Measured through the runtime's own kernels on the artifact read back from disk. The left plot's intervals are "
        "wide because texts differ in difficulty; the right one compares both models on the same windows."
    ]
    tables = [Table(("", "original", "compressed"), rows), Table(("", ""), others)]
    return Section("Quality", "quality", "Perplexities with intervals, and the change in percent", text, tables)


def _speed(report: dict[str, Any]) -> Section:
    speed = report["speed"]
    plot = "Bars: tokens per second of original, compressed, speculative, baselines"
    if speed["original"] is None:
        return Section("Speed", "speed", plot, ["Not measured: see the reasons below."], [])
    text = [
        f"{speed['prompts']} held-out prompts, {speed['new_tokens']} new tokens each, greedy, {speed['threads']} "
        f"{'thread' if speed['threads'] == 1 else 'threads'}, all three in the same runtime and interleaved; medians "
        f"of {speed['repeats']} {'repeat' if speed['repeats'] == 1 else 'repeats'}."
    ]
    rows: list[Row] = []
    for name in ("original", "compressed", "speculative"):
        way = speed[name]
        if way is None:
            rows.append((name, *[NOT_MEASURED] * 5))
            continue
        gaps = " / ".join(number(way["itl_ms"][key], 1) for key in ("p50", "p90", "p99"))
        rows.append(
            (
                name,
                number(way["tokens_per_second"], 1),
                number(way["ttft_ms"], 1, " ms"),
                f"{gaps} ms",
                number(way["latency_ms"], 0, " ms"),
                number(way["mean_width"], 2),
            )
        )
    headers = ("", "tokens/s", "first token", "between tokens p50 / p90 / p99", "whole text", "mean width")
    note = "Tokens that one round gains arrive together: the time between them is 0." if speed["speculative"] else ""
    tables = [Table(headers, rows, note)]
    if speed["baselines"]:
        lines: list[Row] = [
            (row["name"], number(row["tokens_per_second"], 1), row["why"] or _over(row, speed))
            for row in speed["baselines"]
        ]
        note = speed["baselines"][0]["note"]
        tables.append(
            Table(("baseline", "tokens/s", "the best of ours is"), lines, f"{note[0].upper()}{note[1:]}.", wide=True)
        )
    return Section("Speed", "speed", plot, text, tables)


def _over(row: dict[str, Any], speed: dict[str, Any]) -> str:
    ours = max(way["tokens_per_second"] for way in (speed["compressed"], speed["speculative"]) if way)
    return f"{times(ours / row['tokens_per_second'])} as fast" if row["tokens_per_second"] else ""


def _acceptance(report: dict[str, Any]) -> Section:
    speed = report["speed"]
    speedup = speed["speedup"]
    rows: list[Row] = [
        ("acceptance rate α, greedy", number(speed["acceptance_rate"], 3)),
        (f"α at temperature 1 ({speed['acceptance_rate_t1_verify']})", number(speed["acceptance_rate_t1"], 3)),
        ("same most probable token as the draft, teacher-forced", number(speed["teacher_forced_agreement"], 3)),
        ("chance of acceptance at temperature 1, teacher-forced", number(speed["teacher_forced_agreement_t1"], 3)),
        ("tokens gained a round τ", number(speed["tokens_per_round"], 2)),
        ("drafted a round γ", str(speed["draft_length"])),
        ("cost of a draft step c, in target steps", number(speed["draft_cost_ratio"], 3)),
        (
            f"cost of verifying {speed['draft_length'] + 1} tokens v, in target steps",
            number(speed["width_cost_ratio"], 3),
        ),
        ("repeated 4-grams in the output", percent(speed["repeated_4gram_share"])),
    ]
    predictions: list[Row] = [
        ("τ / (γc + v), all measured", number(speed["predicted_speedup"], 2)),
        ("textbook form, one fitted acceptance", number(speed["iid_speedup"], 2)),
        ("measured, decoding only", number(speedup["decode_over_compressed"], 2)),
        ("measured, prompt included", number(speedup["over_compressed"], 2)),
        ("measured over the original, prompt included", number(speedup["over_original"], 2)),
    ]
    tables = [Table(("", ""), rows), Table(("speed over plain decoding of the compressed model", ""), predictions)]
    if speed["groups"]:
        lines: list[Row] = [
            (
                group["name"],
                str(group["prompts"]),
                percent(group["repeated_4gram_share"]),
                number(group["acceptance_rate"], 3),
                number(group["tokens_per_round"], 2),
                number(group["speedup_over_compressed"], 2),
            )
            for group in speed["groups"]
        ]
        tables.append(Table(("", "prompts", "repeated 4-grams", "α", "τ", "speed-up"), lines))
    if speed["width_costs"]:
        costs: list[Row] = [
            (str(entry["width"]), number(entry["ms"], 2, " ms"), number(entry["ratio"], 2))
            for entry in speed["width_costs"]
        ]
        tables.append(Table(("tokens in one forward", "median", "over one token"), costs))
    advice = speed["advice"]
    if advice is None:
        text = [f"No advice on the draft length: {reason_for(report, 'speed.advice')}."]
    elif advice["draft_length"]:
        text = [f"Advice: draft {advice['draft_length']} tokens a round. {advice['why']}"]
    else:
        text = [f"Advice: do not speculate with this draft. {advice['why']}"]
    plot = "Bars: share of drafts accepted up to each position"
    return Section("Speculation and draft length", "acceptance", plot, text, tables)


def _experts(report: dict[str, Any]) -> Section:
    """One line a block: a large mixture has thousands of experts."""
    blocks: dict[int, list[dict[str, Any]]] = {}
    for expert in report["calibration"]["experts"]:
        blocks.setdefault(expert["block"], []).append(expert)
    rows: list[Row] = []
    for block, experts in blocks.items():
        tokens = sorted(expert["tokens"] for expert in experts)
        few = [str(expert["expert"]) for expert in experts if expert["handled"] != "calibrated"]
        rows.append(
            (
                str(block),
                str(len(experts)),
                f"{tokens[0]:,}",
                f"{tokens[len(tokens) // 2]:,}",
                f"{tokens[-1]:,}",
                ", ".join(few) or "none",
            )
        )
    counts: list[Row] = [
        (str(block), ", ".join(str(expert["tokens"]) for expert in experts)) for block, experts in blocks.items()
    ]
    text = [
        "Tokens of the calibration text that each block's router sent to its experts. An expert that sees little text "
        "has poor statistics of its own; those are named, and handled as the recipe says."
    ]
    tables = [
        Table(("block", "experts", "fewest tokens", "median", "most", "experts with too few"), rows),
        Table(("block", "tokens of each expert, in their order"), counts, wide=True),
    ]
    return Section("Experts", "", "", text, tables)


def layers(report: dict[str, Any]) -> Table:
    """Every quantised layer."""
    rows: list[Row] = [
        (layer["name"], layer["scheme"], str(layer["group_size"] or "row"), percent(layer["error"], 2))
        for layer in report["quality"]["layers"]
    ]
    return Table(("layer", "scheme", "group", "relative error"), rows)


def left_alone(report: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """(why, layers) of what stayed as it was."""
    reasons: dict[str, list[str]] = {}
    for entry in report["left_alone"]:
        reasons.setdefault(entry["why"], []).append(entry["layer"])
    return list(reasons.items())


def missing(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(figures, why) of what was not measured, a reason once."""
    reasons: dict[str, list[str]] = {}
    for path, why in sorted(report["not_measured"].items()):
        reasons.setdefault(why, []).append(path)
    return [(", ".join(paths), why) for why, paths in reasons.items()]


def surroundings(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Machine and versions."""
    machine = report["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['instruction_path']}"
    if machine["device"] != "cpu":
        where += f"; {machine['device']}"
    return [("machine", where), *report["versions"].items()]
