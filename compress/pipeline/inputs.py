"""What a run works on, each thing opened once: the models, their structure, the text."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from calib import corpora
from calib.corpora import Corpus
from calib.training_text import Measured
from compress.context import RunContext
from compress.errors import UserError
from compress.model.single_experts import SingleExperts, loaded_apart
from compress.model.source import Source, open_sources
from compress.model.structure import ModelStructure, read_structure
from compress.stages import kv_cache
from compress.training import data
from compress.training.data import StageText
from runtime.bench.prompts import read_prompts
from runtime.sampling.conversation import written
from runtime.speculative.draft import parts


@dataclass(frozen=True)
class RunInputs:
    """The context, and what it names.

    text            what calibration and evaluation read, and how it is cut.
    training_texts  what stages train on, by their index in the recipe.
    """

    context: RunContext
    target: Source
    draft: Source | None
    structure: ModelStructure
    text: Measured
    training_texts: Mapping[int, StageText]


def open_inputs(context: RunContext) -> RunInputs:
    """Opens and checks whatever the context names.

    Raises UserError for models that are not there or do not belong together, a structure that no stage can work on,
    and text that is too short.
    """
    target, draft = open_sources(context.model, context.draft)
    if context.tasks:
        from compress.tasks.evaluate import require_tasks

        require_tasks(context.tasks, None if context.task_folder is None else Path(context.task_folder))
    # Before the model's classes, whose import takes longest: a path that does not exist is told at once.
    corpus = _corpus(context.calib, target)
    structure = read_structure(target.path)
    _check_speed(context, draft is not None, any(map(structure.is_draft_head, target.checkpoint.names())))
    if context.recipe.quantize is not None and not context.recipe.trains and loaded_apart(structure.model):
        structure = read_structure(target.path, apart=True)
        target = replace(target, checkpoint=replace(target.checkpoint, shards=SingleExperts(target.checkpoint.shards)))
    if structure.body_at:
        _check_composite(context, type(structure.model).__name__)
    if context.recipe.kv is not None:
        kv_cache.check(target.checkpoint.config)
    text = Measured(
        source=context.calib,
        corpus=corpus,
        tokenizer=target.tokenizer,
        length=min(context.seq_len, target.max_positions),
        calibration=context.samples,
        evaluation_tokens=context.eval_tokens,
        seed=context.seed,
        separator=target.tokenizer.eos_token_id,
    )
    # Cut now, so that text that is too short stops the run before any work.
    assert text.windows.length
    texts: Mapping[int, StageText] = {}
    if context.recipe.trains:
        texts = data.gather(context.recipe, text)
    return RunInputs(context, target, draft, structure, text, texts)


def _corpus(spec: str | None, target: Source) -> Corpus:
    """The text to calibrate and measure on; conversations as the target's chat template writes them, both roles."""
    corpus, tokenizer = corpora.load(spec, chats=True), target.tokenizer
    if not corpus.are_chats:
        return corpus
    if not tokenizer.chat_template:
        raise UserError(
            f"{corpus.name} holds conversations, and the tokenizer of {target.name} has no chat template to write them:"
            " name plain text with --calib, or a model that was made for chat"
        )
    # Windows begin with that token themselves.
    begin = tokenizer.bos_token or ""
    return corpora.as_text(corpus, lambda messages: written(tokenizer, messages, answer=False).removeprefix(begin))


def _check_composite(context: RunContext, name: str) -> None:
    """Raises UserError for what is only done to a language model alone: its towers would not fit, or not be there."""
    recipe = context.recipe
    shape = next((f"prunes by {prune.method}" for prune in recipe.prunes if prune.share is not None), "")
    sensitive = recipe.quantize is not None and recipe.quantize.method == "sensitivity"
    what = shape or ("trains" if recipe.trains else "measures sensitivity" if sensitive else "")
    if what:
        raise UserError(
            f"recipe {recipe.name} {what}, which is done to a language model alone, and a {name} has more beside it:"
            " use a recipe that rounds or prunes weights block by block"
        )


def _check_speed(context: RunContext, has_draft: bool, has_mtp: bool) -> None:
    """Raises UserError for prompts that cannot be read and a drafter that the run will not have: the work comes first,
    and speed is measured last."""
    if not context.speed:
        return
    if context.prompts is not None:
        read_prompts(Path(context.prompts))
    stages = {stage.kind for stage in context.recipe.stages}
    quantize = context.recipe.quantize
    needs = {
        "model": ("a draft: name one with --draft", has_draft or "draft" in stages),
        "tree": ("a draft: name one with --draft", has_draft or "draft" in stages),
        "medusa": ("a recipe with a medusa stage, such as int8-medusa", "medusa" in stages),
        "block": ("a recipe with a block_draft stage, such as int4-block-draft", "block_draft" in stages),
        "mtp": ("a checkpoint that brings a layer for multi-token prediction", has_mtp),
        "nested": (
            "a recipe with int8 weights, such as int8-dynamic",
            quantize is not None and str(quantize.scheme).startswith("int8"),
        ),
    }
    for kind in parts(context.drafter or "none"):
        need, there = needs.get(kind, ("", True))
        if not there:
            raise UserError(f"--drafter {context.drafter} needs {need}")
