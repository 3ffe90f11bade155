"""Rows as chains of single requests, for decoders that take one text after the other and no trees."""

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.errors import UserError
from runtime.rows import Cache, Rows


@dataclass(frozen=True)
class Chain:
    """The rows `first` to `end` (exclusive) of a forward: the next tokens of one request."""

    request: int
    first: int
    end: int


def chains(rows: Rows, cache: Cache, refusal: str) -> Iterator[Chain]:
    """The requests' chains in the order of their rows, each checked when its turn comes.

    Raises UserError with the sentence `refusal` where a row follows another than the one before it, and ValueError for
    rows that do not go on where the cache ends.
    """
    request, parent, position = rows.request.tolist(), rows.parent.tolist(), rows.position.tolist()
    first = 0
    while first < len(request):
        end = first + 1
        while end < len(request) and request[end] == request[first]:
            end += 1
        if parent[first:end] != [-1, *range(first, end - 1)]:
            raise UserError(refusal)
        if position[first] != cache.length(request[first]):
            raise ValueError(f"row {first} is at position {position[first]}, the cache ends at another")
        yield Chain(request[first], first, end)
        first = end
