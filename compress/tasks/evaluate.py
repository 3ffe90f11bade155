"""Tasks of lm-eval by the original and by the compressed model, paired sample by sample."""

import io
import logging
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import USER_ERRORS, UserError
from compress.quality import mcnemar
from compress.quality.figures import TaskFigures
from runtime.contract import CacheKind

if TYPE_CHECKING:
    from runtime.model.load import Model


def require_tasks(names: Sequence[str], folder: Path | None) -> None:
    """Raises UserError where lm-eval is not installed, where it knows no task of a name, and for a folder that is none.

    folder  with task YAML files of one's own; None: lm-eval's tasks alone.
    """
    manager = _manager(names, folder)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        where = "lm-eval" if folder is None else f"lm-eval or {folder.name}"
        raise UserError(f"--tasks: expected tasks that {where} knows, found {', '.join(unknown)}: correct the name")


def evaluate(
    models: "tuple[Model, Model]", kinds: tuple[CacheKind, CacheKind], names: Sequence[str], folder: Path | None
) -> list[TaskFigures]:
    """Every task's metrics by both models, each with its cache of `kinds`.

    Raises UserError as `require_tasks`, and for a task whose data cannot be had or that a model cannot run.
    """
    require_tasks(names, folder)
    both = [_run(model, kind, names, folder) for model, kind in zip(models, kinds, strict=True)]
    found = []
    for task, metrics in both[0]["results"].items():
        for key, value in metrics.items():
            name, _, kept = key.partition(",")
            if not kept or name.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = metrics.get(f"{name}_stderr,{kept}")
            pairs = [_values(results, task, name, kept) for results in both]
            found.append(
                TaskFigures(
                    task=task,
                    metric=name if kept == "none" else f"{name} ({kept})",
                    samples=len(pairs[0]),
                    original=float(value),
                    compressed=float(both[1]["results"][task][key]),
                    error=float(error) if isinstance(error, (int, float)) else None,
                    **_flips(*pairs),
                )
            )
    return found


def _manager(names: Sequence[str], folder: Path | None) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError("--tasks needs lm-eval: pip install 'specpress[eval]'") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is not None:
        if not folder.is_dir():
            raise UserError(
                f"--task-folder: expected a folder with task YAML files, found none at {folder}: correct it"
            )
        # lm-eval's own index takes seconds to read.
        alone = TaskManager(include_path=str(folder), include_defaults=False)
        if all(name in alone.all_tasks for name in names):
            return alone
    return TaskManager(include_path=None if folder is None else str(folder))


def _run(model: "Model", kind: CacheKind, names: Sequence[str], folder: Path | None) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    from compress.tasks.model import SpecpressLM

    try:
        # It reports on the screen what the report has.
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            found = simple_evaluate(
                model=SpecpressLM(model, cache=kind), tasks=[*names], task_manager=_manager(names, folder)
            )
    except USER_ERRORS:
        raise
    # Whatever a task's data set or functions raise.
    except Exception as error:
        said = str(error).strip().splitlines()
        raise UserError(f"--tasks {','.join(names)}: {said[0] if said else type(error).__name__}") from error
    return dict(found)


def _values(results: dict[str, Any], task: str, metric: str, kept: str) -> list[float]:
    """A metric of every sample, in the order of the documents; empty where it is no figure of a sample."""
    samples = [one for one in results["samples"].get(task, []) if one.get("filter", "none") == kept]
    found = [one.get(metric) for one in sorted(samples, key=lambda one: one["doc_id"])]
    return [float(one) for one in found if isinstance(one, (int, float))]


def _flips(original: Sequence[float], compressed: Sequence[float]) -> dict[str, Any]:
    """Of a metric that is 0 or 1 for every sample."""
    if not original or len(original) != len(compressed) or {*original, *compressed} - {0.0, 1.0}:
        return {"lost": None, "won": None, "p_value": None}
    lost, won = (sum(a - b == sign for a, b in zip(original, compressed, strict=True)) for sign in (1, -1))
    return {"lost": lost, "won": won, "p_value": mcnemar.p_value(lost, won)}
