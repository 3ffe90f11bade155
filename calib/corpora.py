"""Where text comes from: this machine's standard library, text files, JSONL, Parquet, or a `datasets` name.

    python -m calib.corpora prompts OUT.jsonl [--source SPEC] [--count 50] [--seed 0]

writes prompts for whoever takes text from a file.
"""

import gzip
import hashlib
import json
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calib.chats import FIELD as MESSAGES
from calib.chats import checked
from calib.errors import UserError
from calib.sources import is_held_out, standard_library

STANDARD_LIBRARY = "stdlib"
_TEXT_SUFFIXES = (".txt", ".md", ".py")
_FILE_SUFFIXES = (*_TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".parquet")
# Where a row keeps its text. The first key that is there counts; the middle two hold prompts, whole as they stand.
_FIELDS = (MESSAGES, "text", "prompt", "turns", "content")
_PROMPT_FIELDS = ("prompt", "turns")
# A text and the field it was in; a text file has none: "text".
Row = tuple[str, str]
_SPLITS = ("train", "validation", "valid", "dev", "test")


@dataclass(frozen=True)
class Corpus:
    """Text to calibrate and to evaluate on.

    name        what the report calls it: never an absolute path.
    documents   the texts, none of them empty.
    sha256      of the texts in order (each one's length, then its UTF-8 bytes).
    python      the interpreter's version where its standard library is the text, else None.
    empty       documents that were left out because they hold nothing but white space.
    are_prompts whether the source's rows say that they are prompts (`prompt`, `turns`).
    are_chats   whether the documents are conversations, as chats.py has them: `as_text` makes text of them.
    """

    name: str
    documents: tuple[str, ...]
    sha256: str
    python: str | None = None
    empty: int = 0
    are_prompts: bool = False
    are_chats: bool = False


def load(spec: str | None = None, chats: bool = False) -> Corpus:
    """The text that `spec` names.

    chats  whether rows may be conversations (`messages`), which are no text before a model's template has written them.

    None or "stdlib": the held-out part of this machine's standard library, one document per file. A path: .txt, .md
    or .py (one document), a directory (one document for each such file below it), .jsonl, .jsonl.gz or .parquet (one
    document per row: `text`, else `prompt`, `turns`[0], `content`). Anything else is "name[:config][:split]" of a
    `datasets` name: its `train` split unless another is named.

    Raises UserError for a source that is missing, unreadable, not UTF-8, or without text, and for conversations where
    they may not be.
    """
    found = _load(spec)
    if found.are_chats and not chats:
        raise UserError(
            f"{found.name} holds conversations ({MESSAGES}), which a model's chat template makes text of: name it as"
            " --calib of compress.run, or name a source of plain text"
        )
    return found


def _load(spec: str | None) -> Corpus:
    if spec is None or spec == STANDARD_LIBRARY:
        rows = [(text, "text") for _, text in standard_library(is_held_out)]
        if not rows:
            raise UserError(
                "the standard library of this Python has no held-out source files, which are the default text: "
                "name a text file or a dataset instead"
            )
        return _corpus("Python standard library (held-out files)", rows, python=platform.python_version())
    path = Path(spec)
    try:
        is_there = path.exists()
    except OSError:  # too long for a file's name
        is_there = False
    if is_there and path.is_dir():
        return _corpus(path.resolve().name, _read_directory(path))
    if is_there or spec.lower().endswith(_FILE_SUFFIXES) or spec.startswith((".", "/", "~")):
        return _corpus(path.name, _read_file(path))
    return _corpus(*_read_dataset(spec))


def _corpus(name: str, found: Iterable[Row], python: str | None = None) -> Corpus:
    rows = list(found)
    documents = tuple(text for text, _ in rows if text.strip())
    if not documents:
        raise UserError(f"{name} holds no text ({len(rows)} empty documents): name a source with text in it")
    for index, text in enumerate(documents):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{name}, document {index + 1}: expected Unicode text, found half of a surrogate pair at character "
                f"{error.start}: remove it"
            ) from error
    are_prompts = all(field in _PROMPT_FIELDS for _, field in rows)
    chats = sum(field == MESSAGES for _, field in rows)
    if chats not in (0, len(rows)):
        raise UserError(
            f"{name}: {chats} of {len(rows)} rows are conversations ({MESSAGES}): put them into a file of their own"
        )
    return Corpus(name, documents, _digest(documents), python, len(rows) - len(documents), are_prompts, chats > 0)


def as_text(corpus: Corpus, write: Callable[[list[dict[str, Any]]], str]) -> Corpus:
    """A corpus of conversations as text, both roles of it. `write`: a model's chat template; its errors are raised."""
    documents = tuple(write(json.loads(document)) for document in corpus.documents)
    return replace(corpus, documents=documents, sha256=_digest(documents), are_chats=False)


def _digest(documents: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for raw in (text.encode() for text in documents):
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()


def _read_directory(directory: Path) -> list[Row]:
    paths = sorted(p for p in directory.rglob("*") if p.suffix.lower() in _TEXT_SUFFIXES and p.is_file())
    if not paths:
        raise UserError(f"{directory} has no file that ends in {', '.join(_TEXT_SUFFIXES)}: name one with text files")
    return [(_read_text(path), "text") for path in paths]


def _read_file(path: Path) -> Iterable[Row]:
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}: name a text file, a directory, a dataset or {STANDARD_LIBRARY!r}")
    name = path.name.lower()
    if name.endswith(_TEXT_SUFFIXES):
        return [(_read_text(path), "text")]
    if name.endswith((".jsonl", ".jsonl.gz")):
        return _read_jsonl(path)
    if name.endswith(".parquet"):
        return _read_parquet(path)
    raise UserError(f"{path}: expected a file that ends in {', '.join(_FILE_SUFFIXES)}: rename or convert it")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at offset {error.start}: "
            "convert the file to UTF-8"
        ) from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, line {number}: expected one JSON object ({error}): correct it") from error
                yield _field(row, f"{path}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read after line {number} ({error}): check that it is complete") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install 'specpress[data]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            column = _column(file.schema_arrow.names, str(path), "rename the one with the text")
            number = 0
            for batch in file.iter_batches(columns=[column]):
                for row in batch.to_pylist():
                    number += 1
                    yield _field(row, f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file ({_first_line(error)}): download it again") from error


def _read_dataset(spec: str) -> tuple[str, Iterator[Row]]:
    """What the dataset is called, and its texts."""
    name, config, split = parse_dataset_name(spec)
    label = ":".join(part for part in (name, config, split) if part)
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{spec} is no file here, and reading it as a dataset needs the datasets package: "
            "correct the path, or pip install 'specpress[data]'"
        ) from error
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library lets its HTTP, file-system and parsing errors through as they are
        raise UserError(
            f"{spec} is no file here, and as the dataset {label} it cannot be loaded "
            f"({type(error).__name__}: {_first_line(error)}): correct the name, or name a text file when offline"
        ) from error
    column = _column(rows.column_names, f"dataset {label}", "name another dataset")
    return label, (_field(row, f"dataset {label}, row {i}") for i, row in enumerate(rows.select_columns([column]), 1))


def parse_dataset_name(spec: str) -> tuple[str, str | None, str]:
    """(name, config, split) of "name[:config][:split]"; one part after the name is a split where it is called like one.

    "wikitext:wikitext-2-raw-v1:test", "name:train[:1000]", "name:config". Without a split: "train".
    """
    # A slice has a colon of its own: "train[:1000]".
    head, bracket, rest = spec.partition("[")
    parts = head.split(":")
    parts[-1] += bracket + rest
    if len(parts) > 3 or not all(parts):
        raise UserError(f"{spec}: expected a path, or name[:config][:split] of a dataset: correct it")
    if len(parts) == 3:
        return parts[0], parts[1], parts[2]
    if len(parts) == 1:
        return parts[0], None, "train"
    is_split = bool(bracket) or parts[1] in _SPLITS
    return (parts[0], None, parts[1]) if is_split else (parts[0], parts[1], "train")


def _column(names: Sequence[str], where: str, advice: str) -> str:
    found = next((name for name in _FIELDS if name in names), None)
    if found is None:
        raise UserError(f"{where}: expected a column named text, found {', '.join(names[:10])}: {advice}")
    return found


def _field(row: Any, where: str) -> Row:
    """The text of one row and the field it was in."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: expected an object with a text field, found {type(row).__name__}: correct it")
    for name in _FIELDS:
        if name not in row:
            continue
        value = row[name]
        if name == MESSAGES:
            return checked(value, where), name
        if name == "turns" and isinstance(value, list | tuple) and value:
            value = value[0]
        if not isinstance(value, str):
            raise UserError(f"{where}: expected a string in {name!r}, found {type(value).__name__}: correct it")
        return value, name
    raise UserError(f"{where}: expected one of the fields {', '.join(_FIELDS)}, found {', '.join(row) or 'none'}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


if __name__ == "__main__":
    from calib.__main__ import app

    app()
