"""The files of a report: report.json, and the pages made of it."""

import json
from pathlib import Path

from pydantic import ValidationError

from compress.artifact import Artifact
from compress.artifact.files import write_atomic
from compress.errors import UserError
from compress.report import page
from compress.report.schema import Report


def write_report(report: Report, folder: Path) -> None:
    """Writes report.json, report.md and report.html, each of them whole or not at all."""
    texts = {
        "report.json": json.dumps(report.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "report.md": page.markdown(report),
        "report.html": page.html(report),
    }
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())


def read_report(run: Path) -> Report:
    """The report of a run folder. Raises UserError where it cannot be read, or is none of this version."""
    try:
        return Report.model_validate(Artifact(run).report)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{run / 'report.json'}: {where or 'the report'}: {first['msg']}: run the recipe again with this version"
        ) from error
