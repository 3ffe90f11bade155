"""Attention whose scores are capped, that has sinks, or whose values have other dimensions than its keys."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from runtime.contract import CacheKind
from runtime.kernels.triton.attention_decode import tiles_of, workspace
from tests.runtime.kernels.triton.test_attention import KINDS, SPLIT, bound, chain, expected, make, queries, run
from tests.slices import often

POSITIONS = (0, 63, SPLIT + 12, SPLIT + 21)
# Kind, query heads, key heads, dimensions of keys and of values, the cap, whether there are sinks.
Variant = tuple[CacheKind, int, int, int, int | None, float, bool]
VARIANTS: list[Variant] = [
    ("float32", 5, 1, 40, None, 1.3, False),
    ("int4", 4, 2, 36, None, 0.0, True),
    ("int8", 3, 1, 80, 70, 0.9, True),
    ("float16", 2, 1, 20, 28, 5.0, True),
]
# Of latent attention, keys in two tiles: odd sizes, and those of DeepSeek.
WIDE: list[Variant] = [
    *((kind, 3, 1, 294, 261, 0.0, False) for kind in KINDS),
    ("float32", 2, 1, 576, 512, 0.0, False),
    ("int8", 2, 1, 576, 512, 3.0, True),
    ("float16", 2, 2, 512, None, 2.0, False),
]


def variants(case: Variant, window: int | None = None) -> None:
    """Against float64; the kernel for many rows; rows alone and of one split; and that it is what decides."""
    kind, heads, kv, dim, value_dim, softcap, sinks = case
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = make(device, kind, (1, max(POSITIONS) + 1), heads, kv, dim, window, 0, None, value_dim, softcap, sinks)
    request, position = torch.tensor([0, 1, 1, 1]), torch.tensor(POSITIONS)
    q = queries(4, made)
    want, got = chain(made, q, request, position), run(made, q, request, position, 2, sharing=4)
    assert got.shape == (4, heads, dim if value_dim is None else value_dim)
    assert float((got - want).abs().max()) < bound(made, q)
    assert torch.equal(run(made, q, request, position), got)
    for splits, some in ((1, slice(0, 2)), (3, slice(2, 3))):
        assert torch.equal(run(made, q[some], request[some], position[some], splits), got[some])
    for there, heads_without in (
        (softcap > 0, replace(made.heads, softcap=0.0)),
        (sinks, replace(made.heads, sinks=None)),
    ):
        if there:
            other = chain(replace(made, heads=heads_without), q, request, position)
            assert float((other - want).abs().max()) > 100 * bound(made, q)


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_scores(case: Variant) -> None:
    variants(case)


@pytest.mark.parametrize("window", [50, SPLIT + 2])
def test_scores_within_a_window(window: int) -> None:
    """Rows that do not see the first splits."""
    variants(("int8", 2, 1, 24, None, 1.1, True), window)


@pytest.mark.parametrize("case", often(WIDE, WIDE[0]), ids=str)
def test_keys_in_two_tiles(case: Variant) -> None:
    variants(case)


def test_a_trees_rows_have_sinks_and_caps(device: torch.device) -> None:
    """Keys and values of odd sizes; the tree stands over the border of a block."""
    made = make(device, "int4", (70,), 3, 1, 40, None, 0, None, 33, 1.5, True)
    length, paths = 65, [[0], [0, 1], [0, 2], [0, 2, 3], [4]]
    position = torch.tensor([length + len(path) - 1 for path in paths])
    tail = torch.zeros(5, 8, dtype=torch.int64)
    for row, path in enumerate(paths):
        tail[row, : len(path)] = torch.tensor(path) + length
    request, start, q = torch.zeros(5, dtype=torch.int64), torch.full((5,), length), queries(5, made)
    want = expected(
        made, q, request, [torch.cat((torch.arange(length), torch.tensor(path) + length)) for path in paths]
    )
    for splits, sharing in ((2, 8), (3, 1)):
        got = run(made, q, request, position, splits, sharing, start, tail)
        assert float((got - want).abs().max()) < bound(made, q)
        # The first path is a chain.
        assert torch.equal(got[:2], run(made, q[:2], request[:2], position[:2]))


def test_sizes_of_tiles(device: torch.device) -> None:
    """One tile up to 256 dimensions and for powers of two, else a power of two and the rest."""
    found = {dim: tiles_of(dim) for dim in (8, 72, 136, 256, 512, 576, 300)}
    assert found == {
        8: (16, 0),
        72: (128, 0),
        136: (256, 0),
        256: (256, 0),
        512: (512, 0),
        576: (512, 64),
        300: (256, 64),
    }
    heads = make(device, "int8", (3,), 2, 1, 24, value_dim=9).heads
    assert workspace(4, heads, 1, device) is None
    room = workspace(4, heads, 3, device)
    assert room is not None and room[0].shape == (4, 2, 3, 9) and room[1].shape == (4, 2, 3, 2)
