"""What the pair is trained on: Python source of the standard library and of permissively licensed packages.

Held-out files (by the hash of their path) are never trained on, nor is any file that shares much text with one:
copies and near-copies would leak the held-out part into training.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from calib.sources import SourceFile, is_held_out, package_files, standard_library
from calib.training_text import COPY_SHARE, LEAK_SHARE, share, shingles

STANDARD_LIBRARY = "standard library"


@dataclass
class Corpus:
    """Train and held-out files, and what the model card says of them."""

    train: list[SourceFile] = field(default_factory=list)
    held_out: list[SourceFile] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            for file in part:
                digest.update(f"{file.package}\0{file.path}\0".encode() + file.text.encode())
        return digest.hexdigest()


def collect() -> Corpus:
    """Reads everything, splits it by the hash of the path, and drops copies from the training part."""
    corpus = Corpus(left_out={"copies of held-out text": 0, "copies of other files": 0})
    candidates: list[SourceFile] = [SourceFile(STANDARD_LIBRARY, path, text) for path, text in standard_library()]
    for name, files in package_files():
        corpus.packages.append(name)
        candidates += files
    held, seen = set[int](), set[int]()
    for file in candidates:
        if is_held_out(file.path):
            marks = shingles(file.text)
            if share(marks, seen) <= COPY_SHARE:
                corpus.held_out.append(file)
            held |= marks
            seen |= marks
    seen = set()
    for file in candidates:
        if is_held_out(file.path):
            continue
        marks = shingles(file.text)
        if share(marks, held) > LEAK_SHARE:
            corpus.left_out["copies of held-out text"] += 1
        elif share(marks, seen) > COPY_SHARE:
            corpus.left_out["copies of other files"] += 1
        else:
            corpus.train.append(file)
            seen |= marks
    return corpus


def megabytes(files: Iterable[SourceFile]) -> float:
    return sum(len(f.text.encode()) for f in files) / 1e6
