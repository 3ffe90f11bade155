"""Copies and near-copies of text: what training must not see of what quality is measured on."""

from collections.abc import Iterable

_SHINGLE_LINES = 4
# Above these shares of repeated four-line runs a text is a copy: of a held-out one, or of one already taken.
LEAK_SHARE, COPY_SHARE = 0.08, 0.5


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
