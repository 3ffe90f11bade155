"""What the report shows in tables, as plain data for both templates; speed is in sections_speed.py."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from compress.quality.figures import Flips
from compress.records import ExpertRecord
from compress.report.schema import Calibration, ExportEntry, ExportFigures, Quality, Report, Size
from compress.report.sections_quality import long_contexts, tasks
from compress.report.sections_speed import Row, Section, Table, acceptance, speed
from compress.report.wording import NOT_MEASURED, megabytes, number, percent, times


def asked(report: Report) -> list[tuple[str, str]]:
    corpus, protocol = report.quality.corpus, report.quality.protocol
    head = "as it was" if protocol.head == "keep" else protocol.head
    return [
        ("model", report.model),
        ("recipe", f"{report.recipe}: {describe_recipe(report.asked.recipe)}"),
        ("draft", _draft(report)),
        ("text", f"{corpus.name}{f', Python {corpus.python}' if corpus.python else ''} (sha256 {corpus.sha256[:12]}…)"),
        ("evaluation", f"{protocol.tokens:,} tokens predicted in windows of {protocol.window}, head {head}"),
        ("calibration", _calibration(report.calibration)),
        ("seed", str(report.seed)),
    ]


def _draft(report: Report) -> str:
    there = "none" if report.draft is None else report.draft
    if report.speed.drafter is None:
        return there
    if not report.speed.pays:
        return f"{there}; no drafter was faster than plain decoding"
    return f"{there}; the fastest drafter is {report.speed.drafter}"


def describe_recipe(recipe: dict[str, Any]) -> str:
    """The stages of a recipe in one line."""
    parts = []
    for stage in recipe.get("stages", []):
        for kind, options in stage.items():
            details = [f"{key} {value}" for key, value in options.items() if isinstance(value, (str, int, float))]
            parts.append(f"{kind} ({', '.join(details)})" if details else str(kind))
    return ", then ".join(parts) or "nothing"


def _calibration(found: Calibration) -> str:
    if found.samples_used is None:
        return "none needed by this recipe"
    windows = f"{found.samples_used} of {found.samples_requested} windows asked for"
    return f"{windows}, {number(found.tokens, 0)} tokens of {found.source}"


def measured(report: Report) -> list[Section]:
    """The sections with plots, in the order of the page."""
    out = [_size(report.size, report.machine.device), _quality(report.quality), speed(report.speed)]
    if report.speed.pairings:
        out.append(acceptance(report))
    if report.quality.tasks:
        out.append(tasks(report.quality.tasks))
    if report.quality.long_context is not None:
        out.append(long_contexts(report.quality.long_context))
    if report.calibration.experts:
        out.append(_experts(report.calibration.experts))
    if report.calibration.trained:
        out.append(_training(report.calibration))
    if report.exports:
        out.append(_exports(report.exports))
    return out


def _size(size: Size, device: str) -> Section:
    cache = size.kv_bytes_per_token
    ratio = times(cache.original / cache.compressed) if cache.original and cache.compressed else NOT_MEASURED
    rows: list[Row] = [
        ("weights on disk", f"{size.original_bytes:,} B", f"{size.compressed_bytes:,} B", times(size.ratio)),
        ("cache per token", number(cache.original, 0, " B"), number(cache.compressed, 0, " B"), ratio),
    ]
    others: list[Row] = [
        ("bits per quantised weight, scales included", number(size.bits_per_weight, 3)),
        ("draft on disk", "none" if size.draft_bytes is None else f"{size.draft_bytes:,} B"),
        (f"peak memory {'of this process' if device == 'cpu' else 'on the GPU'}", megabytes(size.peak_memory_bytes)),
    ]
    if (zeros := size.sparsity) is not None:
        others += [
            (f"zeros in {zeros.layers} pruned layers", percent(zeros.zero_share, 2)),
            ("their values in this dense file", megabytes(zeros.value_bytes)),
            ("their values in a 2:4 store", megabytes(zeros.two_of_four_bytes)),
        ]
    tables = [Table(("", "original", "compressed", "ratio"), rows), Table(("", ""), others)]
    return Section("Size", "size", "Bars: megabytes on disk of original, compressed and draft", [], tables)


def _quality(quality: Quality) -> Section:
    found, bits = quality.perplexity, quality.bits_per_byte
    rows: list[Row] = [
        ("perplexity per token", number(found.original, 3), number(found.compressed, 3)),
        ("bits per byte", number(bits.original, 4), number(bits.compressed, 4)),
    ]
    if found.ci95:
        both = (f"{low:.2f} to {high:.2f}" for low, high in (found.ci95.original, found.ci95.compressed))
        rows.insert(1, ("95 % interval over windows", *both))
    others = _token_rows(quality)
    if quality.kv_perplexity is not None and found.compressed is not None:
        change = quality.kv_perplexity / found.compressed - 1
        through = f"{number(quality.kv_perplexity, 3)} ({change:+.2%} over a float32 cache)"
        others.append(("compressed, through its quantised cache: perplexity", through))
    text = [
        "Measured through the runtime's own kernels on the artifact read back from disk. The left plot's intervals are "
        "wide because texts differ in difficulty; the right one compares both models on the same windows."
    ]
    if quality.verdict is not None:
        text.append(
            f"The verdict takes each {quality.verdict.unit} of the text as one observation; an equal model is called"
            f" worse at most {percent(quality.verdict.level, 0)} of the time. Errors after ± are llama-perplexity's:"
            " they take tokens for independent, and are too small."
        )
    if quality.flips is not None:
        rows.append(
            ("right choices of the next line", percent(quality.flips.original), percent(quality.flips.compressed))
        )
        others += _choice_rows(quality.flips)
    tables = [Table(("", "original", "compressed"), rows), Table(("", ""), others)]
    return Section("Quality", "quality", "Perplexities with intervals, and the change in percent", text, tables)


def _token_rows(quality: Quality) -> list[Row]:
    """The statistics of tokens that llama-perplexity has, too."""
    kl, found = quality.kl_divergence, quality.token_statistics
    if kl is None or kl.mean_error is None or found is None:
        return [
            ("KL(original ‖ compressed), mean", number(None if kl is None else kl.mean, 5, " nats")),
            ("KL, 99th percentile", number(None if kl is None else kl.p99, 4, " nats")),
            ("same most probable token", percent(quality.top1_agreement, 2)),
        ]
    return [
        ("KL(original ‖ compressed), mean", f"{kl.mean:.5f} ± {kl.mean_error:.5f} nats"),
        ("KL, median", number(kl.median, 5, " nats")),
        ("KL, 99 %, 99.9 %, most", " / ".join(number(one, 4) for one in (kl.p99, kl.p999, kl.max))),
        ("perplexity ratio", f"{found.perplexity_ratio.value:.5f} ± {found.perplexity_ratio.error:.5f}"),
        (
            "Δp of the text's token, RMS",
            f"{percent(found.delta_p_rms.value, 2)} ± {percent(found.delta_p_rms.error, 2)}",
        ),
        ("same most probable token", f"{percent(found.same_top.value, 2)} ± {percent(found.same_top.error, 2)}"),
    ]


def _choice_rows(found: Flips) -> list[Row]:
    return [
        ("choices lost / won / otherwise changed", f"{found.lost:,} / {found.won:,} / {_both_wrong(found):,}"),
        ("McNemar's exact p", number(found.p_value, 4)),
        (
            "change of right choices, 95 %",
            f"{100 * found.ci95[0]:+.2f} to {100 * found.ci95[1]:+.2f} points",
        ),
        (f"smallest loss shown at power {found.power:g}", f"{100 * found.smallest_loss:.2f} points"),
    ]


def _both_wrong(found: Flips) -> int:
    """Choices that changed without becoming right or wrong."""
    return found.changed - found.lost - found.won


def _experts(experts: Sequence[ExpertRecord]) -> Section:
    """One line a block: a large mixture has thousands of experts."""
    blocks: defaultdict[int, list[ExpertRecord]] = defaultdict(list)
    for expert in experts:
        blocks[expert.block].append(expert)
    rows: list[Row] = []
    for block, members in blocks.items():
        tokens = sorted(expert.tokens for expert in members)
        counts = (f"{count:,}" for count in (tokens[0], tokens[len(tokens) // 2], tokens[-1]))
        few = [str(expert.expert) for expert in members if expert.handled != "calibrated"]
        rows.append((str(block), str(len(members)), *counts, ", ".join(few) or "none"))
    each = [(str(block), ", ".join(str(expert.tokens) for expert in members)) for block, members in blocks.items()]
    text = [
        "Tokens of the calibration text that each block's router sent to its experts. An expert that sees little text "
        "has poor statistics of its own; those are named, and handled as the recipe says."
    ]
    tables = [
        Table(("block", "experts", "fewest tokens", "median", "most", "experts with too few"), rows),
        Table(("block", "tokens of each expert, in their order"), each, wide=True),
    ]
    return Section("Experts", "", "", text, tables)


def _training(calibration: Calibration) -> Section:
    rows: list[Row] = []
    perplexities: list[Row] = []
    text: list[str] = []
    for kind, stage in calibration.trained.items():
        minutes = stage.budget.get("minutes")
        budget = f"{stage.budget.get('tokens', 0):,} tokens" if minutes is None else f"{minutes:g} minutes"
        figures = (f"{stage.steps:,}", f"{stage.tokens:,}", f"{number(stage.seconds, 0)} s", f"{stage.before:.4f}")
        rows.append((kind, budget, *figures, f"{stage.best:.4f} (step {stage.best_step:,})"))
        perplexities += [(kind, name.replace("_", " "), number(value, 3)) for name, value in stage.perplexity.items()]
        if stage.text is not None:
            text.append(
                f"{kind} was trained on {stage.text.source}, {stage.text.documents:,} documents; its best weights were "
                f"chosen on {stage.text.held_out_tokens:,} other tokens, which nothing else reads."
            )
    headers = ("stage", "budget", "steps", "tokens", "time", "held-out loss before", "best, which is kept")
    tables = [Table(headers, rows, wide=True)]
    if perplexities:
        tables.append(Table(("stage", "model", "perplexity of the held-out windows"), perplexities))
    shown = "Curves: training loss and held-out loss in nats over tokens, and the weights that were kept"
    return Section("Training", "training", shown, text, tables)


def _exports(exports: Sequence[ExportEntry]) -> Section:
    """The model in other engines' forms: its bytes there, and what the forms could not hold."""
    rows: list[Row] = []
    text: list[str] = []
    for entry in exports:
        lost, worst = entry.requantized, entry.worst
        mean = f"{sum(loss.error for loss in lost) / len(lost):.2g}" if lost else "none"
        most = "none" if worst is None else f"{worst.error:.2g} ({worst.layer})"
        rows.append((entry.name, megabytes(entry.bytes), str(entry.repacked), str(len(lost)), mean, most))
        notes = (*entry.notes, *(entry.measured.notes if entry.measured else ()))
        text += [f"{entry.name}: {note}" for note in notes]
    headers = ("export", "weights", "layers as they are", "layers rounded again", "their error, mean", "worst")
    note = "Errors are relative, ‖W' − W‖ / ‖W‖ of the export's weights against this artifact's."
    tables = [Table(headers, rows, note, wide=True)]
    if found := [(entry.name, entry.measured) for entry in exports if entry.measured]:
        names = ("export", "runs on", "perplexity", "artifact's", "tokens/s", "speculative", "drafter", "α", "differ")
        note = (
            f"Perplexities are of the same {found[0][1].tokens:,} held-out tokens. Differ: tokens of speculative output"
            " that are not plain greedy output's on the same sessions, of those compared."
        )
        tables.append(Table(names, [_export_figures(*one) for one in found], note, wide=True))
    return Section("Exports", "", "", text, tables)


def _export_figures(name: str, found: ExportFigures) -> Row:
    speed = found.speed
    perplexities = (number(found.perplexity, 3), number(found.artifact_perplexity, 3))
    if speed is None:
        return (name, found.engine, *perplexities, *[NOT_MEASURED] * 5)
    differ = NOT_MEASURED if speed.tokens_compared is None else f"{speed.mismatches:,} of {speed.tokens_compared:,}"
    return (
        name,
        found.engine,
        *perplexities,
        number(speed.tokens_per_second, 1),
        number(speed.speculative_tokens_per_second, 1),
        speed.drafter or NOT_MEASURED,
        number(speed.acceptance_rate, 3),
        differ,
    )


def layers(report: Report) -> Table:
    rows = [(e.name, e.scheme, str(e.group_size or "row"), percent(e.error, 2)) for e in report.quality.layers]
    return Table(("layer", "scheme", "group", "relative error"), rows)


def left_alone(report: Report) -> list[tuple[str, list[str]]]:
    """(why, layers) of what stayed as it was."""
    return list(_by_reason((entry.layer, entry.why) for entry in report.left_alone).items())


def missing(report: Report) -> list[tuple[str, str]]:
    """(figures, why) of what was not measured, a reason once."""
    return [(", ".join(paths), why) for why, paths in _by_reason(sorted(report.not_measured.items())).items()]


def _by_reason(items: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for name, why in items:
        reasons[why].append(name)
    return reasons


def machine_and_versions(report: Report) -> list[tuple[str, str]]:
    machine = report.machine
    device = "" if machine.device == "cpu" else f"; {machine.device}"
    where = f"{machine.cpu}, {machine.cores} cores, {machine.instruction_path}{device}"
    return [("machine", where), *report.versions.items()]
