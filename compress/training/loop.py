"""The training loop: AdamW or Muon, a schedule, accumulation, clipping, checkpoints; the same for every stage.

Equal seeds, settings and threads give equal bits on a CPU, and so does a run that was killed and went on. A budget in
minutes is the exception until its number of steps is fixed, which is before the first step.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import UserError
from compress.progress import Note, Progress
from compress.recipe.training import Budget, Settings
from compress.training import checkpoint
from compress.training.checkpoint import Checkpoints, Point, TrainingState
from compress.training.contract import Batches, Group, StageContext, Task
from compress.training.parallel import World, current
from compress.training.schedule import learning_rate_at

_POINTS = 200  # of the loss curve, besides those with a held-out loss
# Timed steps, one before them warms up: as many as fit into the first share of a budget in minutes, for some steps
# take longer (those on what a draft writes itself are one in ten). Three at least, unless that takes the second share.
_MOST_TRIALS, _LEAST_TRIALS = 64, 3
_TRIAL_SHARES = 0.02, 0.1


@dataclass(frozen=True)
class TrainingResult:
    """What came of it: steps and predicted tokens, held-out losses in nats before and at the best step, the curve."""

    steps: int
    tokens: int
    seconds: float
    best: float
    best_step: int
    before: float
    curve: tuple[Point, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data for the report."""
        return asdict(self) | {"curve": [asdict(point) for point in self.curve]}


def train(
    task: Task,
    batches: Batches,
    budget: Budget,
    settings: Settings,
    folder: Path,
    progress: Progress,
    note: Note,
    stage: str = "train",
) -> TrainingResult:
    """Trains until the budget is used up; the task then holds the weights with the lowest held-out loss.

    folder  for checkpoints; where it holds one, training goes on from there. Only process 0 uses it.
    stage   what `progress` calls it.

    Raises UserError for a budget that is not enough for one step, a batch that the processes cannot share equally, a
    loss or gradient that is not finite (naming the step; the last checkpoint stays) and a checkpoint that is damaged or
    of another run.
    """
    world = current()
    if settings.batch % world.size:
        raise UserError(
            f"training.batch: expected a multiple of the {world.size} processes, found {settings.batch}: change it"
        )
    if world.leads:
        folder.mkdir(parents=True, exist_ok=True)
    devices = [parameter.device for group in task.groups() for parameter in group.parameters if parameter.is_cuda]
    with torch.random.fork_rng(sorted({device.index for device in devices})):
        return _Loop(task, batches, budget, settings, folder, progress, note, world, stage).run()


def train_stage(
    context: StageContext,
    task: Task,
    batches: Batches,
    stage: str,
    *,
    budget: Budget | None = None,
    folder: Path | None = None,
) -> TrainingResult:
    """`train` for a stage of a recipe; `budget` and `folder` are the stage's own where they are left out."""
    run, budget, folder = context.run, budget or context.budget, folder or context.work
    return train(task, batches, budget, context.settings, folder, run.progress, run.note, stage)


@dataclass(eq=False)
class _Loop:
    """One run of `train`, whose arguments these are."""

    task: Task
    batches: Batches
    budget: Budget
    settings: Settings
    folder: Path
    progress: Progress
    note: Note
    world: World
    stage: str

    def __post_init__(self) -> None:
        self.groups = self.task.groups()
        self.parameters = [parameter for group in self.groups for parameter in group.parameters]
        if not self.parameters:
            raise ValueError("expected parameters to train, found none")
        self.device = self.parameters[0].device
        self.optimizers = make_optimizers(self.groups, self.settings)
        self.checkpoints = Checkpoints(self.folder, self._identity())
        self.begun = time.monotonic()
        self.parts: dict[str, float] = {}

    def run(self) -> TrainingResult:
        world = self.world
        if world.share(self.checkpoints.exists()):
            standing, weights, moments = world.share(self.checkpoints.load() if world.leads else None)
            self.task.load(weights)
            checkpoint.load_moments(self.optimizers, moments)
            self._say(f"training goes on after step {standing.step} of {standing.steps}")
        else:
            standing = self._start()
        world.spread([parameter.data for parameter in self.parameters])
        self.begun = time.monotonic() - standing.seconds
        while standing.step < standing.steps:
            self.progress(self.stage, standing.step, standing.steps)
            self._step(standing)
        self.progress(self.stage, standing.steps, standing.steps)
        self.task.load(world.share(self.checkpoints.best() if world.leads else None))
        return TrainingResult(
            standing.steps,
            standing.steps * self.settings.tokens_per_step,
            standing.seconds,
            standing.best,
            standing.best_step,
            standing.before,
            tuple(standing.curve),
        )

    def _start(self) -> TrainingState:
        """Measures the beginning, fixes the number of steps, and writes the first checkpoint."""
        self.world.spread([parameter.data for parameter in self.parameters])
        begun = time.monotonic()
        before = self._evaluate()
        if not math.isfinite(before):
            raise UserError(f"training: expected a finite held-out loss before the first step, found {before}")
        steps = self._steps(time.monotonic() - begun)
        standing = TrainingState(steps, 0, before, before, 0, time.monotonic() - begun)
        standing.curve.append(Point(0, 0, None, 0.0, before))
        tokens = steps * self.settings.tokens_per_step
        self._say(f"training: {steps:,} steps, {tokens:,} tokens; held-out loss {before:.4f} before")
        if self.world.leads:
            self.checkpoints.keep_best(0, self.task.state())
            self._save(standing)
        return standing

    def _steps(self, evaluation: float) -> int:
        """How many steps the budget is good for; `evaluation`: seconds that one takes."""
        settings = self.settings
        if self.budget.tokens is not None:
            steps = self.budget.tokens // settings.tokens_per_step
            if not steps:
                raise UserError(
                    f"training.tokens: expected at least the {settings.tokens_per_step} tokens of one step, found "
                    f"{self.budget.tokens}: raise it, or make training.batch smaller"
                )
            return steps
        assert self.budget.minutes is not None
        trials, each = self._time_of_step(self.budget.minutes * 60)
        begun = time.monotonic()
        if self.world.leads:
            self.checkpoints.keep_best(0, self.task.state())
        saving = time.monotonic() - begun
        every = evaluation / settings.evaluate_every + 3 * saving / settings.save_every
        left = self.budget.minutes * 60 - evaluation - trials - 4 * saving
        steps = int(self.world.agree(left / (each + every)))
        if steps < 1:
            raise UserError(
                f"training.minutes: expected time for one step at least, which takes {each + every:.1f} s here after "
                f"{evaluation + trials:.1f} s of measuring, found {self.budget.minutes:g} minutes: raise "
                "it, or make training.batch smaller"
            )
        if self.budget.most_tokens is None:
            return steps
        return min(steps, max(1, self.budget.most_tokens // settings.tokens_per_step))

    def _time_of_step(self, most: float) -> tuple[float, float]:
        """Seconds of all trials, few where they are long beside `most`, and of a step: the mean, without the first.

        The trials change nothing: their rate is 0, and the moments are forgotten after them.
        """
        seconds: list[float] = []
        while len(seconds) < 2 or not _tried_enough(len(seconds) - 1, math.fsum(seconds) / most):
            begun = time.monotonic()
            self._gradients(len(seconds), 0.0)
            self._update(0.0)
            seconds.append(self.world.agree(time.monotonic() - begun))
        self.optimizers = make_optimizers(self.groups, self.settings)
        return math.fsum(seconds), math.fsum(seconds[1:]) / (len(seconds) - 1)

    def _step(self, standing: TrainingState) -> None:
        settings, step = self.settings, standing.step
        rate = learning_rate_at(step, standing.steps, settings)
        loss = self._gradients(step, step / standing.steps)
        self._update(rate)
        standing.step += 1
        standing.since.append(loss)
        last, evaluated = standing.step == standing.steps, None
        if standing.step % settings.evaluate_every == 0 or last:
            evaluated = self._evaluate()
            if evaluated < standing.best:
                standing.best, standing.best_step = evaluated, standing.step
                if self.world.leads:
                    self.checkpoints.keep_best(standing.step, self.task.state())
        if evaluated is not None or standing.step % max(1, standing.steps // _POINTS) == 0:
            mean = math.fsum(standing.since) / len(standing.since)
            tokens = standing.step * settings.tokens_per_step
            standing.curve.append(Point(standing.step, tokens, mean, rate, evaluated))
            standing.since = []
            if evaluated is not None:
                parts = "".join(f", {name} {value:.4f}" for name, value in self.parts.items())
                self._say(
                    f"step {standing.step} of {standing.steps}: loss {mean:.4f}{parts}, held-out {evaluated:.4f}, "
                    f"rate {rate:.2e}"
                )
        if standing.step % settings.save_every == 0 or last:
            standing.seconds = time.monotonic() - self.begun
            if self.world.leads:
                self._save(standing)

    def _gradients(self, step: int, progress: float) -> float:
        """Leaves the step's mean gradient on the parameters, clipped; the mean loss over all processes."""
        settings, world = self.settings, self.world
        for parameter in self.parameters:
            parameter.grad = None
        total = torch.zeros((), dtype=torch.float64)
        self.parts = {}
        for micro in range(settings.gradient_accumulation_steps):
            rows = self.batches.take(step, micro).to(self.device)
            torch.manual_seed(_mixed(settings.seed, step, micro, world.rank))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=settings.autocast):
                loss = self.task.loss(rows, progress)
            (loss.value / settings.gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call]
            total += loss.value.detach().double().cpu() / settings.gradient_accumulation_steps
            for name, value in loss.parts.items():
                self.parts[name] = self.parts.get(name, 0.0) + value / settings.gradient_accumulation_steps
        world.average([*map(_gradient, self.parameters), total])
        if not math.isfinite(float(total)):
            raise self._not_finite("loss", step)
        norm = nn.utils.clip_grad_norm_(self.parameters, settings.max_grad_norm)
        if not math.isfinite(float(norm)):
            raise self._not_finite("gradient", step)
        return float(total)

    def _update(self, rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["rate_factor"]
            optimizer.step()

    def _evaluate(self) -> float:
        found = 0.0
        if self.world.leads:
            torch.manual_seed(self.settings.seed)
            with torch.no_grad():
                found = self.task.evaluate()
        return self.world.agree(found)

    def _save(self, standing: TrainingState) -> None:
        self.checkpoints.save(standing, self.task.state(), checkpoint.moments(self.optimizers))

    def _not_finite(self, what: str, step: int) -> UserError:
        where = "the last checkpoint is kept" if self.checkpoints.exists() else "nothing was kept"
        return UserError(
            f"training: expected a finite {what}, found none at step {step + 1}: lower training.learning_rate ({where})"
        )

    def _say(self, line: str) -> None:
        if self.world.leads:
            self.note(line)

    def _identity(self) -> dict[str, Any]:
        """Everything that the weights depend on, beside the text and the model, which the caller's journal has."""
        shapes = {
            group.name: {
                "shapes": [list(parameter.shape) for parameter in group.parameters],
                "rate_factor": group.rate_factor,
                "weight_decay": group.weight_decay,
                "optimizer": group.optimizer,
            }
            for group in self.groups
        }
        settings = asdict(self.settings) | {"betas": list(self.settings.betas)}
        processes = {"processes": self.world.size, "threads": torch.get_num_threads(), "device": self.device.type}
        return {"budget": asdict(self.budget), "settings": settings, "groups": shapes, **processes}


def make_optimizers(groups: Sequence[Group], settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW for its groups and Muon for its own; either is left out where it has none."""
    rate, made = settings.learning_rate, list[torch.optim.Optimizer]()
    if adam := [_described(group, settings) for group in groups if group.optimizer == "adamw"]:
        # The plain form takes a dozen passes over the weights, the fused one a single pass.
        made.append(torch.optim.AdamW(adam, lr=rate, betas=settings.betas, fused=True))
    if muon := [_described(group, settings) for group in groups if group.optimizer == "muon"]:
        made.append(torch.optim.Muon(muon, lr=rate, adjust_lr_fn="match_rms_adamw"))
    return made


def _tried_enough(timed: int, share: float) -> bool:
    """Whether so many timed steps, which took this share of the budget, tell what a step takes."""
    few, many = _TRIAL_SHARES
    return timed >= _MOST_TRIALS or share > many or (timed >= _LEAST_TRIALS and share > few)


def _described(group: Group, settings: Settings) -> dict[str, Any]:
    decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
    return {"params": group.parameters, "weight_decay": decay, "rate_factor": group.rate_factor}


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient; zeros for a parameter that the loss did not touch, so that all processes exchange the same."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _mixed(*numbers: int) -> int:
    """One seed of several numbers."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return mixed
