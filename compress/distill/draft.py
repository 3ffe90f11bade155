"""The stage draft: the compressed target teaches the draft to propose what it would say (DistillSpec, 2310.08461).

The teacher is the packed target as it will be served, through the runtime's kernels. A draft that was trained beside
the original still answers like the original; what rounding has changed it cannot know.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.distill import acceptance, draft_init, minillm, on_policy
from compress.distill.divergences import Divergence, cross_entropy, divergence
from compress.distill.objective import Objective
from compress.distill.on_policy import Samples, Writer
from compress.distill.teacher import Teacher, narrowed, of_decoder
from compress.errors import UserError
from compress.recipe.training import Budget
from compress.recipe.training_stages import Draft
from compress.training import float_model
from compress.training.contract import Loss, StageContext
from compress.training.data import PackedBatches, portions
from compress.training.loop import train_stage
from runtime import load
from runtime.model.load import Model
from runtime.sampling.detokenize import require_same_vocabulary

# Acceptance is measured on the beginnings of so many held-out windows, each continued by so many tokens.
_PROMPTS, _NEW_TOKENS = 24, 64
# The share of a budget in minutes that the target's samples may take.
_SAMPLING = 0.2


def run(stage: Draft, context: StageContext, out: Path) -> dict[str, Any]:
    """Aligns the draft at `context.draft` (None: one made of the original) with the packed model at `context.model`.

    Writes the plain directory `out`. Returns, for the report: what the loop says of the run, `acceptance` before and
    after on held-out windows, `samples` that the target has written with the seconds that took, and `made_of`, the
    numbers of the target's blocks that a new draft was made of.
    Raises UserError for a draft with another vocabulary, and for whatever stops the loop.
    """
    context.work.mkdir(parents=True, exist_ok=True)
    source, made_of = context.draft, None
    if source is None:
        source = context.work / "made"
        made_of = _make(stage, context, source)
    target = load(context.model, device=context.device, threads=context.run.threads)
    before_model = load(source, device=context.device, threads=context.run.threads)
    require_same_vocabulary(target.tokenizer, before_model.tokenizer)
    prompts = context.held_out[:_PROMPTS, : min(stage.prompt, context.held_out.shape[1])].tolist()

    def accepted(draft: Model) -> acceptance.Acceptance:
        return acceptance.measure(target, draft, context.held_out, prompts, _NEW_TOKENS)

    before = accepted(before_model)
    del before_model
    student = float_model.Student.load(source, context.device)
    frozen = student.freeze_fused()
    samples = _samples(stage, context, target)
    task = DraftTask(
        stage,
        student.model,
        of_decoder(target.decoder),
        context.held_out,
        student.block_matrices(),
        writer=_student_writer(stage, context, student.model, target),
        samples=samples,
        autocast=context.settings.autocast,
    )
    batches = PackedBatches(context.tokens, context.settings)
    budget = _left(context.budget, samples)
    result = train_stage(context, task, batches, "draft", budget=budget)
    student.write(out, context.run.shard_bytes)
    after = accepted(load(out, device=context.device, threads=context.run.threads))
    context.run.note(
        f"draft: greedy acceptance at {acceptance.DRAFT_LENGTH} drafted tokens {_shown(before.acceptance_rate)} -> "
        f"{_shown(after.acceptance_rate)}, agreement {before.agreement:.3f} -> {after.agreement:.3f}"
    )
    told = {"texts": len(samples.tokens), "seconds": samples.seconds} if samples is not None else None
    return {
        **result.to_dict(),
        "loss": stage.loss,
        "acceptance": {"before": dataclasses.asdict(before), "after": dataclasses.asdict(after)},
        "samples": told,
        "made_of": None if made_of is None else list(made_of),
        "frozen": frozen,
    }


class DraftTask(float_model.ModelTask):
    """Distillation of a teacher's logits into a transformers model (`compress.training.contract.Task`).

    blocks    names of the blocks' matrices.
    writer    continues prompts as the student; None where it writes nothing.
    samples   what the teacher wrote; None where it wrote nothing.
    """

    def __init__(
        self,
        stage: Draft,
        student: Any,
        teacher: Teacher,
        held_out: Tensor,
        blocks: set[str],
        writer: Writer | None = None,
        samples: Samples | None = None,
        autocast: bool = False,
    ):
        if (stage.on_policy_fraction > 0) != (writer is not None) or (stage.teacher > 0) != (samples is not None):
            raise ValueError("expected a writer and samples where the stage has a share for them, and only there")
        super().__init__(student, held_out, autocast)
        self.blocks, self.optimizer = blocks, stage.optimizer
        self.stage, self.teacher, self.writer, self.samples = stage, teacher, writer, samples
        self.kind: Divergence = "reverse_kl" if stage.loss == "minillm" else stage.loss
        weights = {self.kind: 1.0} | ({"cross_entropy": stage.cross_entropy} if stage.cross_entropy else {})
        self.objective = Objective(weights, stage.temperature, stage.beta)

    def loss(self, batch: Tensor, progress: float) -> Loss:
        """See `Task.loss`. Whose text the micro-batch is, is drawn by torch's random numbers, which the loop seeds."""
        self.model.train()
        stage, prompt = self.stage, self.stage.prompt
        who = float(torch.rand(()))
        if self.writer is not None and who < stage.on_policy_fraction:
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
            written = self.writer(batch[:, :prompt].cpu(), batch.shape[1] - prompt, generator)
            batch = written.to(batch.device)
            if stage.loss == "minillm":
                return self._policy_gradient(batch)
        elif self.samples is not None and who < stage.on_policy_fraction + stage.teacher:
            numbers = torch.randint(len(self.samples.tokens), (len(batch),))
            batch = self.samples.take(numbers)[:, : batch.shape[1]].to(batch.device)
        given, wanted = self._logits(batch[:, :-1])
        parts = self.objective.divergences(given, wanted)
        if stage.cross_entropy:
            parts["cross_entropy"] = cross_entropy(given, batch[:, 1:].flatten())
        return self.objective.total(parts)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean divergence from the teacher on the held-out windows, of the stage's kind, at temperature 1."""
        self.model.eval()
        device = next(self.model.parameters()).device
        total = 0.0
        for rows in portions(self.held_out):
            precision = torch.autocast(device.type, torch.bfloat16, enabled=self.autocast)
            given, wanted = self._logits(rows.to(device), precision)
            total += float(divergence(given, wanted, self.kind, self.stage.beta)) * len(rows)
        return total / len(self.held_out)

    def _logits(self, tokens: Tensor, precision: AbstractContextManager[Any] | None = None) -> tuple[Tensor, Tensor]:
        """(B · T, V): the student's (precision None: the loop's), and the teacher's as far as the student's go."""
        with precision or nullcontext():
            given = self.model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
        return given, narrowed(self.teacher(tokens), given.shape[-1]).flatten(0, 1)

    def _policy_gradient(self, texts: Tensor) -> Loss:
        prompt = self.stage.prompt
        given = self.model(input_ids=texts[:, :-1], use_cache=False).logits[:, prompt - 1 :]
        wanted = narrowed(self.teacher(texts[:, :-1]), given.shape[-1])[:, prompt - 1 :]
        new = texts[:, prompt:]
        # A mean over tokens, as the other losses are.
        return Loss(minillm.policy_gradient(given, wanted, new, self.stage.teacher_mix) / new.shape[1])


def _make(stage: Draft, context: StageContext, out: Path) -> tuple[int, ...]:
    """A new draft of the original's blocks; the target's are packed."""
    original = float_model.load(context.original, context.device)
    count = draft_init.count_of(stage.keep, int(original.config.num_hidden_layers))
    kept = draft_init.choose_blocks(original, context.held_out, count, stage.blocks)
    shutil.rmtree(out, ignore_errors=True)  # a run before this one may have left half of it
    draft_init.write_draft(context.original, kept, out, context.run.shard_bytes)
    context.run.note(f"draft: made of {count} of the original's blocks, numbers {', '.join(map(str, kept))}")
    return kept


def _samples(stage: Draft, context: StageContext, target: Model) -> Samples | None:
    """What the target writes, greedily and at temperature 1 in turn: written once, and found again by a resumed run."""
    if not stage.teacher:
        return None
    writers = [on_policy.decoder_writer(target.decoder, temperature) for temperature in (0.0, 1.0)]
    minutes, tokens = context.budget.minutes, context.budget.tokens
    # No more than training will read.
    enough = stage.samples if tokens is None else math.ceil(stage.teacher * tokens / context.settings.length)
    return on_policy.write_samples(
        context.work / "samples.bin",
        writers,
        _prompts(context.tokens, stage.prompt),
        min(stage.samples, enough),
        context.settings.length + 1,
        context.run.seed,
        context.run.progress,
        seconds=None if minutes is None else 60 * minutes * _SAMPLING,
    )


def _prompts(tokens: Any, length: int) -> Callable[[int, torch.Generator], Tensor]:
    """Runs of training text at random places."""

    def take(rows: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(tokens) - length, (rows,), generator=generator).tolist()
        return torch.stack([torch.as_tensor(tokens[start : start + length].astype("int64")) for start in starts])

    return take


def _student_writer(stage: Draft, context: StageContext, student: Any, target: Model) -> Writer | None:
    """The runtime's kernels on a CPU, transformers elsewhere (there minillm draws from the student alone)."""
    if not stage.on_policy_fraction:
        return None
    if context.device != "cpu":
        return on_policy.model_writer(student)
    mixed = stage.loss == "minillm" and stage.teacher_mix > 0

    def write(prompts: Tensor, new: int, generator: torch.Generator) -> Tensor:
        now = on_policy.snapshot(student, context.work / "policy", context.run.threads)
        if mixed:
            return minillm.mixed_writer(now, target.decoder, stage.teacher_mix)(prompts, new, generator)
        return on_policy.decoder_writer(now)(prompts, new, generator)

    return write


def _left(budget: Budget, samples: Samples | None) -> Budget:
    """What the samples leave of a budget in minutes: always the same, as the seconds that they took are on file."""
    if budget.minutes is None or samples is None:
        return budget
    left = budget.minutes - samples.seconds / 60
    if left <= 0:
        raise UserError(
            f"draft.training.minutes: expected time to train, found {budget.minutes:g} minutes, of which the target's "
            f"first texts took {samples.seconds / 60:.1f}: ask for more, or set draft.teacher to 0"
        )
    return dataclasses.replace(budget, minutes=left)


def _shown(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:.3f}"
