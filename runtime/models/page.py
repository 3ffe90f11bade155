"""The matrix as a page of the documentation, and as a table for the terminal."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.models.matrix import CLASSES, Row

if TYPE_CHECKING:
    from rich.table import Table

COMMAND = "python -m runtime.models --write docs/models.md"


def page(rows: Sequence[Row], version: str) -> str:
    """The page in Markdown, of the transformers of this version."""
    counts = Counter(row.runs for row in rows)
    lines = [
        "# Models",
        "",
        f"How each of the {len(rows)} causal architectures of transformers {version} runs: our own decoder is asked,",
        "and of every other one a tiny random model is run. `python -m runtime.models` prints it for the transformers",
        f"that is installed; this page is written by `{COMMAND}`.",
        "",
        "| | | |",
        "|---|---:|---|",
        *(f"| **{name}** | {counts[name]} | {about} |" for name, about in CLASSES.items()),
        "",
        "| model_type | class | runs | |",
        "|---|---|---|---|",
        *(f"| {row.model_type} | {row.name} | {row.runs} | {_escaped(row.note)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Row]) -> "Table":
    """The same for a terminal."""
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE)
    for header in ("model_type", "class", "runs", "note"):
        found.add_column(header, overflow="fold")
    for row in rows:
        found.add_row(row.model_type, row.name, row.runs, row.note)
    return found


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")
