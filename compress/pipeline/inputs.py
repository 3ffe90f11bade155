"""What a run works on, each thing opened once: the models, their structure, the text."""

from collections.abc import Mapping
from dataclasses import dataclass

from calib import corpora
from calib.training_text import Measured
from compress.context import RunContext
from compress.model.source import Source, open_sources
from compress.model.structure import ModelStructure, read_structure
from compress.stages import kv_cache
from compress.training import data
from compress.training.data import StageText


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
    structure = read_structure(target.path)
    if context.recipe.kv is not None:
        kv_cache.check(target.checkpoint.config)
    text = Measured(
        source=context.calib,
        corpus=corpora.load(context.calib),
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
