"""Layers with a state: chains, trees and batches against plain torch row by row, and the same bits in all of them."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from runtime.kernels import delta, mamba, reference
from runtime.kernels.activations import silu
from runtime.kernels.convolution import convolve
from runtime.kernels.exact import sigmoid
from runtime.kernels.triton.convolution import filtered, gated_convolution
from runtime.kernels.triton.delta import delta_rule
from runtime.kernels.triton.elementwise import gated, gated_norm
from runtime.kernels.triton.row_states import CARRIED, Walk
from runtime.kernels.triton.state_space import state_space
from tests.slices import often

# Rows of one request: parents of a chain, of a tree, of several roots. −1: what the text had before.
TREES = ([-1, 0, 1], [-1, 0, 0, 1, -1, 4], [-1, -1])
# Floats of other layers before a layer's own.
PLACE = 3
# A row of a layer: (row, state before it) to (output, state after it).
Step = Callable[[int, Tensor], tuple[Tensor, Tensor]]
Launch = Callable[[Tensor, Walk], Tensor]


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def walks(trees: Sequence[Sequence[int]], floats: int, device: torch.device) -> tuple[Walk, Tensor, Tensor]:
    """How kernels go through rows of these trees; a place for each row's state, and behind them the requests' own."""
    rows = sum(map(len, trees))
    memory = normal(rows + len(trees), PLACE + floats + 1, seed=3).to(device)
    begins = memory.clone()
    size, first, spans, addresses = 4 * memory.shape[1], 0, [], []
    for number, parents in enumerate(trees):
        spans.append([first, len(parents)])
        for row, above in enumerate(parents):
            before = first + above if above >= 0 else rows + number
            carried = above == row - 1 and row > 0
            addresses.append([CARRIED if carried else memory.data_ptr() + size * before, 0])
            addresses[-1][1] = memory.data_ptr() + size * (first + row)
        first += len(parents)
    # Nobody's rows between, and a request that has none.
    spans += [[0, 0], [first, 2]]
    addresses += [[0, 0], [CARRIED, 0]]
    found = [torch.tensor(part, device=device) for part in (spans, addresses)]
    return Walk(found[0].int(), found[1]), memory, begins


def by_hand(trees: Sequence[Sequence[int]], begins: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Outputs and states of all rows, one after the other."""
    outs: list[Tensor] = []
    states: list[Tensor] = []
    rows = sum(map(len, trees))
    for number, parents in enumerate(trees):
        first = len(outs)
        for above in parents:
            before = states[first + above] if above >= 0 else begins[rows + number, PLACE:-1]
            out, after = step(len(outs), before)
            outs.append(out.flatten())
            states.append(after.flatten())
    return torch.stack(outs), torch.stack(states)


def holds(trees: Sequence[Sequence[int]], floats: int, x: Tensor, launch: Launch, step: Step, error: float) -> None:
    """Outputs and states are the reference's up to `error` of their norm, and the same bits in every batch."""
    walk, memory, begins = walks(trees, floats, x.device)
    out, states = by_hand(trees, begins, step)
    rows, found = len(out), launch(x, walk)
    assert float((found[:rows].flatten(1) - out).norm()) <= error * float(out.norm())
    assert float((memory[:rows, PLACE:-1] - states).norm()) <= error * float(states.norm())
    assert found.isfinite().all()
    # What lies around the states, and those that rows began with, is as it was.
    assert torch.equal(memory[rows:], begins[rows:]) and torch.equal(memory[:, :PLACE], begins[:, :PLACE])
    assert torch.equal(memory[:, -1], begins[:, -1])
    first = 0
    for number, parents in enumerate(trees[:2]):
        alone, own, _ = walks([parents], floats, x.device)
        own[len(parents) :] = begins[rows + number]
        rest = torch.cat((x[first : first + len(parents)], x[:2]))
        assert torch.equal(launch(rest, alone)[: len(parents)], found[first : first + len(parents)])
        assert torch.equal(own[: len(parents), PLACE:-1], memory[first : first + len(parents), PLACE:-1])
        first += len(parents)


def rows_of(trees: Sequence[Sequence[int]]) -> int:
    return sum(map(len, trees)) + 2


@pytest.mark.parametrize(("taps", "channels", "biased"), [(2, 5, False), (3, 130, True), (4, 37, True)])
def test_convolutions_have_the_references_bits(device: torch.device, taps: int, channels: int, biased: bool) -> None:
    x = normal(rows_of(TREES), 3 * channels + 1, seed=1).to(device)
    table, bias = normal(taps, channels, seed=4).to(device), normal(channels, seed=5).to(device) if biased else None
    past = (taps - 1) * channels

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return x[:, 1:].split(channels, dim=1)

    def between_gates(row: int, before: Tensor) -> tuple[Tensor, Tensor]:
        gate, second, value = parts(x[row : row + 1])
        out, after = convolve(before.view(-1, channels), (gate * value)[0], table, bias)
        return second[0] * out, after

    def alone(row: int, before: Tensor) -> tuple[Tensor, Tensor]:
        out, after = convolve(before.view(-1, channels), parts(x)[1][row], table, bias)
        return silu(out), after

    holds(TREES, past, x, lambda x, walk: gated_convolution(*parts(x), table, bias, walk, PLACE), between_gates, 0.0)  # type: ignore[call-arg]
    holds(TREES, past, x, lambda x, walk: filtered(parts(x)[1], table, bias, walk, PLACE), alone, 0.0)


@pytest.mark.parametrize("sizes", often([(2, 2, 20, 12), (1, 3, 7, 5), (1, 1, 32, 8)], (1, 3, 7, 5)))
def test_delta_rules(device: torch.device, sizes: tuple[int, int, int, int]) -> None:
    key_heads, each, key, value = sizes
    heads, keys = key_heads * each, key_heads * key
    channels = 2 * keys + heads * value
    x = normal(rows_of(TREES), channels + 2 * heads + 1, seed=1).to(device)
    step, rate = normal(heads, seed=4).to(device), -normal(heads, seed=5).abs().to(device)
    query, length = torch.full((key,), 1.0 / key, device=device), torch.full((key,), key**-0.5, device=device)

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return x[:, :channels].contiguous(), *x[:, channels:-1].split(heads, dim=1)

    def launch(x: Tensor, walk: Walk) -> Tensor:
        return delta_rule(*parts(x), (step, rate, query, length), key_heads, value, walk, PLACE)  # type: ignore[arg-type]

    def by_row(row: int, before: Tensor) -> tuple[Tensor, Tensor]:
        made, share, left = (part[row] for part in parts(x))
        q, k, v = made.split([keys, keys, heads * value])
        q, k = (
            reference.rms_norm(part.view(key_heads, key), weight, 1e-6 / key).repeat_interleave(each, dim=0)
            for part, weight in ((q, query), (k, length))
        )
        stays = delta.decay(left, step, rate)
        return delta.step(before.view(heads, key, value), q, k, v.view(heads, value), stays, sigmoid(share))

    holds(TREES, heads * key * value, x, launch, by_row, 3e-6)


@pytest.mark.parametrize("sizes", often([(5, 2, 13, 11), (1, 3, 10, 12), (1, 1, 32, 8)], (1, 3, 10, 12)))
@pytest.mark.parametrize("limits", often([(0.0, float("inf")), (0.3, 1.5)], (0.3, 1.5)))
def test_state_spaces(device: torch.device, sizes: tuple[int, int, int, int], limits: tuple[float, float]) -> None:
    groups, each, state, dim = sizes
    heads = groups * each
    channels = heads * dim + 2 * groups * state
    x = normal(rows_of(TREES), channels + heads + 1, seed=1).to(device)
    weights = (
        normal(heads, seed=4).to(device),
        -normal(heads, seed=5).abs().to(device),
        normal(heads, seed=6).to(device),
    )

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :channels].contiguous(), x[:, channels:-1]

    def launch(x: Tensor, walk: Walk) -> Tensor:
        return state_space(*parts(x), weights, limits, groups, state, walk, PLACE)

    def by_row(row: int, before: Tensor) -> tuple[Tensor, Tensor]:
        made, times = (part[row] for part in parts(x))
        time, left = mamba.steps(times, *weights[:2], limits)
        value, b, c = made.split([heads * dim, groups * state, groups * state])
        b, c = (part.view(groups, state).repeat_interleave(each, dim=0) for part in (b, c))
        return mamba.advance(before.view(heads, state, dim), value.view(heads, dim), b, c, time, left, weights[2])

    holds(TREES, heads * state * dim, x, launch, by_row, 3e-6)


@pytest.mark.parametrize(("groups", "width"), [(1, 7), (3, 20), (2, 600)])
@pytest.mark.parametrize("first", [True, False])
def test_gated_norms_have_the_references_bits(device: torch.device, groups: int, width: int, first: bool) -> None:
    x, whole, weight = (
        normal(3, groups * width, seed=1),
        normal(3, groups * width + 5, seed=2),
        normal(groups, width, seed=3),
    )
    gates = whole[:, 2:-3]
    # The reference's bits are those of a CPU.
    want, one = mamba.gated(x, gates, weight, 1e-5, first), weight[:1]
    alike = mamba.gated(x, gates, one.expand_as(weight), 1e-5, first)
    x, gates, weight, one = x.to(device), whole.to(device)[:, 2:-3], weight.to(device), one.to(device)
    assert torch.equal(gated_norm(x, gates, weight, 1e-5, first).cpu(), want)
    assert torch.equal(gated_norm(x, gates, one, 1e-5, first).cpu(), alike)
    assert torch.equal(gated_norm(x[1:2], gates[1:2], weight, 1e-5, first).cpu(), want[1:2])


def test_sigmoids_of_gates_have_the_references_bits(device: torch.device) -> None:
    gate, x = normal(3, 1250, seed=1, scale=20.0).to(device), normal(3, 1250, seed=2).to(device)
    assert torch.equal(gated(gate, x, "sigmoid"), sigmoid(gate) * x)
