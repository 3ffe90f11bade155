"""A place in a mapped file that moves on as values are read, and never beyond the end."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError

_NUMBERS = {"<u4": struct.Struct("<I"), "<u8": struct.Struct("<Q")}
# What is read into memory at once: a tokenizer as JSON takes some tens of megabytes.
_MOST_BYTES = 1 << 28


class Cursor:
    """Reads little-endian values from `data` (bytes as uint8). `shown` is the file's name in errors."""

    def __init__(self, data: NDArray[np.uint8], shown: str):
        self.data, self.shown, self.at = data.data, shown, 0

    @property
    def left(self) -> int:
        """Bytes from here to the end."""
        return len(self.data) - self.at

    def damaged(self, what: str) -> UserError:
        """The error to raise for something impossible that was just read."""
        return UserError(f"{self.shown} is damaged: {what} (before byte {self.at}); fetch it again")

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, not copied. Raises UserError where there are fewer."""
        if size > self.left:
            raise UserError(
                f"{self.shown} was cut short or is damaged: {size} bytes are said to follow byte {self.at}, but"
                f" {self.left} do; fetch it again"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> int:
        """An unsigned number, "<u4" or "<u8"."""
        read = _NUMBERS[form]
        value: int = read.unpack(self.take(read.size))[0]
        return value

    def count(self, least: int, what: str) -> int:
        """A u64 count of things of at least `least` bytes each. Raises UserError where so many cannot follow."""
        count = self.number("<u8")
        if count * least > self.left:
            raise self.damaged(f"{what}: {count} are said to follow, and the file has {self.left} bytes more")
        return count

    def string(self, what: str) -> str:
        """A string. Raises UserError where it is longer than the file, or no UTF-8."""
        raw = bytes(self.take(self._bounded(self.count(1, what), what)))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is no UTF-8") from error

    def array(self, dtype: str, count: int) -> NDArray[Any]:
        """`count` numbers, a copy: the file is not kept open for them."""
        size = self._bounded(count * np.dtype(dtype).itemsize, "an array")
        return np.frombuffer(self.take(size), dtype).copy()

    def _bounded(self, size: int, what: str) -> int:
        if size > _MOST_BYTES:
            raise self.damaged(f"{what} takes {size} bytes, and at most {_MOST_BYTES} are read")
        return size
