"""What the report measures of quality, on both models as they are loaded: losses, the quantised cache, choices of the
next line, and the verdict on all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calib.training_text import Measured
from calib.windows import Windows
from compress.context import RunContext
from compress.quality import long_context, scoring
from compress.quality.choices import line_breaks, make_choices
from compress.quality.figures import Flips, LongContext, TaskFigures
from compress.quality.flips import flips, lengths
from compress.quality.paired import paired
from compress.quality.verdict import judge
from compress.recipe import Recipe
from compress.report import quality
from compress.report.not_measured import Reasons
from compress.report.schema import Comparison
from runtime.contract import CacheKind

if TYPE_CHECKING:
    from runtime.model.load import Model

# Evaluation tokens for each choice: of a large model choices then take about four times as long as the losses do.
_TOKENS_PER_CHOICE = 8
LEAST_CHOICES = 20  # fewer tell nothing
_FEW = "the text has too few lines to choose from"


@dataclass(frozen=True)
class KeptQuality:
    """The section's figures, and why others are missing."""

    comparison: Comparison
    kv_perplexity: float | None
    tasks: list[TaskFigures]
    long_context: LongContext | None
    not_measured: Reasons


def measure(models: "tuple[Model, Model]", text: Measured, kind: CacheKind, context: RunContext) -> KeptQuality:
    """Of the original and the compressed model; `kind` is the cache that the compressed one runs with.

    `context.progress` is told of the stages "quality" and "choices". Raises UserError as `quality.measure` does.
    """
    windows = text.windows
    if not context.eval_tokens:
        nothing, missing = quality.not_measured(windows.length, head(context.recipe))
        return KeptQuality(nothing, None, run_tasks(models, kind, context), long(models, text, context), missing)
    original, compressed = models
    progress, decoders = context.progress, (original.decoder, compressed.decoder)
    scores = quality.score(*decoders, windows, on_step=lambda done, total: progress("quality", done, total))
    comparison, missing = quality.summarise(
        scores, windows.evaluation_bytes, windows.length, head(context.recipe), context.seed
    )
    before, after = (
        np.array([float(getattr(one, name).mean()) for one in scores]) for name in ("original_nll", "compressed_nll")
    )
    kv_perplexity = None
    if kind == "float32":
        missing["quality.kv_perplexity"] = "the key-value cache is not quantised"
    else:
        after = quality.kv_losses(compressed.decoder, windows, kind)
        kv_perplexity = float(np.exp(after.mean()))
    found = choose(models, windows, kind, context)
    if isinstance(found, str):
        missing["quality.flips"] = found
    flipped = None if isinstance(found, str) else found
    verdict = None
    if len(scores) > 1:
        tokens = comparison.protocol.tokens
        verdict = judge(paired(after - before, windows.evaluation_documents.numpy(), tokens), flipped)
    else:
        missing["quality.verdict"] = "one window tells no spread: evaluate more tokens"
    comparison = comparison.model_copy(update={"flips": flipped, "verdict": verdict})
    tasks, contexts = run_tasks(models, kind, context), long(models, text, context)
    return KeptQuality(comparison, kv_perplexity, tasks, contexts, missing)


def long(models: "tuple[Model, Model]", text: Measured, context: RunContext) -> LongContext | None:
    """Long contexts, where they were asked for, through every kind of cache."""
    if not context.long_context:
        return None
    length = min(context.long_context, *(model.decoder.max_positions for model in models))
    windows = long_context.long_windows(text.corpus, text.tokenizer, length, context.seed, text.separator)
    needles = long_context.make_needles(windows, text.tokenizer, context.seed)
    original, compressed = (model.decoder for model in models)
    return long_context.measure(
        original, compressed, windows, needles, on_step=lambda done, total: context.progress("long", done, total)
    )


def run_tasks(models: "tuple[Model, Model]", kind: CacheKind, context: RunContext) -> list[TaskFigures]:
    """The tasks that were asked for."""
    if not context.tasks:
        return []
    from compress.tasks.evaluate import evaluate

    context.progress("tasks", 0, 1)
    folder = None if context.task_folder is None else Path(context.task_folder)
    found = evaluate(models, ("float32", kind), context.tasks, folder)
    context.progress("tasks", 1, 1)
    return found


def choose(models: "tuple[Model, Model]", windows: Windows, kind: CacheKind, context: RunContext) -> Flips | str:
    """Choices of the next line by both models, or why there are none.

    They are cut from further windows of evaluation's documents; from evaluation's own where those are too few.
    """
    wanted = min(context.choices, context.eval_tokens // _TOKENS_PER_CHOICE)
    if not wanted:
        return "no choices were asked for (--choices 0)" if not context.choices else _FEW
    text, documents = windows.evaluation, windows.evaluation_documents
    if len(windows.further):
        text = torch.cat([windows.further, text])
        documents = torch.cat([windows.further_documents, documents])
    owners = documents.tolist() or [*range(len(text))]
    tokenizer = models[0].tokenizer
    choices = make_choices(text, owners, line_breaks(text, tokenizer.decode), wanted, context.seed)
    if len(choices) < LEAST_CHOICES:
        return _FEW
    total = 2 * (choices[-1].window + 1)

    def told(first: int) -> Callable[[int, int], None]:
        return lambda done, _: context.progress("choices", first + done, total)

    kinds: tuple[CacheKind, CacheKind] = ("float32", kind)
    found = [
        scoring.score(model.decoder, text, choices, cache, told(index * total // 2))
        for index, (model, cache) in enumerate(zip(models, kinds, strict=True))
    ]
    options = {option for choice in choices for option in choice.options}
    sizes = {option: len(tokenizer.decode(list(option)).encode()) for option in options}
    return flips(found[0], found[1], lengths(choices, sizes))


def head(recipe: Recipe) -> str:
    """How the recipe has the output head stored: it belongs to the protocol."""
    return "keep" if recipe.quantize is None else recipe.quantize.head
