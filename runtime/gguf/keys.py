"""The metadata keys of a GGUF file's architecture."""

from typing import Any

import numpy as np

from runtime.errors import UserError
from runtime.gguf.header import Header
from runtime.gguf.names import ARCHITECTURES


class Keys:
    """The keys of one file's architecture, checked as they are asked for."""

    def __init__(self, header: Header):
        """Raises UserError where the file names no architecture, or one that is not run."""
        self.header, self.shown = header, header.path.name
        found = header.metadata.get("general.architecture")
        if found not in ARCHITECTURES.values():
            known = ", ".join(dict.fromkeys(ARCHITECTURES.values()))
            raise UserError(
                f"{self.shown}: general.architecture {found!r} is not run from a GGUF file; {known} are, and for others"
                " give the original model directory"
            )
        self.architecture = str(found)

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer; an array of equal ones (a value for each layer) counts as one.

        Raises UserError where it is missing and has no default, or is something else.
        """
        name = f"{self.architecture}.{key}"
        value = self.header.metadata.get(name, default)
        if isinstance(value, np.ndarray) and value.size and bool((value == value[0]).all()):
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{self.shown}: {name} must be a positive integer, found {brief(value)}")
        return value

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return f"{self.architecture}.{key}" in self.header.metadata

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number. Raises UserError as `whole`."""
        name = f"{self.architecture}.{key}"
        value = self.header.metadata.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise UserError(f"{self.shown}: {name} must be a positive number, found {brief(value)}")
        return float(value)


def brief(value: Any) -> str:
    """A value of a file as a sentence can hold it."""
    return "nothing" if value is None else repr(value)[:80]
