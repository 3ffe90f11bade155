"""Run folders and sweeps under a folder, as the page lists them: what their report.json says, whoever wrote it.

A name that a client sends is only looked up among what was found here, so it never becomes a path. Links are not
followed. A file that is no report of ours is listed with a sentence that says so.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import read_json, regular

MOST_RUNS = 2000
MOST_BYTES = 32_000_000  # of a report; ours have a quarter of one
_DEPTH = 4
_SCHEMA = 2  # of report.json, which compress.report.schema defines
_INNER = frozenset(("model", "draft", "medusa", "block", "exports", "serve"))  # of a run folder
_REPORTS = {"run": "report.html", "sweep": "sweep.html"}


@dataclass(frozen=True)
class Found:
    """A run folder or a sweep. `name` is its path below the listed folder; `problem` why it has no figures."""

    name: str
    kind: str
    path: Path
    problem: str | None = None


@dataclass(frozen=True)
class RunRow:
    """One run in the table. None: not measured there, or not readable.

    speed  the faster of plain and speculative decoding over plain decoding of the original in the same run.
    """

    name: str
    kind: str
    problem: str | None
    recipe: str | None = None
    about: str | None = None
    model: str | None = None
    draft: str | None = None
    cpu: str | None = None
    version: str | None = None
    compressed_bytes: float | None = None
    original_bytes: float | None = None
    ratio: float | None = None
    bits_per_weight: float | None = None
    perplexity: float | None = None
    original_perplexity: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    tokens_per_second: float | None = None
    original_tokens_per_second: float | None = None
    speed: float | None = None
    speedup: float | None = None
    drafter: str | None = None
    acceptance_rate: float | None = None
    tokens_per_round: float | None = None
    lossless: str | None = None
    mismatches: float | None = None
    has_page: bool = False


def listed(folder: Path) -> dict[str, Found]:
    """Every run and sweep below a folder by name, at most MOST_RUNS. Raises UserError where it cannot be read."""
    found: dict[str, Found] = {}
    try:
        for one in _walk(folder, folder, 0):
            if len(found) == MOST_RUNS:
                break
            found[one.name] = one
    except OSError as error:
        raise UserError(f"--runs: {folder.name} cannot be read: {error.strerror}") from error
    return found


def row(found: Found) -> dict[str, Any]:
    """What the table shows of a run or a sweep."""
    page = found.path / _REPORTS[found.kind]
    has_page = found.problem is None and page.is_file() and not page.is_symlink()
    if found.kind == "sweep" or found.problem is not None:
        return asdict(RunRow(found.name, found.kind, found.problem, has_page=has_page))
    try:
        report = read_json(_bounded(found.path / "report.json"))
    except (UserError, OSError) as error:
        said = str(error) if isinstance(error, UserError) else "report.json is no file that can be read"
        return asdict(RunRow(found.name, "run", said, has_page=has_page))
    return asdict(_figures(found.name, report, has_page))


def recipe_text(found: Found) -> str | None:
    """recipe.yaml of a run; None where there is none that can be read."""
    try:
        return _bounded(found.path / "recipe.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def report_page(found: Found) -> bytes | None:
    """The report's HTML; None where there is none that can be read."""
    try:
        return _bounded(found.path / _REPORTS[found.kind]).read_bytes()
    except OSError:
        return None


def _walk(root: Path, folder: Path, depth: int) -> Iterator[Found]:
    name = folder.relative_to(root).as_posix() if folder != root else folder.name
    is_run = (folder / "report.json").exists()
    if is_run:
        yield Found(name, "run", folder)
    if (folder / "sweep.json").exists():
        yield Found(f"{name} (sweep)", "sweep", folder)
    if depth == _DEPTH:
        return
    for inner in sorted(folder.iterdir()):
        if inner.is_symlink():
            if inner.is_dir():
                link = inner.relative_to(root).as_posix()
                yield Found(link, "run", inner, "this is a link, and links are not followed: move the run here")
        elif inner.is_dir() and not (is_run and inner.name in _INNER):
            try:
                yield from _walk(root, inner, depth + 1)
            except PermissionError:
                closed = inner.relative_to(root).as_posix()
                yield Found(closed, "run", inner, "this folder may not be read")


def _bounded(path: Path) -> Path:
    """The path of a file that may be read whole. Raises OSError."""
    if path.is_symlink() or not regular(path).exists() or path.stat().st_size > MOST_BYTES:
        raise OSError(f"{path.name} is a link, is missing, or is too large")
    return path


def _figures(name: str, report: dict[str, Any], has_page: bool) -> RunRow:
    schema = report.get("schema")
    problem = None
    if not isinstance(report.get("size"), dict) or not isinstance(report.get("recipe"), str):
        return RunRow(name, "run", "report.json is not a report of Specpress", has_page=has_page)
    if schema != _SCHEMA:
        problem = (
            f"report.json is of schema {str(schema)[:20]}, and this version reads {_SCHEMA}: figures may be missing"
        )
    original, plain, spoken = (
        _number(report, f"speed.{way}.tokens_per_second") for way in ("original", "compressed", "speculative")
    )
    fastest = max((value for value in (plain, spoken) if value is not None), default=None)
    return RunRow(
        name=name,
        kind="run",
        problem=problem,
        recipe=_text(report, "recipe"),
        about=_text(report, "asked.recipe.about"),
        model=_text(report, "model"),
        draft=_text(report, "draft"),
        cpu=_text(report, "machine.cpu"),
        version=_text(report, "versions.specpress"),
        compressed_bytes=_number(report, "size.compressed_bytes"),
        original_bytes=_number(report, "size.original_bytes"),
        ratio=_number(report, "size.ratio"),
        bits_per_weight=_number(report, "size.bits_per_weight"),
        perplexity=_number(report, "quality.perplexity.compressed"),
        original_perplexity=_number(report, "quality.perplexity.original"),
        kl_divergence=_number(report, "quality.kl_divergence.mean"),
        top1_agreement=_number(report, "quality.top1_agreement"),
        tokens_per_second=fastest,
        original_tokens_per_second=original,
        speed=fastest / original if fastest and original else None,
        speedup=_number(report, "speed.speedup.over_compressed"),
        drafter=_text(report, "speed.drafter"),
        acceptance_rate=_number(report, "speed.acceptance_rate"),
        tokens_per_round=_number(report, "speed.tokens_per_round"),
        lossless=_text(report, "lossless.class"),
        mismatches=_number(report, "lossless.mismatches"),
        has_page=has_page,
    )


def _at(report: Any, path: str) -> Any:
    for key in path.split("."):
        report = report.get(key) if isinstance(report, dict) else None
    return report


def _number(report: Any, path: str) -> float | None:
    value = _at(report, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of more digits than a float holds
        return None


def _text(report: Any, path: str) -> str | None:
    value = _at(report, path)
    # Half a character is no Unicode, and could not be sent.
    return value[:500].encode("utf-8", "replace").decode() if isinstance(value, str) else None
