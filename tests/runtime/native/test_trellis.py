"""The trellis encoder against exact searches: brute force where sequences are short, dynamic programming where not."""

import itertools

import pytest
import torch
from torch import Tensor

from runtime import native
from runtime.formats import trellis
from runtime.formats.trellis_levels import LEVELS
from runtime.native.trellis import encode_tiles

pytestmark = pytest.mark.skipif(not native.usable("portable")[0], reason=native.usable("portable")[1])
STATES = 256


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shortest(costs: Tensor, bits: int, node: int) -> float:
    """The least sum of costs (steps, states) float64 of a circular sequence closing at `node`, by Viterbi's rule."""
    children, nodes = 1 << bits, STATES >> bits
    best = torch.full((nodes,), torch.inf, dtype=torch.float64)
    best[node] = 0
    for step in costs:
        # State s is node s mod nodes at its beginning, and s // children at its end.
        best = (best.repeat(children) + step).view(nodes, children).amin(dim=1)
    return float(best[node])


def of_sequence(costs: Tensor, bits: int, sequence: int) -> float:
    """The cost of a sequence, an integer of len(costs) · bits bits, as docs/trellis.md says."""
    whole = sequence | sequence << len(costs) * bits | sequence << 2 * len(costs) * bits
    return sum(float(step[whole >> bits * t & STATES - 1]) for t, step in enumerate(costs))


@pytest.mark.parametrize(("bits", "steps"), [(2, 6), (3, 4), (4, 3)])
def test_the_dynamic_programme_is_right_by_brute_force(bits: int, steps: int) -> None:
    costs = torch.rand(steps, STATES, dtype=torch.float64, generator=generator(bits))
    every = min(of_sequence(costs, bits, sequence) for sequence in range(1 << bits * steps))
    assert min(shortest(costs, bits, node) for node in range(STATES >> bits)) == pytest.approx(every, rel=1e-12)


def one_tile(bits: int, seed: int, rows: int = 16, inputs: int = 16, corner: Tensor | None = None) -> dict[str, Tensor]:
    g = generator(seed)
    levels = LEVELS[bits]
    scale = (torch.rand(rows, generator=g) + 0.5) / levels.float().square().mean().sqrt()
    weights = torch.randn(inputs, rows, generator=g)
    return {
        "levels": levels,
        "weights": weights,
        "carried": 0.3 * torch.randn(inputs, rows, generator=g),
        "scale": scale,
        "corner": torch.eye(inputs) if corner is None else corner,
        "spreads": torch.rand(inputs, generator=g) + 0.5,
        "tiles": torch.empty(-(-rows // 16), 32 * bits, dtype=torch.uint8),
        "found": torch.empty(inputs, rows, dtype=torch.int8),
    }


def costs_of(tile: dict[str, Tensor]) -> Tensor:
    """(256, states) float64 of a whole tile without feedback."""
    values = trellis.signed_levels(tile["levels"]).double()
    out = torch.empty(256, STATES, dtype=torch.float64)
    for t in range(256):
        o, i = t % 64 // 4, t // 64 * 4 + t % 4
        target = float(tile["weights"][i, o] + tile["carried"][i, o])
        out[t] = float(tile["spreads"][i]) * (target - values * float(tile["scale"][o])) ** 2
    return out


@pytest.mark.parametrize("bits", trellis.BITS)
@pytest.mark.parametrize("seed", range(3))
def test_a_tile_without_feedback_takes_the_shortest_way_to_where_it_closes(bits: int, seed: int) -> None:
    tile = one_tile(bits, seed)
    encode_tiles(bits, **tile)
    costs, sequence = costs_of(tile), int.from_bytes(bytes(tile["tiles"][0].tolist()), "little")
    found = of_sequence(costs, bits, sequence)
    nodes = STATES >> bits
    assert found == pytest.approx(shortest(costs, bits, sequence & nodes - 1), rel=1e-5)
    # Where it closes was chosen well, if not always best.
    assert found <= 1.02 * min(shortest(costs, bits, node) for node in range(nodes))


@pytest.mark.parametrize("bits", trellis.BITS)
@pytest.mark.parametrize(("rows", "inputs"), [(16, 16), (37, 16), (5, 3), (33, 7)])
def test_the_levels_are_those_of_the_sequences(bits: int, rows: int, inputs: int) -> None:
    tile = one_tile(bits, 5, rows, inputs)
    encode_tiles(bits, **tile)
    read = trellis.decode(tile["tiles"].unsqueeze(1), tile["levels"], bits, (rows, inputs))
    assert torch.equal(read.T, tile["found"])


def objective(tile: dict[str, Tensor]) -> float:
    error = tile["weights"] - tile["found"].float() * tile["scale"]
    left = tile["corner"].T @ error + tile["carried"]
    return float((tile["spreads"].unsqueeze(1) * left.square()).sum())


@pytest.mark.parametrize("bits", trellis.BITS)
def test_feedback_makes_the_error_smaller(bits: int) -> None:
    g, whole, plain = generator(9), 0.0, 0.0
    for seed in range(4):
        corner = torch.triu(0.6 * torch.randn(16, 16, generator=g), 1) + torch.eye(16)
        tile = one_tile(bits, seed, 160, corner=corner)
        encode_tiles(bits, **tile)
        whole += objective(tile)
        other = tile | {"corner": torch.eye(16), "found": torch.empty_like(tile["found"])}
        encode_tiles(bits, **other)
        plain += objective(other | {"corner": corner})
    assert whole < 0.7 * plain


def test_feedback_without_any_error_left_is_none() -> None:
    """What is a sequence's levels already is found again, whatever would be carried on."""
    g, bits = generator(3), 2
    tile = one_tile(bits, 1, corner=torch.triu(torch.randn(16, 16, generator=g), 1) + torch.eye(16))
    encode_tiles(bits, **tile)
    tile["weights"], tile["carried"] = tile["found"].float() * tile["scale"], torch.zeros(16, 16)
    wanted = tile["found"].clone()
    encode_tiles(bits, **tile)
    assert torch.equal(tile["found"], wanted)


def random_sequences(tile: dict[str, Tensor], bits: int, seed: int) -> None:
    """Puts sequences there that nothing was fitted to."""
    tile["tiles"] = torch.randint(0, 256, tile["tiles"].shape, dtype=torch.uint8, generator=generator(seed))
    rows, inputs = tile["weights"].shape[1], len(tile["weights"])
    tile["found"] = trellis.decode(tile["tiles"].unsqueeze(1), tile["levels"], bits, (rows, inputs)).T.contiguous()


@pytest.mark.parametrize("bits", trellis.BITS)
@pytest.mark.parametrize("seed", range(3))
def test_encoding_again_takes_the_shortest_way_that_closes_where_the_old_one_does(bits: int, seed: int) -> None:
    tile = one_tile(bits, seed)
    random_sequences(tile, bits, seed + 10)
    before, node = objective(tile), int(tile["tiles"][0, 0]) % (STATES >> bits)
    encode_tiles(bits, **tile, again=True)
    costs, sequence = costs_of(tile), int.from_bytes(bytes(tile["tiles"][0].tolist()), "little")
    assert sequence % (STATES >> bits) == node
    assert of_sequence(costs, bits, sequence) == pytest.approx(shortest(costs, bits, node), rel=1e-5)
    assert objective(tile) == pytest.approx(shortest(costs, bits, node), rel=1e-4) and objective(tile) < 0.5 * before


@pytest.mark.parametrize("bits", trellis.BITS)
def test_encoding_again_keeps_what_costs_less(bits: int) -> None:
    """Levels that no sequence has, and that leave no error, stay; those of one output tile more do not."""
    corner = torch.triu(0.3 * torch.randn(13, 13, generator=generator(4)), 1) + torch.eye(13)
    tile = one_tile(bits, 6, rows=40, inputs=13, corner=corner)
    random_sequences(tile, bits, 7)
    tile["found"][:, 16:32] = torch.randint(-127, 128, (13, 16), dtype=torch.int8, generator=generator(8))
    tile["weights"][:, 16:32] = tile["found"][:, 16:32].float() * tile["scale"][16:32]
    tile["carried"][:, 16:32] = 0
    before = {name: tensor.clone() for name, tensor in tile.items()}
    encode_tiles(bits, **tile, again=True)
    assert torch.equal(tile["found"][:, 16:32], before["found"][:, 16:32])
    assert torch.equal(tile["tiles"][1], before["tiles"][1])
    assert not torch.equal(tile["tiles"][0], before["tiles"][0]) and not torch.equal(
        tile["tiles"][2], before["tiles"][2]
    )
    assert objective(tile) < 0.5 * objective(before)


def test_shapes_and_types_are_checked() -> None:
    tile = one_tile(2, 0)
    for name, value in itertools.chain(
        [(key, tensor[:-1]) for key, tensor in tile.items() if key != "weights"],
        [("weights", tile["weights"].double()), ("levels", tile["levels"].short())],
    ):
        with pytest.raises(ValueError, match="must be"):
            encode_tiles(2, **(tile | {name: value}))
    with pytest.raises(ValueError, match="2 to 4 bits"):
        encode_tiles(5, **(tile | {"tiles": torch.empty(1, 160, dtype=torch.uint8)}))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_path_finds_the_same_sequences(bits: int) -> None:
    paths = [path for path in native.PATHS if native.usable(path)[0]]
    corner = torch.eye(13) + torch.triu(0.3 * torch.randn(13, 13, generator=generator(7)), 1)
    found = []
    for path in paths:
        task = one_tile(bits, 3, rows=45, inputs=13, corner=corner)
        encode_tiles(bits, **task, path=path)
        other = task | {"carried": -task["carried"], "tiles": task["tiles"].clone(), "found": task["found"].clone()}
        encode_tiles(bits, **other, path=path, again=True)
        assert not torch.equal(task["found"], other["found"])
        found.append((task["tiles"], task["found"], other["tiles"], other["found"]))
    assert len(found) > 1 and len(torch.unique(found[0][1])) > 20
    for those in found[1:]:
        assert all(torch.equal(one, first) for one, first in zip(those, found[0], strict=True))
