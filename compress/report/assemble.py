"""Puts the report together: loads both models from disk, measures, writes report.json, report.md and report.html."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calib.corpora import Corpus
from calib.errors import UserError as CorpusError
from calib.prompts import prompts as cut_prompts
from calib.windows import Windows
from compress.context import BASELINES, FIXED_DRAFT_LENGTH, RunContext
from compress.records import RunFacts
from compress.report import baselines, exports, kept_quality, machine, quality, size, speed
from compress.report.files import write_report
from compress.report.not_measured import NOT_LOADED, Reasons
from compress.report.pairing import Drafting
from compress.report.schema import (
    SCHEMA,
    Asked,
    Calibration,
    Comparison,
    CorpusInfo,
    LayerError,
    Quality,
    Report,
    Sample,
)
from compress.report.scrub import display_name, scrub_command, without_directories, without_paths
from compress.report.timing import Work
from runtime import load
from runtime.audit.certificate import Certificate
from runtime.audit.certify import NEW_TOKENS, certify
from runtime.bench.prompts import read_prompts
from runtime.contract import no_drafts
from runtime.devices import resolve
from runtime.formats.schemes import KINDS, SCHEMES
from runtime.kernels import available
from runtime.model.layers import described
from runtime.speculate import Speculator

if TYPE_CHECKING:
    from runtime.model.load import Model

PROMPTS = 8
PROMPTS_OF_GROUP = 4  # of each group of tasks in a file of prompts that has several
_SHORT_PROMPT = 32  # tokens of a prompt that is cut from an evaluation window
_ASKED = ("samples", "seq_len", "eval_tokens", "new_tokens", "drafter", "draft_length", "threads")
_LAYER_FIGURES = ("name", "scheme", "group_size", "error", "output_error", "damping")


def make_report(facts: RunFacts, context: RunContext) -> Report:
    """Measures the artifact and writes report.json, report.md and report.html into `facts.folder`; returns the report.

    `context.progress` is told of the stages "load", "quality", "trial", "speed", "baselines", "exports" and "page".

    Raises UserError (of any floor) for models or text that cannot be measured. Nothing half written stays behind.
    """
    recipe = context.recipe
    asked = Asked(
        command=scrub_command(context.command or f"python -m compress.run --recipe {recipe.name}"),
        recipe=without_directories(recipe.to_dict()),
        **{name: getattr(context, name) for name in _ASKED},
    )
    # Models larger than memory can be compressed, but not be measured here.
    sections, missing = (
        _measure if context.eval_tokens or context.speed or context.tasks or context.long_context else _unloaded
    )(facts, context)
    calibration, uncalibrated = _calibration(facts.calibration)
    report = Report(
        schema_=SCHEMA,
        recipe=recipe.name,
        model=display_name(facts.model_name),
        draft=None if facts.draft_name is None else display_name(facts.draft_name),
        asked=asked,
        versions=facts.versions,
        seed=context.seed,
        calibration=calibration,
        left_alone=list(facts.left_alone),
        not_measured=missing | uncalibrated,
        **sections,
    )
    context.progress("page", 0, 1)
    write_report(report, facts.folder)
    context.progress("page", 1, 1)
    return report


def _measure(facts: RunFacts, context: RunContext) -> tuple[dict[str, Any], Reasons]:
    """The report's sections on the models, which are loaded, by name; and why figures are missing."""
    progress, corpus, windows = context.progress, facts.text.corpus, facts.text.windows
    progress("load", 0, 1)
    wanted = [facts.original, facts.model, *([facts.draft] if facts.draft is not None and context.speed else [])]
    models = [load(path, device=context.device, threads=context.threads) for path in wanted]
    original, compressed = models[:2]
    draft = models[2] if len(models) > 2 else None
    progress("load", 1, 1)
    kind = compressed.decoder.kv.kind
    few_windows = exports.held_out(windows.evaluation)
    held = kept_quality.measure((original, compressed), facts.text, kind, context)
    exports_perplexity = None
    if context.eval_tokens and facts.exports:
        exports_perplexity = quality.perplexity(compressed.decoder, few_windows, "the compressed model's logits")
    # At most half of the fewest positions of any of the models.
    new_tokens = max(1, min(context.new_tokens, *(model.decoder.max_positions // 2 for model in models)))
    groups: tuple[str, ...] = ()
    if context.prompts is None:
        prompts = make_prompts(corpus, compressed, windows, new_tokens, context.seed)
    else:
        prompts, groups = read_file(Path(context.prompts), compressed, new_tokens)
    timed, certificate = speed.not_measured(), {}
    if context.speed:
        schemes = {layer.scheme for layer in facts.layers}
        planes = any(KINDS[SCHEMES[name].kind].has_planes for name in schemes if name in SCHEMES)
        task = speed.Job(
            original,
            Drafting(compressed, draft, compressed.medusa_path, planes, context.threads),
            Work(prompts, new_tokens),
            # Without evaluation the draft's agreement is measured on the calibration windows, which no draft has seen.
            windows.evaluation if context.eval_tokens else windows.calibration,
            groups,
            context.drafter,
            context.draft_length,
            context.seed,
        )
        timed = speed.measure(task, progress)
        # It holds models.
        del task
        certificate = {"certificate": _certificate(compressed, draft, prompts, new_tokens)}
    both = [Speculator(model).generate(prompts[:1], new_tokens)[0].text for model in (original, compressed)]
    shown = compressed.tokenizer.decode(prompts[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    sample = Sample(prompt=shown, original=both[0], compressed=both[1], new_tokens=new_tokens)
    described_machine = machine.describe(compressed.decoder.device, described(compressed.decoder))
    threads, device = torch.get_num_threads(), str(compressed.decoder.device)
    cache_bytes = (original.decoder.new_cache().bytes_per_token(), compressed.decoder.new_cache(kind).bytes_per_token())
    # The child process holds a copy of the original: ours go first.
    del models, original, compressed, draft
    paths = (facts.model, facts.original, *([facts.draft] if facts.draft else []), facts.folder, Path.home())
    missing: Reasons = {}
    measured_speed = timed.speed
    if context.speed:
        progress("baselines", 0, 1)
        helper = None if facts.draft is None else str(facts.draft)
        job = baselines.Job(
            *(str(facts.original), helper, prompts, new_tokens),
            *(context.draft_length or FIXED_DRAFT_LENGTH, threads, device),
            rows=BASELINES[context.baselines],
        )
        rows = [without_paths(row, paths) for row in baselines.run(job)]
        missing |= {f"speed.baselines.{index}": row.why for index, row in enumerate(rows) if row.why}
        measured_speed = timed.speed.model_copy(update={"baselines": rows})
        progress("baselines", 1, 1)
    exporting = exports.Task(
        folder=facts.folder / "exports",
        windows=few_windows,
        perplexity=exports_perplexity,
        prompts=prompts if context.speed else (),
        new_tokens=new_tokens,
        draft=facts.draft,
        run=context,
    )
    exported, without_figures = exports.measure(facts.exports, exporting) if facts.exports else ([], {})
    measured_size, without_size = size.measure(facts, cache_bytes, resolve(context.device))
    sections = {
        "machine": described_machine,
        "size": measured_size,
        "quality": _quality(facts, held.comparison, held),
        "speed": measured_speed,
        "lossless": timed.lossless,
        **certificate,
        "sample": sample,
        "exports": [without_paths(entry, paths) for entry in exported],
    }
    return sections, missing | timed.not_measured | without_paths(
        without_figures, paths
    ) | without_size | held.not_measured


def _unloaded(facts: RunFacts, context: RunContext) -> tuple[dict[str, Any], Reasons]:
    """The same where nothing is measured that takes a model."""
    timed = speed.not_measured()
    device = resolve(context.device)
    kernels = next(kernel.name for kernel in available(str(device)) if kernel.usable)
    exported, without_figures = exports.not_measured(facts.exports, NOT_LOADED)
    comparison, unknown = quality.not_measured(context.seq_len, kept_quality.head(context.recipe))
    measured_size, without_size = size.measure(facts, None, device)
    sections = {
        "machine": machine.describe(device, kernels),
        "size": measured_size,
        "quality": _quality(facts, comparison),
        "speed": timed.speed,
        "lossless": timed.lossless,
        "sample": None,
        "exports": exported,
    }
    return sections, {**timed.not_measured, "sample": NOT_LOADED, **without_figures, **without_size, **unknown}


def _quality(facts: RunFacts, comparison: Comparison, held: kept_quality.KeptQuality | None = None) -> Quality:
    corpus = facts.text.corpus
    return Quality(
        corpus=CorpusInfo(name=corpus.name, sha256=corpus.sha256, python=corpus.python),
        **dict(comparison),
        kv_perplexity=None if held is None else held.kv_perplexity,
        tasks=[] if held is None else held.tasks,
        long_context=None if held is None else held.long_context,
        # Figures that a layer's method does not measure are left out.
        layers=[
            LayerError(**{name: value for name in _LAYER_FIGURES if (value := getattr(layer, name)) is not None})
            for layer in facts.layers
        ],
    )


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
        with suppress(CorpusError):
            texts = cut_prompts(corpus, wanted, seed)
            found = [list(model.tokenizer(text, verbose=False)["input_ids"])[-room:] for text in texts]
            break
    held_out = windows.evaluation if len(windows.evaluation) else windows.calibration
    found += held_out[: count - len(found), : min(_SHORT_PROMPT, room)].tolist()
    return [prompt for prompt in found if prompt]


def read_file(path: Path, model: "Model", new_tokens: int) -> tuple[list[list[int]], tuple[str, ...]]:
    """The first prompts of a file as tokens, as `make_prompts` has them, and the group of tasks of each.

    Of several groups a few of each; of one group, which there is nothing to tell of, as many as of a corpus.
    """
    found = read_prompts(path)
    names = tuple(dict.fromkeys(prompt.group for prompt in found))
    most = PROMPTS_OF_GROUP if len(names) > 1 else PROMPTS
    chosen = [prompt for name in names for prompt in [one for one in found if one.group == name][:most]]
    room = max(1, model.decoder.max_positions - new_tokens)
    tokens = [list(model.tokenizer(prompt.text, verbose=False)["input_ids"])[-room:] for prompt in chosen]
    return tokens, tuple(prompt.group for prompt in chosen) if len(names) > 1 else ()


def _certificate(target: "Model", draft: "Model | None", prompts: list[list[int]], new_tokens: int) -> Certificate:
    """Of the drafters that cost little beside a target of any size: one that looks texts up, and the run's own."""
    trained = {"block": target.block_path, "model": draft, "medusa": target.medusa_path}
    own = [next((name for name, there in trained.items() if there is not None), "suffix")]
    drafters = [] if no_drafts(target.decoder) else ["lookup", *own]
    return certify(target, draft, prompts, drafters, min(new_tokens, NEW_TOKENS))


def _calibration(given: dict[str, Any]) -> tuple[Calibration, Reasons]:
    keys = ("source", "samples_requested", "samples_used", "tokens")
    figures = {**dict.fromkeys(keys), "experts": [], "training": {}, **without_directories(given)}
    trains = bool(figures["training"])
    reason = "nothing is calibrated: stages train on text of their own" if trains else "the recipe looks at no text"
    return Calibration(**figures), {f"calibration.{key}": reason for key in keys if figures[key] is None}
