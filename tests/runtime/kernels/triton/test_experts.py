"""Experts picked on the device: the bits of each expert's own layer, for every scheme, whoever shares the call."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.checkpoints.record import Experts
from runtime.formats import fp8
from runtime.formats.packed import PackedWeight
from runtime.model.layers import Mixture, Mlp

pytest.importorskip("triton")

from runtime.kernels.joined import share_inputs
from runtime.kernels.libraries import dense_linear
from runtime.kernels.library_choice import wanted
from runtime.kernels.triton.argmax import route
from runtime.kernels.triton.elementwise import gated
from runtime.kernels.triton.expert_rows import Picks
from runtime.kernels.triton.linear import TritonJoined, TritonLinear, triton_linear
from runtime.kernels.triton.weights import GpuWeight, concatenate, gpu_weight
from runtime.kernels.triton.with_libraries import MixedLinear, int_mm_linear
from runtime.model.triton.experts import StackedExperts, add_experts, stacked
from tests.slices import often

Packed = Callable[..., PackedWeight]
HIDDEN, INSIDE, EXPERTS = 96, 40, 5
# Kind, group and the rest of a packed weight.
CASES = {
    "int8": ("int8", 0, {"bias": True}),
    "int8 static": ("int8", 0, {"static": True}),
    "int8 zero points": ("int8", 0, {"offset": True}),
    "int4": ("int4", 32, {}),
    "int4 order": ("int4", 32, {"offset": True, "unsigned": True, "perm": True, "bias": True}),
    "int4 rows order": ("int4", 0, {"perm": True}),
    "int4 wide groups": ("int4", 80, {"offset": True}),
    "nf4": ("nf4", 32, {}),
    "ternary": ("ternary", 0, {}),
    "planes": ("int8", 0, {"planes": True}),
}
FLOATS = ("float32", "bfloat16", "float16", "fp8")


def weight(name: str, n: int, k: int, seed: int, packed: Packed, device: torch.device) -> GpuWeight:
    if name in CASES:
        kind, group, rest = CASES[name]
        made = packed(kind, n, k, group, seed=seed, **rest)  # type: ignore[arg-type]
        if made.input_scale is not None:
            made = replace(made, input_scale=made.input_scale * (1 + seed % 3))
        return gpu_weight(made, None, device)
    plain = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.1
    if name == "fp8":
        return gpu_weight(fp8.pack(plain), None, device)
    return gpu_weight(plain.to(getattr(torch, name)), None, device)


def mixture(name: str, count: int, packed: Packed, device: torch.device, joined: bool = True) -> Mixture:
    """Experts as loading makes them; not `joined`: gate and up as two layers, which read their input apart."""

    def expert(seed: int) -> Mlp:
        gate, up = share_inputs(
            [weight(name, INSIDE, HIDDEN, seed + i, packed, device) for i in (0, 0 if joined else 1)]
        )
        whole = concatenate([gate, up])
        parts = [gate, up] if whole is None else [whole]
        down = triton_linear(weight(name, HIDDEN, INSIDE, seed + 2, packed, device))
        return Mlp(TritonJoined(tuple(triton_linear(part) for part in parts), (INSIDE, INSIDE)), down)

    return Mixture(lambda x: x, tuple(expert(10 * i + 1) for i in range(EXPERTS)), Experts(EXPERTS, count, 1, True))


def inputs(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def one_by_one(made: Mixture, x: Tensor, shares: Tensor, chosen: Tensor, residual: Tensor) -> Tensor:
    """Each row through its experts' own layers, in order of their number."""
    out = torch.zeros_like(residual)
    for row in range(len(x)):
        for number, place in sorted((int(n), i) for i, n in enumerate(chosen[row])):
            if number >= 0:
                expert = made.experts[number]
                gate, up = expert.gate_up.split(x[row : row + 1])
                out[row] += expert.down(gated(gate, up, "silu"))[0] * shares[row, place]
    return residual + out


def picks(rows: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    scores = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(rows)).to(device)
    return route(scores, count, True)


@pytest.mark.parametrize("name", often([*CASES, *FLOATS], "int8 static", "int4 rows order", "nf4", "planes", "float16"))
def test_has_the_bits_of_each_experts_own_layers(name: str, packed: Packed, device: torch.device) -> None:
    made = mixture(name, 2, packed, device)
    both = stacked(made)
    assert isinstance(both.stacked, StackedExperts)
    # Over the border of a tile, for those that have the fewest rows in one.
    widths = (1, 5, 18) if name in ("int4 order", "float32") else (1, 5)
    x, residual = inputs(widths[-1]).to(device), inputs(widths[-1], seed=2).to(device)
    shares, chosen = picks(widths[-1], 2, device)
    chosen[3], chosen[4, 1] = -1, -1
    want = one_by_one(made, x, shares, chosen, residual)
    views = replace(made, experts=both.experts)
    assert torch.equal(one_by_one(views, x[:2], shares[:2], chosen[:2], residual[:2]), want[:2])
    for width in widths:
        some = slice(0, width)
        got = both.stacked.mixed(x[some], shares[some], Picks(chosen[some]), "silu", residual[some])
        assert torch.equal(got, want[some]), f"{name} at width {width}"


@pytest.mark.parametrize("name", ["int8", "int4 order", "int8 static"])
def test_gate_and_up_that_are_two_layers(name: str, packed: Packed, device: torch.device) -> None:
    made = mixture(name, 3, packed, device, joined=False)
    both = stacked(made)
    assert isinstance(both.stacked, StackedExperts)
    x, residual = inputs(4).to(device), inputs(4, seed=2).to(device)
    shares, chosen = picks(4, 3, device)
    got = both.stacked.mixed(x, shares, Picks(chosen), "silu", residual)
    assert torch.equal(got, one_by_one(made, x, shares, chosen, residual))


def test_experts_on_a_librarys_product_are_left_to_the_host(packed: Packed, device: torch.device) -> None:
    made = mixture("bfloat16", 2, packed, device)
    assert stacked(made).stacked is not None
    plain = torch.randn(HIDDEN, INSIDE, dtype=torch.bfloat16, device=device)
    lent = MixedLinear(((wanted("torch")[0], dense_linear(plain, None)),), None)
    assert stacked(replace(made, experts=tuple(replace(one, down=lent) for one in made.experts))).stacked is None


def test_experts_of_which_torch_multiplies_prompts(packed: Packed, device: torch.device) -> None:
    made = mixture("int8", 2, packed, device)
    lent = tuple(
        replace(one, down=int_mm_linear(one.down, ((17, None),)))  # type: ignore[arg-type]
        for one in made.experts
    )
    both = stacked(replace(made, experts=lent))
    assert both.stacked is not None and both.experts[1].down.libraries == ("torch-int-mm",)  # type: ignore[attr-defined]
    x, residual = inputs(20).to(device), inputs(20, seed=2).to(device)
    shares, chosen = picks(4, 2, device)
    got = both.stacked.mixed(x[:4], shares, Picks(chosen), "silu", residual[:4])
    assert torch.equal(got, one_by_one(made, x[:4], shares, chosen, residual[:4]))
    inside = torch.randn(20, INSIDE, generator=torch.Generator().manual_seed(3)).to(device)
    assert torch.equal(both.experts[1].down(inside), made.experts[1].down(inside))


def test_one_expert_of_a_row(packed: Packed, device: torch.device) -> None:
    """Pairs and rows are as many, then."""
    made = mixture("int4 order", 1, packed, device)
    both = stacked(made)
    assert isinstance(both.stacked, StackedExperts)
    x, residual = inputs(3).to(device), inputs(3, seed=2).to(device)
    shares, chosen = picks(3, 1, device)
    got = both.stacked.mixed(x, shares, Picks(chosen), "silu", residual)
    assert torch.equal(got, one_by_one(made, x, shares, chosen, residual))


@pytest.mark.parametrize("name", ["int8", "nf4", "bfloat16"])
def test_experts_are_held_once(name: str, packed: Packed, device: torch.device) -> None:
    both = stacked(mixture(name, 2, packed, device))
    assert isinstance(both.stacked, StackedExperts)
    for layers, whole in (
        ([_one(expert.gate_up.parts) for expert in both.experts], both.stacked.gate_up[0]),
        ([_one([expert.down]) for expert in both.experts], both.stacked.down),
    ):
        memory = whole.layer.weight.codes.untyped_storage()
        assert len(memory) == sum(layer.weight.codes.nbytes for layer in layers)
        assert all(layer.weight.codes.untyped_storage().data_ptr() == memory.data_ptr() for layer in layers)
    # What is one tensor on disk is not even copied.
    fused = torch.randn(EXPERTS, HIDDEN, INSIDE).to(device)
    downs = [triton_linear(gpu_weight(part, None, device)) for part in fused]
    made = mixture("float32", 2, packed, device)
    both = stacked(replace(made, experts=tuple(Mlp(e.gate_up, d) for e, d in zip(made.experts, downs, strict=True))))
    assert isinstance(both.stacked, StackedExperts)
    assert both.stacked.down.layer.weight.codes.data_ptr() == fused.data_ptr()


def _one(layers: Sequence[object]) -> TritonLinear:
    [layer] = layers
    assert isinstance(layer, TritonLinear)
    return layer


def test_upper_planes(packed: Packed, device: torch.device) -> None:
    both = stacked(mixture("planes", 2, packed, device))
    assert both.stacked is not None
    upper = both.stacked.upper()
    assert isinstance(upper, StackedExperts)
    made = replace(
        both,
        experts=tuple(
            Mlp(
                replace(e.gate_up, parts=tuple(_one([part]).upper() for part in e.gate_up.parts)),
                _one([e.down]).upper(),
            )
            for e in both.experts
        ),
    )
    x, residual = inputs(3).to(device), inputs(3, seed=2).to(device)
    shares, chosen = picks(3, 2, device)
    got = upper.mixed(x, shares, Picks(chosen), "silu", residual)
    assert torch.equal(got, one_by_one(made, x, shares, chosen, residual))


def test_experts_that_are_not_alike_stay_as_they_are(packed: Packed, device: torch.device) -> None:
    made = mixture("int8", 2, packed, device)
    other = mixture("int4", 2, packed, device)
    mixed = replace(made, experts=(*made.experts[:-1], other.experts[-1]))
    assert stacked(mixed) is mixed


def test_a_nan_stays_in_its_row(packed: Packed, device: torch.device) -> None:
    both = stacked(mixture("int4", 2, packed, device))
    assert isinstance(both.stacked, StackedExperts)
    x, residual = inputs(3).to(device), inputs(3, seed=2).to(device)
    scores = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(3)).to(device)
    shares, chosen = route(scores, 2, True)
    want = both.stacked.mixed(x, shares, Picks(chosen), "silu", residual)
    x[1], scores[1] = torch.nan, torch.nan
    shares, chosen = route(scores, 2, True)
    got = both.stacked.mixed(x, shares, Picks(chosen), "silu", residual)
    assert bool(got[1].isnan().all()) and torch.equal(got[[0, 2]], want[[0, 2]])


def test_rows_that_nobody_reads_pick_nothing(device: torch.device) -> None:
    scores = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(4)).to(device)
    position = torch.tensor([4, -1, 0], dtype=torch.int32, device=device)
    shares, chosen = route(scores, 2, True, position)
    assert torch.equal(chosen[[0, 2]], route(scores, 2, True)[1][[0, 2]]) and chosen[1].tolist() == [-1, -1]
    residual = inputs(3).to(device)
    found = torch.full((6, HIDDEN), torch.nan, device=device)
    found[[0, 1, 4, 5]] = inputs(4, seed=2).to(device)
    assert torch.equal(add_experts(found, shares, Picks(chosen), residual)[1], residual[1])


def test_refuses_rows_that_are_neither(packed: Packed, device: torch.device) -> None:
    both = stacked(mixture("float32", 2, packed, device))
    assert isinstance(both.stacked, StackedExperts)
    _, chosen = picks(3, 2, device)
    with pytest.raises(ValueError, match="3 or 6 rows, found 4"):
        both.stacked.gate_up[0](inputs(4).to(device), Picks(chosen))
