"""Rows of trees by lists: verifying one would take many small tensors otherwise."""

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from runtime.contract import Rows, integers


class Trees(Rows):
    """Rows of which some are a tree's; their tensors are made when somebody asks for them.

    spans    one (request, first position, count) per request, of which the first position is the first row's.
    parents  of each request's rows the row's parent among them, −1: the last token in the cache; None: a chain.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]], parents: Sequence[list[int] | None]) -> None:
        self.__dict__["planned"] = [(*span, above) for span, above in zip(spans, parents, strict=True)]

    planned: Sequence[tuple[int, int, int, list[int] | None]] = ()

    def __len__(self) -> int:
        return sum(count for _, _, count, _ in self.planned)

    @cached_property
    def request(self) -> Tensor:  # type: ignore[override]
        """See Rows."""
        return integers([handle for handle, _, count, _ in self.planned for _ in range(count)])

    @cached_property
    def position(self) -> Tensor:  # type: ignore[override]
        """See Rows."""
        return integers(
            [
                start + depth
                for _, start, count, above in self.planned
                for depth in (range(count) if above is None else depths(above))
            ]
        )

    @cached_property
    def parent(self) -> Tensor:  # type: ignore[override]
        """See Rows."""
        found: list[int] = []
        for _, _, count, above in self.planned:
            first = len(found)
            found += [row + first if row >= 0 else -1 for row in (range(-1, count - 1) if above is None else above)]
        return integers(found)


def depths(parents: Sequence[int]) -> list[int]:
    """How many others stand between each node of a tree and its text; −1 is the text."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found
