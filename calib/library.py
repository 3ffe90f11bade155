"""The Python standard library of this machine as a corpus, and which of its files are held out.

The embedded pair (`examples/pair`) is trained on the other files, so text from the held-out ones is new to it.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# One file in ten. The hash is of the path, not of the text: a new Python release moves no file across the line.
HELD_OUT_ONE_IN = 10

_TEST_PARTS = {"test", "tests", "testing", "idle_test", "_testing", "conftest.py", "turtledemo"}
# Tables that a program wrote, and copies of other people's packages: neither is Python as people write it.
_GENERATED_PARTS = {"encodings", "pydoc_data", "_vendor", "vendor", "_vendored", "ensurepip", "__pycache__"}
_GENERATED_PREFIXES = ("_sysconfigdata", "__phello__")


def is_held_out(path: str) -> bool:
    """Whether the file at `path` (relative to its library's root, with forward slashes) is never trained on."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def is_ordinary(path: str) -> bool:
    """Whether a library file is hand-written code: no test, no generated table, no vendored copy."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    if set(parts) & (_TEST_PARTS | _GENERATED_PARTS):
        return False
    return not (name.startswith(("test_", *_GENERATED_PREFIXES)) or name.endswith("_test.py"))


def read_source(path: Path) -> str | None:
    """The file's text, or None where it is not UTF-8 or nearly empty (a package marker, say)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return text if len(text) >= 200 else None


def standard_library() -> Iterator[tuple[str, str]]:
    """Yields (relative path, text) of the standard library's ordinary files, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    for path in paths:
        if "site-packages" in path or "dist-packages" in path or not is_ordinary(path):
            continue
        text = read_source(root / path)
        if text is not None:
            yield path, text
