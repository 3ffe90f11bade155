"""The keys of a GGUF file's architecture, checked as they are asked for."""

from typing import Any

import numpy as np

from runtime.checkpoints.gguf.names import FORMS
from runtime.checkpoints.gguf.reader import Header
from runtime.errors import UserError


class Keys:
    """The keys of one file's architecture, checked as they are asked for."""

    def __init__(self, header: Header):
        """Raises UserError where the file names no architecture, or one that is not run."""
        self.header, self.shown = header, header.path.name
        found = header.metadata.get("general.architecture")
        if not isinstance(found, str) or found not in FORMS:
            known = ", ".join(FORMS)
            raise UserError(
                f"{self.shown}: general.architecture {found!r} is not run from a GGUF file; {known} are, and for others"
                " give the original model directory"
            )
        self.architecture = found

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; an array of equal ones (a value for each layer) counts as one."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        equal = isinstance(value, np.ndarray) and value.size and bool((value == value[0]).all())
        return value[0].item() if equal else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises UserError where it is missing and has no default, or is something else."""
        return int(self._positive(key, "integer", int, default))

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number. Raises UserError as `whole`."""
        return float(self._positive(key, "number", int | float, default))

    def real(self, key: str, default: float) -> float:
        """A finite number, negative or 0 as well. Raises UserError for anything else."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < float("inf"):
            raise UserError(f"{self.shown}: {self.architecture}.{key} must be a number, found {brief(value)}")
        return float(value)

    def truth(self, key: str, default: bool) -> bool:
        """Whether something is so. Raises UserError for what is neither true nor false."""
        value = self.get(key, default)
        if not isinstance(value, bool | int):
            raise UserError(f"{self.shown}: {self.architecture}.{key} must be true or false, found {brief(value)}")
        return bool(value)

    def each(self, key: str, layers: int) -> list[int] | None:
        """A whole number, or 0 or 1 for false and true, for each layer; None where there is no array.

        Raises UserError for an array of something else, or of fewer.
        """
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return None
        if value.dtype.kind not in "bui" or len(value) < layers:
            shown = f"{self.shown}: {self.architecture}.{key}"
            raise UserError(f"{shown} must have a whole number for each of {layers} layers, found {brief(value)}")
        return [int(one) for one in value[:layers]]

    def common(self, key: str, layers: int) -> int:
        """The positive number of all layers that have one: others have 0. Raises UserError as `whole`."""
        found = set(self.each(key, layers) or []) - {0}
        return found.pop() if len(found) == 1 and min(found) > 0 else self.whole(key)

    def first(self, key: str, layers: int) -> int:
        """The positive number of the first layer. Raises UserError as `whole`."""
        found = self.each(key, layers)
        return found[0] if found and found[0] > 0 else self.whole(key)

    def has(self, *tensors: str) -> bool:
        """Whether the file has one of the tensors, by the ends of their names."""
        return any(name.endswith(tensors) for name in self.header.tensors)

    def _positive(self, key: str, noun: str, kinds: Any, default: float | None) -> Any:
        value = self.get(key, default)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < float("inf"):
            shown = f"{self.shown}: {self.architecture}.{key}"
            raise UserError(f"{shown} must be a positive {noun}, found {brief(value)}")
        return value


def brief(value: Any) -> str:
    """A value of a file as a sentence can hold it."""
    return "nothing" if value is None else repr(value)[:80]
