"""What a text may be made to keep to, as sampling and drafting see it: grammar.py has the one there is."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError


class TooHeavyError(UserError):
    """The limits of a constraint's work are reached: the fault of who asked for it, and of nobody else's text."""


class Constraint(Protocol):
    """Which tokens may follow a text: a function of the text alone. It stands at the text's end; `path` goes on there.

    Paths must themselves be allowed. All methods raise TooHeavyError where the limits of its work are reached.
    """

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether `token` may follow the text and then `path`."""

    def mask(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """(V,) the tokens that may follow the text and then `path`; at least one."""

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow the text, one after the other."""

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens of what must follow the text; [] where there is a choice. A draft, no more."""

    def advance(self, tokens: Sequence[int]) -> None:
        """The text has grown by these tokens."""
