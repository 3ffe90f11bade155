"""What is asked, opened and looked over before anything is written: files, layers, sizes, and whether memory does."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from compress.artifact.workspace import holder
from compress.best.folder import check_folder
from compress.best.question import Question
from compress.best.sizes import Sizes, read_sizes
from compress.best.space import Unit, find_units
from compress.errors import UserError
from compress.model.source import Source
from compress.pipeline.forecast import available, shown
from compress.pipeline.inputs import RunInputs, open_inputs
from compress.report.size import weight_bytes as files_bytes
from runtime.machine import total_memory

if TYPE_CHECKING:
    from runtime.model.load import Model

_FLOAT = 4


@dataclass(frozen=True)
class Ready:
    """What a planner works on: the files, the layers that may change, and the model's sizes."""

    inputs: RunInputs
    units: tuple[Unit, ...]
    sizes: Sizes


def check_free(out: Path, force: bool) -> None:
    """Raises UserError for a folder that another process works in, that holds what no planner wrote, or a plan."""
    if (process := holder(out)) is not None:
        raise UserError(
            f"{out.name} is in use by another run{process}: wait for it, or choose another folder with --out"
        )
    check_folder(out, force)


def prepare(asked: Question) -> Ready:
    """Opens and checks all that the question names; writes nothing.

    Raises UserError for files that are not there or do not belong together, for a model that the planner cannot take
    apart, and for one that this machine's memory does not hold.
    """
    _check_budget(asked)
    inputs = open_inputs(replace(asked.context, speed=False))
    units = find_units(inputs.target.shapes(), inputs.structure)
    if asked.budgets.ttft is not None and asked.prompt_tokens >= inputs.target.max_positions:
        raise UserError(
            f"--prompt-tokens: expected fewer than the {inputs.target.max_positions} tokens that the model can hold, "
            f"found {asked.prompt_tokens}: ask for less"
        )
    _check_memory(inputs.target)
    return Ready(inputs, units, read_sizes(inputs.target, inputs.structure, units))


def require_own_decoder(model: "Model") -> None:
    """Raises UserError for a model that runs through another library."""
    if getattr(model.decoder, "parts", None) is None:
        raise UserError("compress.best plans models that the own decoder runs, and this one runs through transformers")


def _check_budget(asked: Question) -> None:
    """Candidates are measured here: a budget that this machine does not have says nothing of them."""
    budget, there = asked.budgets.memory, total_memory()
    if budget is not None and there is not None and budget > there:
        raise UserError(
            f"--memory: expected at most the {shown(there)} of this machine, where the plan is measured, found "
            f"{shown(budget)}: ask for less, or leave it out"
        )


def _check_memory(target: Source) -> None:
    """The model is looked at in float32; beside it lies the original as the kernels hold it."""
    numbers = sum(math.prod(shape) for shape in target.shapes().values())
    need, free = _FLOAT * numbers + files_bytes(target.path), available()
    if free is not None and need > free:
        raise UserError(
            f"{target.name}: looking at its layers takes about {shown(need)} of memory and {shown(free)} are free: "
            "free some, or compress it with a built-in recipe, which goes block by block"
        )
