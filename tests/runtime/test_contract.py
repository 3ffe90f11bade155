"""Rows that are chains say the same as rows that were written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.contract import Rows


def written(spans: list[tuple[int, int, int]]) -> Rows:
    """The same rows, row by row."""
    request, position, parent = [], [], []
    for handle, start, count in spans:
        for place in range(count):
            parent.append(len(parent) - 1 if place else -1)
            request.append(handle)
            position.append(start + place)
    return Rows(*(torch.tensor(part, dtype=torch.int64) for part in (request, position, parent)))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70), st.integers(0, 5)), max_size=5))
def test_chains_are_the_rows_that_they_say(spans: list[tuple[int, int, int]]) -> None:
    rows, wanted = Rows.chains(spans), written(spans)
    assert len(rows) == len(wanted) and rows.spans == spans and wanted.spans is None
    for part in ("request", "position", "parent"):
        found, known = getattr(rows, part), getattr(wanted, part)
        assert found.dtype == torch.int64 and torch.equal(found, known)


def test_rows_do_not_change() -> None:
    rows = Rows.chains([(0, 3, 2)])
    with pytest.raises(AttributeError):
        rows.request = torch.zeros(2)  # type: ignore[misc]
    assert rows.request.tolist() == [0, 0]
