"""What exports are worth: each one read back by the runtime, its perplexity, and the speed of those in ONNX.

The runtime decodes ONNX on ONNX Runtime, and every other form on the kernels that decode the artifact: those have the
artifact's speed, so that their quality alone is measured.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compress.context import FIXED_DRAFT_LENGTH, RunContext
from compress.errors import USER_ERRORS
from compress.report import quality
from compress.report.not_measured import NO_QUALITY, NO_SPEED, TOO_FEW, Reasons, null_paths
from compress.report.schema import ExportEntry, ExportFigures, ExportSpeed, Report
from compress.report.timing import Work, compare, time_interleaved
from runtime import load
from runtime.engine.metrics import total
from runtime.model.onnx.graph import holds as holds_onnx
from runtime.sampling.params import Sampling
from runtime.speculate import Speculator, lossless_class
from runtime.speculative.drafters.lookup import LookupDrafter

if TYPE_CHECKING:
    from runtime.model.load import Model

Entry = dict[str, Any]  # Exported.to_dict()

# An export shall not cost what the artifact's own report costs: held-out tokens, and prompts that are decoded.
TOKENS, PROMPTS = 4096, 4
_DRAFT = ".draft"  # beside the exports while they are measured
_OUR_KERNELS = "the kernels that decode the artifact decode this form, at the speed that is measured for the artifact"
_LATER = "it was exported after the report was made: a run with --export measures it"


@dataclass(frozen=True)
class Task:
    """What to measure exports on.

    folder       of the folders of exports; they are not changed.
    windows      (E, L) int64, held-out tokens; none where no quality was asked for.
    perplexity   the artifact's on them; None without windows.
    prompts      token lists with room for `new_tokens` more; none where no speed was asked for.
    run          what is asked of the run: its draft length, device, threads.
    draft        the run's draft, which is exported, too, to draft for ONNX; None: prompt lookup drafts.
    """

    folder: Path
    windows: Tensor
    perplexity: float | None
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    draft: Path | None
    run: RunContext


@dataclass(frozen=True)
class _Drafting:
    """Who drafts for exports in ONNX; note: why it is not on ONNX Runtime, where it could have been."""

    drafter: "Model | LookupDrafter"
    name: str
    note: str | None = None


def held_out(windows: Tensor) -> Tensor:
    """The windows (E, L) that exports are measured on: the first ones of those given, 4,096 tokens or one window."""
    return windows[: max(1, TOKENS // windows.shape[1])]


def not_measured(entries: Sequence[Entry], reason: str) -> tuple[list[ExportEntry], Reasons]:
    """Entries without figures, and why."""
    reasons = {f"exports.{index}.measured": reason for index in range(len(entries))}
    return [ExportEntry(**entry, measured=None) for entry in entries], reasons


def merged(report: Report, made: Sequence[Entry]) -> Report:
    """A finished report with exports that were made after it: new, or in the place of those of their names."""
    missing = {path: why for path, why in report.not_measured.items() if not path.startswith("exports.")}
    entries = {entry.name: entry for entry in report.exports}
    below = [(path.split(".", 2), why) for path, why in report.not_measured.items() if path.startswith("exports.")]
    reasons = {name: {p[2]: why for p, why in below if p[1] == str(i)} for i, name in enumerate(entries)}
    for entry in made:
        name = entry["name"]
        entries[name], reasons[name] = ExportEntry(**entry, measured=None), {"measured": _LATER}
    for index, name in enumerate(sorted(entries)):
        missing |= {f"exports.{index}.{path}": why for path, why in reasons[name].items()}
    # What nobody gave stays so: a report of an older schema has less.
    given = {name: getattr(report, name) for name in report.model_fields_set}
    return Report(**{**given, "exports": [entries[name] for name in sorted(entries)], "not_measured": missing})


def measure(entries: Sequence[Entry], task: Task) -> tuple[list[ExportEntry], Reasons]:
    """The entries with their `measured`, and why figures are null.

    An export that cannot be loaded or run has no figures, and the sentence that says so for a reason.
    """
    found: list[ExportEntry] = []
    missing: Reasons = {}
    with _drafting(task, entries) as drafting:
        for index, entry in enumerate(entries):
            task.run.progress("exports", index, len(entries))
            try:
                folder = task.folder / entry["name"]
                # What `load` takes: a GGUF file, else the folder.
                path = next(iter(sorted(folder.glob("*.gguf"))), folder)
                figures, reasons = _measure(path, task, drafting)
            except USER_ERRORS as error:
                figures, reasons = None, {"": str(error)}
            found.append(ExportEntry(**entry, measured=figures))
            missing |= {f"exports.{index}.measured{path}": why for path, why in reasons.items()}
    task.run.progress("exports", len(entries), len(entries))
    return found, missing


@contextmanager
def _drafting(task: Task, entries: Sequence[Entry]) -> Iterator[_Drafting | None]:
    """Who drafts for those in ONNX; None where nothing is to be drafted."""
    onnx = any(holds_onnx(task.folder / entry["name"]) for entry in entries)
    if not onnx or not task.prompts:
        yield None
        return
    if task.draft is None:
        yield _Drafting(LookupDrafter(), "lookup")
        return
    from compress import export

    place, note = task.folder / _DRAFT, None
    path = place
    try:
        try:
            export.run("onnx", task.draft, place)
        except USER_ERRORS as error:
            path = task.draft
            note = f"its draft ran on the runtime's own kernels, because it has no ONNX form: {error}"
        model = load(path, device=task.run.device, threads=task.run.threads)
        yield _Drafting(model, f"draft on {model.decoder.kernels}", note)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _measure(path: Path, task: Task, drafting: _Drafting | None) -> tuple[ExportFigures, Reasons]:
    """`measured` of one export, and why figures are null, by the path below it. Raises UserError as `load` does."""
    model = load(path, device=task.run.device, threads=task.run.threads)
    missing: Reasons = {}
    perplexity, speed, notes = None, None, list[str]()
    if len(task.windows):
        perplexity = quality.perplexity(model.decoder, task.windows, f"the export {path.name}'s logits")
    else:
        missing |= dict.fromkeys((".perplexity", ".artifact_perplexity"), NO_QUALITY)
    if not holds_onnx(path):
        missing[".speed"] = _OUR_KERNELS
    elif drafting is None:
        missing[".speed"] = NO_SPEED
    else:
        speed = _speed(model, task, drafting)
        missing |= {f".speed.{key}": TOO_FEW for key in null_paths(speed.model_dump(by_alias=True))}
        if drafting.note is not None:
            notes.append(drafting.note)
    figures = ExportFigures(
        engine=model.decoder.kernels,
        tokens=len(task.windows) * (task.windows.shape[1] - 1) if len(task.windows) else 0,
        perplexity=perplexity,
        artifact_perplexity=task.perplexity,
        speed=speed,
        notes=notes,
    )
    return figures, missing


def _speed(model: "Model", task: Task, drafting: _Drafting) -> ExportSpeed:
    """Greedy decoding alone and with the draft, interleaved, on the same sessions."""
    prompts = task.prompts[:PROMPTS]
    length = task.run.draft_length or FIXED_DRAFT_LENGTH
    ways = {"plain": Speculator(model), "speculative": Speculator(model, drafting.drafter, length)}
    timed = time_interleaved(ways, Work(prompts, task.new_tokens), lambda *_: None)
    compared, mismatches = compare(timed["plain"].tokens[0], timed["speculative"].tokens[0])
    return ExportSpeed(
        prompts=len(prompts),
        new_tokens=task.new_tokens,
        draft_length=length,
        tokens_per_second=timed["plain"].tokens_per_second,
        drafter=drafting.name,
        speculative_tokens_per_second=timed["speculative"].tokens_per_second,
        acceptance_rate=total(timed["speculative"].metrics[0]).acceptance_rate,
        class_=lossless_class(model, ways["speculative"].verify, Sampling()),
        tokens_compared=compared,
        mismatches=mismatches,
    )
