"""Text to train on, apart from the text that calibration and evaluation read, as one stream of tokens on disk.

    stdlib   the files of this machine's standard library that calib.sources does not hold out
    python   these, and the Python source of installed packages with permissive licences
    other    a file, directory or dataset, as calib.corpora.load takes it

Whatever shares much text with a document that is measured on is left out, and copies are taken once: texts are compared
by runs of four lines. Where the source is the very text that is measured on, training gets what make_windows leaves of
it.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calib import corpora
from calib.corpora import STANDARD_LIBRARY, Corpus
from calib.errors import UserError
from calib.sources import is_held_out, package_files, standard_library
from calib.token_bytes import Ints
from calib.windows import Windows, make_windows, start_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PYTHON = "python"
# (stage, done, total)
Progress = Callable[[str, int, int], None]
Stream = np.ndarray[tuple[int, ...], np.dtype[np.uint16]] | np.ndarray[tuple[int, ...], np.dtype[np.int32]]

_COPIES_OF_HELD_OUT, _COPIES_OF_OTHERS = "copies of held-out text", "copies of other files"
# Characters that are tokenised in one call, which Ctrl-C waits for: enough to keep a parallel tokenizer busy.
_CHARACTERS = 1 << 20
_TOKENS, _ABOUT = "tokens.bin", "tokens.json"
_SHINGLE_LINES = 4
# Above these shares of repeated four-line runs a text is a copy: of a held-out one, or of one already taken.
LEAK_SHARE, COPY_SHARE = 0.08, 0.5


@dataclass(frozen=True, eq=False)
class TrainingText:
    """What a stage trains on.

    name       what the report calls it: never an absolute path.
    documents  the texts.
    runs       runs of tokens between windows that were taken from the same text.
    sha256     of documents and runs in their order.
    left_out   why → how many documents.
    """

    name: str
    documents: tuple[str, ...]
    runs: tuple[Ints, ...]
    sha256: str
    left_out: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The text that calibration and evaluation read, and how `make_windows` cuts it.

    source  as calib.corpora.load was given it; corpus what came of it.
    """

    source: str | None
    corpus: Corpus
    tokenizer: "PreTrainedTokenizerBase"
    length: int
    calibration: int
    evaluation_tokens: int
    seed: int
    separator: int | None

    @cached_property
    def windows(self) -> Windows:
        """Cut once. Raises UserError for text that is too short."""
        return make_windows(
            self.corpus,
            self.tokenizer,
            length=self.length,
            calibration=self.calibration,
            evaluation_tokens=self.evaluation_tokens,
            seed=self.seed,
            separator=self.separator,
        )


def gather(source: str | None, measured: Measured) -> TrainingText:
    """The text of `source` (None: the source that is measured on) without what is measured on.

    Raises UserError for a source that calib.corpora.load refuses, and for one of which nothing is left.
    """
    wished = measured.source or STANDARD_LIBRARY if source is None else source
    if wished in (STANDARD_LIBRARY, PYTHON):
        return _of_library(measured.corpus, packages=wished == PYTHON)
    if wished == measured.source:
        return _text(f"{measured.corpus.name} (the rest)", measured.windows.unread, measured.windows.runs)
    corpus = corpora.load(wished)
    kept, leaks = _without_copies(corpus.documents, marks(measured.corpus.documents))
    return _text(corpus.name, kept, left_out={_COPIES_OF_HELD_OUT: leaks})


def tokenize(
    text: TrainingText,
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    *,
    length: int,
    separator: int | None,
    progress: Progress,
) -> Stream:
    """The text's tokens in one read-only stream (n,) uint16 or int32, memory-mapped from a file in `folder`.

    Before each document stand the separator and the tokenizer's start token, where it has them. A file of the same
    text and tokenizer that is there already is taken as it is.
    Raises UserError where there is not one window of `length` + 1 tokens, and for a folder that cannot be written.
    """
    vocabulary = max(len(tokenizer), (separator or 0) + 1)
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.int32)
    key = {"text": text.sha256, "tokenizer": _fingerprint(tokenizer), "separator": separator, "dtype": dtype.name}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_there(folder, key):
            _write(folder, key, _encoded(text, tokenizer, separator, progress), dtype)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be written ({error.strerror}): check the disk and its permissions"
        ) from error
    count = (folder / _TOKENS).stat().st_size // dtype.itemsize
    if count < length + 1:
        raise UserError(
            f"{text.name} is too short to train on: it has {count} tokens, and one window needs {length + 1}: name a "
            "longer text, or ask for shorter windows"
        )
    return np.memmap(folder / _TOKENS, dtype=dtype, mode="r")


def shingles(text: str) -> set[int]:
    """Hashes of every run of four lines of more than three characters, white space around them stripped.

    A shorter text has one, of all its lines. The hashes are Python's own: for comparing within one process.
    """
    lines = [stripped for line in text.splitlines() if len(stripped := line.strip()) > 3]
    return {hash("\n".join(lines[i : i + _SHINGLE_LINES])) for i in range(max(1, len(lines) - _SHINGLE_LINES + 1))}


def share(of: set[int], seen: set[int]) -> float:
    """The share of one text's shingles that are in `seen`."""
    return len(of & seen) / max(1, len(of))


def marks(texts: Iterable[str]) -> set[int]:
    """The shingles of many texts together."""
    found: set[int] = set()
    for text in texts:
        found |= shingles(text)
    return found


def _of_library(measured: Corpus, packages: bool) -> TrainingText:
    """The standard library's own held-out files are never trained on, whatever is measured on."""
    library = list(standard_library())
    files = [(path, text) for path, text in library if not is_held_out(path)]
    held = marks([*(text for path, text in library if is_held_out(path)), *measured.documents])
    if packages:
        for _, found in package_files():
            files += [(file.path, file.text) for file in found if not is_held_out(file.path)]
            held |= marks(file.text for file in found if is_held_out(file.path))
    kept, leaks = _without_copies([text for _, text in files], held)
    taken: list[str] = []
    seen: set[int] = set()
    for text in kept:
        own = shingles(text)
        if share(own, seen) <= COPY_SHARE:
            taken.append(text)
            seen |= own
    left_out = {_COPIES_OF_HELD_OUT: leaks, _COPIES_OF_OTHERS: len(kept) - len(taken)}
    name = "Python standard library" + (" and installed packages" if packages else "") + " (without held-out files)"
    return _text(name, taken, left_out=left_out)


def _without_copies(documents: Sequence[str], held: set[int]) -> tuple[list[str], int]:
    """The documents that share little with held-out text, and how many do not."""
    kept = [text for text in documents if share(shingles(text), held) <= LEAK_SHARE]
    return kept, len(documents) - len(kept)


def _text(
    name: str, documents: Sequence[str], runs: Sequence[Ints] = (), left_out: dict[str, int] | None = None
) -> TrainingText:
    if not documents and not runs:
        raise UserError(
            f"{name} leaves no text to train on beside what calibration and evaluation read: name a longer text, or "
            "another one to train on"
        )
    digest = hashlib.sha256()
    for raw in (*(text.encode() for text in documents), *(run.tobytes() for run in runs)):
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return TrainingText(name, tuple(documents), tuple(runs), digest.hexdigest(), left_out or {})


def _encoded(
    text: TrainingText, tokenizer: "PreTrainedTokenizerBase", separator: int | None, progress: Progress
) -> Iterator[Ints]:
    """The stream, a document at a time."""
    start = start_token(tokenizer)
    head = [token for token in (separator, None if start == separator else start) if token is not None]
    total, done = sum(map(len, text.documents)), 0
    for batch in _batched(text.documents):
        progress("tokenize", done, total)
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            yield np.array([*head, *ids], dtype=np.int64)
        done += sum(map(len, batch))
    progress("tokenize", total, total)
    for run in text.runs:
        own = run[1:] if separator is not None and run[0] == separator else run
        yield np.array([*head, *own.tolist()], dtype=np.int64)


def _batched(documents: Sequence[str]) -> Iterator[list[str]]:
    ends = itertools.accumulate(map(len, documents))
    for _, batch in itertools.groupby(zip(documents, ends, strict=True), lambda text_end: text_end[1] // _CHARACTERS):
        yield [text for text, _ in batch]


def _fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    told = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else str(backend.to_str())
    return hashlib.sha256(told.encode()).hexdigest()


def _is_there(folder: Path, key: Mapping[str, object]) -> bool:
    """Whether the folder has the stream of this key, whole."""
    try:
        about = json.loads((folder / _ABOUT).read_bytes())
        with (folder / _TOKENS).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return False
    return bool(about == {**key, "sha256": digest})


def _write(folder: Path, key: Mapping[str, object], parts: Iterable[Ints], dtype: np.dtype[np.generic]) -> None:
    """The tokens first, then what they are: without the second file the first does not count."""
    digest = hashlib.sha256()
    beside = folder / (_TOKENS + ".tmp")
    (folder / _ABOUT).unlink(missing_ok=True)
    with beside.open("wb") as file:
        for part in parts:
            raw = part.astype(dtype).tobytes()
            digest.update(raw)
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / _TOKENS)
    about = folder / (_ABOUT + ".tmp")
    about.write_text(json.dumps({**key, "sha256": digest.hexdigest()}, indent=2, sort_keys=True) + "\n")
    about.replace(folder / _ABOUT)
