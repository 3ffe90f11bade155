"""Candidates compressed on the nodes of a cluster, one each; what they bring home is measured here."""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.best.candidates import measured_briefly, recipe_of
from compress.best.folder import CANDIDATES
from compress.best.predict import Known, Predicted
from compress.context import RunContext
from compress.errors import UserError
from compress.processes import Ended, all_of

if TYPE_CHECKING:
    from compress.remote.runs import Nodes

# What a run of compress.run is not told of, or is told by whoever runs it.
_OWN = ("recipe", "out", "resume", "force", "command", "progress", "note", "shard_bytes", "memory_budget", "speed")


def compress_all(batch: Sequence[Predicted], known: Known, context: RunContext, nodes: "Nodes") -> None:
    """Compresses those of the candidates that are not compressed yet, all at once.

    Raises UserError for a run that fails there, with its last line.
    """
    home = context.folder / CANDIDATES
    work = [
        (one.key, partial(_compress, one, known, context, home / one.key, nodes))
        for one in batch
        if not (home / one.key / "report.json").is_file()
    ]
    for key, ended in all_of(work, max(2, len(work))):
        if ended.code:
            raise UserError(f"candidate {key} was not compressed on its node: {ended.error.removeprefix('error: ')}")


def _compress(one: Predicted, known: Known, context: RunContext, folder: Path, nodes: "Nodes") -> Ended:
    folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = recipe_of(one, known, context).to_yaml()
    log = folder.with_name(f"{folder.name}.log")
    return nodes.run(option_words(measured_briefly(context)), folder, recipe, log, context.note)


def option_words(context: RunContext) -> list[str]:
    """The options of compress.run that say what a context does, as words; whole paths."""
    words = [] if context.speed else ["--no-speed"]
    for one in fields(RunContext):
        value: Any = getattr(context, one.name)
        if one.name in _OWN or value is None or (one.default is not MISSING and value == one.default):
            continue
        words += [f"--{one.name.replace('_', '-')}", ",".join(value) if isinstance(value, tuple) else str(value)]
    return words
