"""Puts the report together: loads both models from disk, measures, writes report.json, report.md and report.html."""

import json
import os
import platform
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch

from calib.corpora import Corpus
from calib.errors import UserError as CorpusError
from calib.prompts import prompts as cut_prompts
from calib.windows import Windows
from compress.artifact.files import write_atomic
from compress.context import RunContext
from compress.recipe import Recipe
from compress.records import LayerRecord, RunFacts
from compress.report import baselines, exports, page, quality, size, speed, unmeasured
from compress.report.schema import SCHEMA, validate
from runtime import load
from runtime.devices import resolve
from runtime.kernels import available
from runtime.model.layers import described
from runtime.speculate import Speculator
from runtime.speculative.drafters.medusa import MedusaDrafter, load_heads

if TYPE_CHECKING:
    from runtime.contract import Decoder
    from runtime.model.load import Model

PROMPTS = 8
_SHORT_PROMPT = 32  # tokens of a prompt that is cut from an evaluation window
_NO_KV = "the key-value cache is not quantised"


@dataclass(frozen=True)
class _Measured:
    """Sections of the report, and why figures are missing, by dotted path."""

    quality: dict[str, Any]
    speed: dict[str, Any]
    lossless: dict[str, Any]
    machine: dict[str, Any]
    cache_bytes: tuple[int, int] | None
    sample: dict[str, Any] | None
    exports: list[dict[str, Any]]
    missing: dict[str, str]


def make_report(facts: RunFacts, context: RunContext) -> dict[str, Any]:
    """Measures the artifact and writes report.json, report.md and report.html into `facts.folder`; returns the report.

    `context.progress` is told of the stages "load", "quality", "speed", "baselines", "exports" and "page".

    Raises UserError (of any floor) for models or text that cannot be measured. Nothing half written stays behind.
    """
    # Models larger than memory can be compressed, but not be measured here.
    loads = bool(context.eval_tokens) or context.speed
    measured = _measure(facts, context) if loads else _unloaded(facts, context)
    missing = dict(measured.missing)
    measured_size = size.measure(
        facts.original,
        facts.model,
        facts.draft,
        facts.layers,
        measured.cache_bytes,
        facts.pruned,
        resolve(context.device),
    )
    for section, figures in (("size", measured_size), ("quality", measured.quality)):
        missing |= {f"{section}.{path}": why for path, why in figures.pop("not_measured", {}).items()}
    if measured.quality["kv_perplexity"] is None:
        missing.setdefault("quality.kv_perplexity", _NO_KV)
    calibration, uncalibrated = _calibration(facts.calibration)
    corpus, recipe = facts.text.corpus, context.recipe
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "recipe": recipe.name,
        "model": display_name(facts.model_name),
        "draft": None if facts.draft_name is None else display_name(facts.draft_name),
        "asked": {
            "command": scrub_command(context.command or f"python -m compress.run --recipe {recipe.name}"),
            "recipe": without_directories(recipe.to_dict()),
            "samples": context.samples,
            "seq_len": context.seq_len,
            "eval_tokens": context.eval_tokens,
            "new_tokens": context.new_tokens,
            "draft_length": context.draft_length,
            "threads": context.threads,
        },
        "machine": measured.machine,
        "versions": dict(facts.versions) or _versions(),
        "seed": context.seed,
        "size": measured_size,
        "quality": {
            "corpus": {"name": corpus.name, "sha256": corpus.sha256, "python": corpus.python},
            **measured.quality,
            "layers": [_layer(layer) for layer in facts.layers],
        },
        "speed": measured.speed,
        "lossless": measured.lossless,
        "calibration": calibration,
        "left_alone": [asdict(entry) for entry in facts.left_alone],
        "sample": measured.sample,
        "exports": measured.exports,
        "not_measured": missing | uncalibrated,
    }
    validate(report)
    context.progress("page", 0, 1)
    write_report(report, facts.folder)
    context.progress("page", 1, 1)
    return report


def _measure(facts: RunFacts, context: RunContext) -> _Measured:
    """Loads both models and measures what was asked for."""
    progress, windows = context.progress, facts.text.windows
    progress("load", 0, 1)
    models = [load(path, device=context.device, threads=context.threads) for path in (facts.original, facts.model)]
    original, compressed = models
    draft = None
    if facts.draft is not None and context.speed:
        draft = load(facts.draft, device=context.device, threads=context.threads)
    heads = None
    if compressed.medusa_path is not None and context.speed:
        heads = MedusaDrafter(load_heads(compressed.medusa_path, compressed))
    progress("load", 1, 1)
    missing: dict[str, str] = {}
    head = _head(context.recipe)
    measured_quality = (
        quality.measure(
            original.decoder,
            compressed.decoder,
            windows,
            context.seed,
            head=head,
            on_step=lambda done, total: progress("quality", done, total),
        )
        if context.eval_tokens
        else unmeasured.quality(windows.length, head)
    )
    kind = compressed.decoder.kv.kind
    quantised = kind != "float32" and context.eval_tokens > 0
    cached = quality.kv_perplexity(compressed.decoder, windows, kind) if quantised else None
    measured_quality["kv_perplexity"] = cached
    new_tokens = _affordable(context.new_tokens, [*models, *([draft] if draft else [])])
    prompts = make_prompts(facts.text.corpus, compressed, windows, new_tokens, context.seed)
    # Without evaluation the draft's agreement is measured on the calibration windows, which no draft has seen.
    held_out = windows.evaluation if context.eval_tokens else windows.calibration
    measured_speed = (
        speed.measure(
            original,
            compressed,
            # Heads that a stage trained are what the run is about, whatever draft lies beside them.
            draft if heads is None else heads,
            prompts,
            held_out,
            new_tokens,
            context.draft_length,
            progress,
            context.seed,
        )
        if context.speed
        else speed.not_measured()
    )
    sample = make_sample(original, compressed, prompts[0], new_tokens)
    machine = describe_machine(compressed.decoder)
    threads, device = torch.get_num_threads(), str(compressed.decoder.device)
    cache_bytes = (
        original.decoder.new_cache().bytes_per_token(),
        compressed.decoder.new_cache(kind).bytes_per_token(),
    )
    windows_of_exports = exports.held_out(windows.evaluation)
    artifact_perplexity = None
    if facts.exports and context.eval_tokens:
        what = "the compressed model's logits"
        artifact_perplexity = quality.perplexity(compressed.decoder, windows_of_exports, what)
    # The child process holds a copy of the original: ours go first.
    del models, original, compressed, draft
    if context.speed:
        progress("baselines", 0, 1)
        rows = baselines.run(facts.original, facts.draft, prompts, new_tokens, context.draft_length, threads, device)
        measured_speed.speed["baselines"] = [_scrubbed(row, facts) for row in rows]
        for index, row in enumerate(rows):
            if row["why"]:
                missing[f"speed.baselines.{index}"] = _scrubbed(row["why"], facts)
        progress("baselines", 1, 1)
    missing |= measured_speed.not_measured
    task = exports.Task(
        folder=facts.folder / "exports",
        windows=windows_of_exports,
        perplexity=artifact_perplexity,
        prompts=prompts if context.speed else (),
        new_tokens=new_tokens,
        draft=facts.draft,
        run=context,
    )
    exported, unknown = exports.measure(facts.exports, task) if facts.exports else ([], {})
    missing |= {path: _scrubbed(why, facts) for path, why in unknown.items()}
    return _Measured(
        quality=measured_quality,
        speed=measured_speed.speed,
        lossless=measured_speed.lossless,
        machine=machine,
        cache_bytes=cache_bytes,
        sample=sample,
        exports=[_scrubbed(entry, facts) for entry in exported],
        missing=missing,
    )


def _unloaded(facts: RunFacts, context: RunContext) -> _Measured:
    """What there is to say where nothing is measured that takes a model."""
    nothing = speed.not_measured()
    device = resolve(context.device)
    kernels = next(kernel.name for kernel in available(str(device)) if kernel.usable)
    exported, unknown = exports.unmeasured(facts.exports, unmeasured.NOT_LOADED)
    missing = {**nothing.not_measured, "sample": unmeasured.NOT_LOADED, **unknown}
    section = unmeasured.quality(context.seq_len, _head(context.recipe))
    machine = _machine(device, kernels)
    return _Measured(
        quality=section,
        speed=nothing.speed,
        lossless=nothing.lossless,
        machine=machine,
        cache_bytes=None,
        sample=None,
        exports=exported,
        missing=missing,
    )


def _layer(layer: LayerRecord) -> dict[str, Any]:
    """A layer's line: figures that its method does not measure are left out."""
    wanted = ("name", "scheme", "group_size", "error", "output_error", "damping")
    return {key: value for key, value in asdict(layer).items() if key in wanted and value is not None}


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Writes the three files, each of them whole or not at all."""
    texts = {
        "report.json": json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "report.md": page.markdown(report),
        "report.html": page.html(report),
    }
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())


def make_prompts(
    corpus: Corpus, model: "Model", windows: Windows, new_tokens: int, seed: int, count: int = PROMPTS
) -> list[list[int]]:
    """`count` prompts as tokens, with room for the new ones; the front of one that is too long is cut off.

    Beginnings of functions or paragraphs of the corpus; where it has too few, the first tokens of evaluation windows
    (of calibration windows where there are none).
    """
    room = max(1, model.decoder.max_positions - new_tokens)
    found: list[list[int]] = []
    for wanted in range(count, 0, -1):
        try:
            texts = cut_prompts(corpus, wanted, seed)
        except CorpusError:
            continue
        found = [list(model.tokenizer(text, verbose=False)["input_ids"])[-room:] for text in texts]
        break
    held_out = windows.evaluation if len(windows.evaluation) else windows.calibration
    windows_left = iter(held_out.tolist())
    while len(found) < count and (window := next(windows_left, None)) is not None:
        found.append(window[: min(_SHORT_PROMPT, room)])
    return [prompt for prompt in found if prompt]


def make_sample(original: "Model", compressed: "Model", prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """The same prompt continued greedily by both, as text."""
    texts = [
        Speculator(model).generate([prompt], max_new_tokens=new_tokens)[0].text for model in (original, compressed)
    ]
    shown = compressed.tokenizer.decode(list(prompt), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"prompt": shown, "original": texts[0], "compressed": texts[1], "new_tokens": new_tokens}


def describe_machine(decoder: "Decoder") -> dict[str, Any]:
    """CPU model, cores that this process may use, the kernels that decode, device. No host name."""
    return _machine(decoder.device, described(decoder))


def _machine(device: torch.device, kernels: str) -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": _cpu_name(),
        "cores": len(affinity(0)) if affinity else os.cpu_count() or 1,
        "instruction_path": kernels,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown"


def display_name(name: str) -> str:
    """A hub name as it is; the last part of a directory's path."""
    path = PurePath(name)
    is_hub_name = len(path.parts) == 2 and not path.is_absolute() and path.parts[0] not in (".", "..", "~")
    return name if is_hub_name and not Path(name).exists() else path.name or Path(name).resolve().name


def scrub_command(command: str) -> str:
    """The command with absolute paths (and those under ~) cut down to their last part."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return shlex.join(without_directories(word) for word in words)


def without_directories(value: Any) -> Any:
    """The same data with every string that is an absolute path cut down to its last part, `--key=/path` included."""
    if isinstance(value, dict):
        return {key: without_directories(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_directories(item) for item in value]
    if not isinstance(value, str):
        return value
    head, equals, rest = value.partition("=")
    if equals and head.startswith("--"):
        return f"{head}={without_directories(rest)}"
    return PurePath(value).name or value if value.startswith(("/", "~")) or PurePath(value).is_absolute() else value


def _scrubbed(value: Any, facts: RunFacts) -> Any:
    """A row or sentence of a library, without the directories of this run."""
    if isinstance(value, dict):
        return {key: _scrubbed(item, facts) for key, item in value.items()}
    if isinstance(value, list):
        return [_scrubbed(item, facts) for item in value]
    if not isinstance(value, str):
        return value
    for path in (facts.model, facts.original, *([facts.draft] if facts.draft else []), facts.folder, Path.home()):
        if len(path.parts) > 1:
            value = value.replace(str(path), path.name)
    return value


def _affordable(new_tokens: int, models: Sequence["Model"]) -> int:
    """New tokens, cut to half of the fewest positions of any of the models."""
    return max(1, min(new_tokens, *(model.decoder.max_positions // 2 for model in models)))


def _head(recipe: Recipe) -> str:
    return "keep" if recipe.quantize is None else recipe.quantize.head


def _calibration(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    keys = ("source", "samples_requested", "samples_used", "tokens")
    figures = {**dict.fromkeys(keys), "experts": [], "training": {}, **without_directories(given)}
    trains = bool(figures["training"])
    reason = "nothing is calibrated: stages train on text of their own" if trains else "the recipe looks at no text"
    return figures, {f"calibration.{key}": reason for key in keys if figures[key] is None}


def _versions() -> dict[str, str]:
    import transformers

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }
