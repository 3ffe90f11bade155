"""What is measured on the original, once: damages, times, and drafts that are accepted. The journal keeps it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from compress.best import acceptance, caches, estimate, forwards, quality
from compress.best.acceptance import Drafts
from compress.best.costs import Costs
from compress.best.journal import Journal
from compress.best.predict import Known
from compress.best.prepare import Ready
from compress.best.quality import Damages, QualityModel, TooLongError
from compress.best.question import Question
from compress.pipeline.forecast import shown_time
from compress.pipeline.inputs import RunInputs
from compress.report.assemble import make_prompts
from compress.report.pairing import Drafting
from compress.report.size import weight_bytes as files_bytes
from runtime.model.layers import weight_bytes

if TYPE_CHECKING:
    from runtime.model.load import Model

_CONTEXT_TOKENS = 128
# Of --minutes, the share that measuring damages may take.
_SHARE = 0.4
# How damages are known.
MEASURED, ESTIMATED = "measured", "estimated"


def know(asked: Question, ready: Ready, journal: Journal, original: "Model", draft: "Model | None") -> Known:
    """What predictions are made of: what the journal does not hold yet is measured, and noted.

    original  runs on the own decoder; draft: of its vocabulary.

    Raises UserError where the output is not finite, or no kernel takes a layer.
    """
    inputs, context, progress = ready.inputs, asked.context, asked.context.progress
    if not journal.damages:
        found, how = _damages(asked, ready)
        journal.note(damages=[list(row) for row in found], damages_are=how)
    checkpoint = inputs.target.checkpoint
    if not journal.costs:
        timed = forwards.time_model(original, checkpoint, ready.units, text_before(inputs), progress)
        journal.note(costs=timed.to_dict())
    times = Costs.from_dict(journal.costs)
    if not journal.drafts:
        drafting = Drafting(original, draft, threads=context.threads)
        prompts = prompts_of(asked, inputs, original)
        drafts = acceptance.measure(drafting, prompts, context.new_tokens, progress)
        short, rounds = forwards.shortest(original, checkpoint, ready.units, times)
        more = acceptance.beside(replace(drafting, target=short), [one.drafter for one in drafts], prompts, rounds)
        journal.note(drafts=[acceptance.to_dict(replace(one, beside=more[one.drafter])) for one in drafts])
    if asked.budgets.memory is not None and not journal.caches:
        journal.note(caches=list(caches.measure(original, inputs.text.windows.calibration, context.threads, progress)))
    # Without a budget of memory nothing is gained by rounding keys and values.
    offered = len(journal.caches) if asked.budgets.memory is not None else 1
    quality_model = QualityModel(
        tuple(tuple(row) for row in journal.damages), ready.units, caches=(0.0, *journal.caches[1:offered])
    )
    tokens = asked.tokens * asked.batch
    held = caches.bytes_of(original, tokens, asked.batch)[:offered]
    return Known(
        ready.units,
        ready.sizes,
        times,
        drafts_of(journal),
        quality_model,
        bytes_of_draft(draft, tokens, asked.batch),
        held,
    )


def _damages(asked: Question, ready: Ready) -> tuple[Damages, str]:
    """Measured, or estimated where measuring would take too much of the minutes; and which of the two."""
    inputs, context = ready.inputs, asked.context
    given = inputs.text.windows.calibration, ready.units, inputs.structure.blocks_at, context.progress
    model = _float_model(inputs)
    try:
        return quality.measure(model, *given, seconds=60 * asked.minutes * _SHARE), MEASURED
    except TooLongError as error:
        context.note(
            f"rounding each layer in every way would take about {shown_time(error.seconds)}, too much of --minutes "
            f"{asked.minutes:g}: what that damages is estimated from gradients"
        )
    return estimate.estimate(model, *given), ESTIMATED


def bytes_of_draft(draft: "Model | None", tokens: int, requests: int) -> int:
    """Memory that a draft takes, with keys and values of so many tokens, and what states requests have."""
    if draft is None:
        return 0
    parts = getattr(draft.decoder, "parts", None)
    held = files_bytes(draft.path) if parts is None else weight_bytes(parts)
    return held + draft.decoder.new_cache().bytes_per_token() * tokens + requests * caches.state_bytes(draft)


def drafts_of(journal: Journal) -> tuple[Drafts, ...]:
    """Every drafter's rounds, as they were measured."""
    return tuple(acceptance.from_dict(one) for one in journal.drafts)


def text_before(inputs: RunInputs) -> list[int]:
    """Tokens that forwards are timed after."""
    tokens: list[int] = inputs.text.windows.calibration[0, :_CONTEXT_TOKENS].tolist()
    return tokens


def prompts_of(asked: Question, inputs: RunInputs, model: "Model") -> list[list[int]]:
    """The prompts that drafters and finalists continue."""
    text, context = inputs.text, asked.context
    return make_prompts(text.corpus, model, text.windows, context.new_tokens, context.seed)


def _float_model(inputs: RunInputs) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        inputs.target.path, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).eval()
