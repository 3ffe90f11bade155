"""Stages on whole models: healing, and whatever else trains. What each is given, and how a finished one is kept.

A stage works in its own folder of the partial one: `out/` becomes its result, `work/` is for its checkpoints. A
finished stage is in the journal with a checksum of every file, so that a resumed run takes it as it is.
"""

import importlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from calib.training_text import Stream
from compress.artifact import STAGES, files
from compress.artifact.journal import Journal
from compress.context import RunContext
from compress.errors import UserError
from compress.recipe.stages import Stage
from compress.recipe.training import Budget, Settings
from runtime.devices import resolve


@dataclass(frozen=True)
class Group:
    """Parameters that are trained alike.

    rate_factor   of the settings' rate.
    weight_decay  None: the settings'.
    optimizer     muon (Jordan et al. 2024) is for matrices inside the blocks; its rate is on AdamW's scale.
    """

    name: str
    parameters: list[nn.Parameter]
    rate_factor: float = 1.0
    weight_decay: float | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"


@dataclass(frozen=True)
class Loss:
    """`value` is the mean over the micro-batch, a scalar with its graph; `parts`, for people, what it is made of."""

    value: Tensor
    parts: dict[str, float] = field(default_factory=dict)


class Task(Protocol):
    """Something that can be trained. It may use torch's random numbers: the loop seeds them before each loss."""

    def groups(self) -> list[Group]:
        """The parameters; the same ones in the same order every time."""
        ...

    def loss(self, batch: Tensor, progress: float) -> Loss:
        """batch (B, length + 1) int64 on the parameters' device; progress 0 to 1 is the share of steps done."""
        ...

    def evaluate(self) -> float:
        """Held-out loss in nats of what would be written now; lower is better."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The weights that a checkpoint has to keep, the trained ones and what else changes."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` gave."""
        ...


class Batches(Protocol):
    """Where batches come from: a pure function, so that a resumed run needs no reader's state."""

    def take(self, step: int, micro: int) -> Tensor:
        """This process's rows of a micro-batch: (B / processes, length + 1) int64."""
        ...


@dataclass(frozen=True)
class StageContext:
    """What a stage that trains has to work with, besides its keys.

    run        what is asked of the run: seed, threads, progress, …
    original   the uncompressed model's directory.
    model      what the stages before have left: a plain directory for heal, ternary and qat, the finished model/ for
               learn, draft, medusa and block_draft.
    draft      the draft's directory, where the run has one.
    tokens     (n,) text to train on, one stream; none of it is calibrated or evaluated on.
    held_out   (E, length) int64: windows that choose the best weights; nothing else reads them.
    work       the stage's own folder for checkpoints.
    pack       packs a plain directory as the run has packed the original: pack(plain, out) writes `out`, which is not
               there yet. None for stages before packing.
    unpacked   learn: what was packed, the original or that in another basis. None: the original.
    """

    run: RunContext
    original: Path
    model: Path
    draft: Path | None
    tokens: Stream
    held_out: Tensor
    work: Path
    settings: Settings
    budget: Budget
    pack: Callable[[Path, Path], None] | None = None
    unpacked: Path | None = None

    @property
    def device(self) -> str:
        """Where the stage trains: "cpu", "cuda:0"."""
        return str(resolve(self.run.device))


@dataclass(frozen=True)
class Kind:
    """A kind of stage: the module whose function `run(stage, context, out)` does it, and what `out` is in the artifact.

    after_packing  whether it works on the finished model/, beside which its result is put, or in its place where it is
                   a model. Where it holds a folder model/, that takes the place of the artifact's.
    parallel       whether several processes can do it together.
    """

    module: str
    result: str
    after_packing: bool = False
    parallel: bool = False


# Modules are imported when a recipe asks for them.
KINDS: dict[str, Kind] = {
    "heal": Kind("compress.distill.heal", "model", parallel=True),
    "learn": Kind("compress.learn.stage", "model", after_packing=True),
    "ternary": Kind("compress.qat.stage", "model", parallel=True),
    "qat": Kind("compress.qat.stage", "model", parallel=True),
    "draft": Kind("compress.distill.draft", "draft", after_packing=True),
    "medusa": Kind("compress.medusa", "medusa", after_packing=True),
    "block_draft": Kind("compress.block_draft", "block", after_packing=True),
}
Run = Callable[[Any, StageContext, Path], dict[str, Any]]


@dataclass(frozen=True)
class StageResult:
    """A stage's result directory, and what the report says of it."""

    out: Path
    report: dict[str, Any]


def place(folder: Path, index: int, kind: str) -> Path:
    """The folder of stage `index` of a recipe in the partial folder."""
    return folder / STAGES / f"{index:02d}-{kind}"


def run_stage(stage: Stage, home: Path, journal: Journal, context: StageContext, text: dict[str, Any]) -> StageResult:
    """Does a stage in its folder `home` and puts it into the journal. `text` is what the report says of its text."""
    out, making = home / "out", home / "out.tmp"
    for stale in (out, making):
        if stale.exists():
            shutil.rmtree(stale)
    report = work(stage, context, making)
    report = _without_nulls({"budget": asdict(context.budget), "text": text, **report})
    # What a library has written last, before the journal says that it is there.
    for path in sorted(making.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                files.sync(file)
    files.rename(making, out)
    keep(home, journal, report)
    # Its checkpoints are of no more use.
    shutil.rmtree(context.work)
    return StageResult(out, report)


def keep(home: Path, journal: Journal, report: dict[str, Any]) -> None:
    """Puts a stage whose `out/` is there into the journal."""
    files.sync_folder(home)
    journal.stages[home.name] = {"files": files.listed(home / "out"), "report": report}
    journal.note()


def work(stage: Stage, context: StageContext, out: Path) -> dict[str, Any]:
    """Does a stage: writes `out`, and returns what the report says of it."""
    run: Run = importlib.import_module(KINDS[stage.kind].module).run
    context.work.mkdir(parents=True, exist_ok=True)
    return run(getattr(stage, stage.kind), context, out)


def finished(home: Path, journal: Journal) -> StageResult:
    """A stage that a run before has finished. Raises UserError where its files are not what was written."""
    record = journal.stages[home.name]
    out, expected = home / "out", record["files"]
    found = files.listed(out) if out.is_dir() else {}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(f"{out / name} is not what the journal says was written: start again with --force")
    return StageResult(out, record["report"])


def _without_nulls(value: Any) -> Any:
    """The report's nulls are figures that are missing; here they are keys that do not apply."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, (list, tuple)) else value
