"""The matrix as a page of the documentation, and as a table for the terminal."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.checkpoints.architecture import COMPOSITES
from runtime.models.matrix import CLASSES, Row

if TYPE_CHECKING:
    from rich.table import Table

COMMAND = "python -m runtime.models --write docs/models.md"

_ABOUT = (
    "What cannot be taken out of a cache again (the state of a recurrence) verifies no drafts: such a model decodes",
    "plainly, whatever drafts, and says so. Where our own decoder runs layers with a state (the convolutions of LFM2",
    "and 3, the delta rules of Qwen3-Next and Qwen3.5, the state spaces of Mamba-2, Bamba, Nemotron-H, Granite 4 and",
    "Falcon-H1), it keeps the states of the last tokens, and drafts are verified as ever.",
    "",
    "Compressing is another matter: what a recipe's format cannot hold is refused in a sentence that says what can,",
    "and a run's report lists every layer that was left alone, and why. A checkpoint with towers for images or sound",
    "beside its language model is named as it was downloaded: the language model is compressed, all else is carried",
    "byte for byte, and the result loads as the whole in transformers and as text here. Of these our own decoder runs",
    "the language model:",
    f"{', '.join(COMPOSITES)}.",
    "Draft heads that a checkpoint brings (multi-token prediction, EAGLE) are carried as they are, and named.",
)


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
        *_ABOUT,
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
