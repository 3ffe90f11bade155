"""Native products against reference.py bit for bit, at every width and on every path."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.formats import mxfp4, nf4
from runtime.formats.packed import PackedWeight
from runtime.kernels import native_linear
from runtime.kernels.dispatch import choose, join, linear
from runtime.kernels.native_linear import MAX_INPUTS, NativeLinear, native_weight, upper_weight
from runtime.kernels.reference import float_linear, packed_linear, upper_codes
from runtime.native.binding import pool

Packed = Callable[..., PackedWeight]
Layer = Callable[[Tensor], Tensor]

CASES: dict[str, dict[str, Any]] = {
    "int8": {"kind": "int8", "n": 96, "k": 256},
    "int8 odd": {"kind": "int8", "n": 37, "k": 101, "bias": True},
    "int8 static": {"kind": "int8", "n": 33, "k": 70, "static": True, "bias": True},
    "int8 groups": {"kind": "int8", "n": 40, "k": 90, "group": 32, "offset": True},
    "int4 g128": {"kind": "int4", "n": 96, "k": 256, "group": 128},
    "int4 ragged": {"kind": "int4", "n": 50, "k": 203, "group": 64, "bias": True},
    "int4 odd groups": {"kind": "int4", "n": 31, "k": 77, "group": 13},
    "int4 zero points": {"kind": "int4", "n": 96, "k": 256, "group": 64, "unsigned": True, "offset": True},
    "int4 activation order": {
        "kind": "int4",
        "n": 70,
        "k": 130,
        "group": 64,
        "unsigned": True,
        "offset": True,
        "perm": True,
    },
    "int4 signed zero points": {"kind": "int4", "n": 50, "k": 192, "group": 32, "offset": True, "bias": True},
    "int8 of whole tiles": {"kind": "int8", "n": 37, "k": 1152},
    "int4 rows": {"kind": "int4", "n": 37, "k": 1100, "offset": True},
    "int4 static": {"kind": "int4", "n": 37, "k": 96, "group": 32, "offset": True, "perm": True, "static": True},
    "int6": {"kind": "int6", "bits": 6, "n": 96, "k": 256, "group": 128},
    "int5 zero points": {"kind": "int6", "bits": 5, "n": 31, "k": 75, "group": 25, "offset": True, "bias": True},
    "int5 activation order": {"kind": "int6", "bits": 5, "n": 33, "k": 96, "group": 32, "offset": True, "perm": True},
    "int3": {"kind": "int4", "bits": 3, "n": 96, "k": 256, "group": 128},
    "int3 activation order": {"kind": "int4", "bits": 3, "n": 33, "k": 96, "group": 32, "offset": True, "perm": True},
    "int2": {"kind": "int4", "bits": 2, "n": 96, "k": 256, "group": 32},
    "int2 zero points": {"kind": "int4", "bits": 2, "n": 31, "k": 75, "group": 25, "offset": True, "bias": True},
    "int8 zero points static": {"kind": "int8", "n": 40, "k": 1100, "offset": True, "static": True},
    "nf4": {"kind": "nf4", "n": 96, "k": 256, "group": 64, "bias": True},
    "nf4 odd": {"kind": "nf4", "n": 17, "k": 75, "group": 25, "bias": True},
    "mxfp4": {"kind": "mxfp4", "n": 96, "k": 256, "group": 32, "bias": True},
    "mxfp4 odd": {"kind": "mxfp4", "n": 37, "k": 75, "group": 25},
    "mxfp4 activation order": {"kind": "mxfp4", "n": 33, "k": 130, "group": 64, "perm": True, "offset": True},
    "ternary": {"kind": "ternary", "n": 96, "k": 256},
    "ternary odd": {"kind": "ternary", "n": 35, "k": 121, "bias": True},
    "ternary-1.25": {"kind": "ternary-1.25", "n": 96, "k": 256},
    "ternary-1.25 odd": {"kind": "ternary-1.25", "n": 35, "k": 121, "bias": True},
    "ternary-1.25 of few inputs": {"kind": "ternary-1.25", "n": 17, "k": 3, "bias": True},
    "ternary-1.25 of whole tiles": {"kind": "ternary-1.25", "n": 49, "k": 1152},
    "trellis of 2 bits": {"kind": "trellis", "bits": 2, "n": 96, "k": 256},
    "trellis of 3 bits": {"kind": "trellis", "bits": 3, "n": 96, "k": 256, "bias": True},
    "trellis of 4 bits": {"kind": "trellis", "bits": 4, "n": 96, "k": 256},
    "trellis odd, 2 bits": {"kind": "trellis", "bits": 2, "n": 37, "k": 101, "bias": True},
    "trellis odd, 3 bits": {"kind": "trellis", "bits": 3, "n": 49, "k": 1065},
    "trellis odd, 4 bits": {"kind": "trellis", "bits": 4, "n": 15, "k": 3, "bias": True},
    "planes": {"kind": "int8", "n": 96, "k": 256, "planes": True},
    "planes odd": {"kind": "int8", "n": 37, "k": 101, "bias": True, "planes": True},
    "planes static": {"kind": "int8", "n": 33, "k": 70, "static": True, "bias": True, "planes": True},
    "planes groups": {"kind": "int8", "n": 40, "k": 90, "group": 32, "offset": True, "perm": True, "planes": True},
    "one": {"kind": "int4", "n": 1, "k": 1, "group": 1},
}
# Mostly few; from 16 on in tiles, where a path has them.
ROWS = st.one_of(st.integers(0, 20), st.integers(16, 80))
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def on(path: str, weight: PackedWeight | Tensor, bias: Tensor | None = None, threads: int = 1) -> Layer:
    return linear(weight, bias, choose(path, "cpu", threads))


def float_case(dtype: str, n: int = 45, k: int = 131) -> tuple[Tensor, Tensor]:
    return torch.randn(n, k, generator=generator(1)).to(FLOATS[dtype]), torch.randn(n, generator=generator(2))


def coarse(weight: PackedWeight) -> PackedWeight:
    """What the product on the upper plane means: a weight of coarser codes."""
    return replace(weight, codes=upper_codes(weight.codes), planes=False)


def upper_half(path: str, weight: PackedWeight, threads: int = 1) -> Layer:
    return NativeLinear(upper_weight(native_weight(weight, None, pool(threads))), path, pool(threads))


def layers_of(path: str, packed: Packed, threads: int = 1) -> dict[str, tuple[Layer, int]]:
    """Every case and every float dtype, with the number of inputs."""
    out = {name: (on(path, packed(**case), threads=threads), case["k"]) for name, case in CASES.items()}
    return out | {dtype: (on(path, *float_case(dtype), threads=threads), 131) for dtype in FLOATS}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_bit_for_bit(native_path: str, packed: Packed, name: str) -> None:
    weight = packed(**CASES[name])
    x = torch.randn(150, weight.shape[1], generator=generator(3))
    ours, theirs = on(native_path, weight), packed_linear(weight)
    assert torch.equal(ours(x), theirs(x))
    for width in range(17):
        got = ours(x[5 : 5 + width])
        assert got.dtype == torch.float32 and torch.equal(got, theirs(x[5 : 5 + width]))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(data=st.data())
def test_equals_the_reference_on_any_layer(native_path: str, packed: Packed, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["int8", "int4", "nf4", "mxfp4", "ternary"]), "kind")
    n, k = data.draw(st.integers(1, 100), "n"), data.draw(st.integers(1, 200), "k")
    group = data.draw(
        st.integers(1, k + 3) if kind in ("int4", "nf4", "mxfp4") else st.sampled_from([0, 0, 0, 7, 32]), "group"
    )
    offset, perm = data.draw(st.booleans(), "offset"), data.draw(st.booleans(), "perm")
    unsigned = kind == "int4" and data.draw(st.booleans(), "unsigned")
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    weight = packed(
        kind,
        n,
        k,
        group,
        bits=data.draw(st.sampled_from([4, 3, 2]), "bits") if kind == "int4" and not unsigned else None,
        unsigned=unsigned,
        offset=offset,
        perm=perm,
        bias=data.draw(st.booleans(), "bias"),
        static=data.draw(st.booleans(), "static"),
        planes=kind == "int8" and data.draw(st.booleans(), "planes"),
        seed=seed,
    )
    if data.draw(st.booleans(), "short scales"):
        weight = replace(weight, scale=weight.scale.bfloat16().float())
    x = torch.randn(data.draw(ROWS, "rows"), k, generator=generator(seed))
    x = x * 10.0 ** data.draw(st.integers(-6, 6), "exponent")
    assert torch.equal(on(native_path, weight)(x), packed_linear(weight)(x))


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "mxfp4", "ternary"])
@pytest.mark.parametrize("group", [0, 32, 100])
def test_the_largest_sums_are_exact(native_path: str, packed: Packed, kind: str, group: int) -> None:
    """Every weight and every input as large as they are, of one sign, of the other, and of both."""
    k = 416
    weight = packed(kind, 40, k, group or k if kind in ("int4", "nf4", "mxfp4") else group)
    of = {"nf4": nf4, "mxfp4": mxfp4}.get(kind)
    meant = weight.codes if of is None else of.INT8_LEVELS[weight.codes.long()]
    lowest, highest = (weight.codes.flatten()[at] for at in (meant.argmin(), meant.argmax()))
    sign = torch.randn(40, k, generator=generator(14)) < 0
    x = torch.cat([torch.ones(1, k), -torch.ones(1, k), torch.randn(19, k, generator=generator(15)).sign()])
    for low in (torch.zeros(40, k).bool(), torch.ones(40, k).bool(), sign):
        full = replace(weight, codes=torch.where(low, lowest, highest))
        assert torch.equal(on(native_path, full)(x), packed_linear(full)(x))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "k"), [(45, 131), (64, 256), (1, 1), (33, 1000)])
def test_float_layers_equal_the_reference_and_float64_within_a_bound(
    native_path: str, dtype: str, n: int, k: int
) -> None:
    weight, bias = float_case(dtype, n, k)
    x = torch.randn(21, k, generator=generator(4))
    for added in (None, bias):
        got = on(native_path, weight, added)(x)
        assert torch.equal(got, float_linear(weight, added)(x))
        want, bound = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
        if added is not None:
            want, bound = want + added.double(), bound + added.double().abs()
        assert ((got - want).abs() <= 1e-5 * bound).all()


def test_bits_at_every_width_and_on_any_threads(native_path: str, packed: Packed) -> None:
    two, three = layers_of(native_path, packed, 2), layers_of(native_path, packed, 3)
    for name, (layer, k) in layers_of(native_path, packed).items():
        x = torch.randn(70, k, generator=generator(5))
        want = layer(x)
        assert torch.equal(two[name][0](x), want) and torch.equal(three[name][0](x), want), name
        for width in range(1, 17):
            for start in (0, 11, 54):
                assert torch.equal(layer(x[start : start + width]), want[start : start + width]), (name, width)
        turned = torch.randperm(70, generator=generator(6))
        assert torch.equal(layer(x[turned]), want[turned]), name


def test_a_large_layer_is_cut_among_the_threads_without_a_trace(native_path: str, packed: Packed) -> None:
    weight = packed("int4", 1100, 512, 128)
    x = torch.randn(19, 512, generator=generator(7))
    want = packed_linear(weight)(x)
    for threads in (1, 2, 3):
        layer = on(native_path, weight, threads=threads)
        for _ in range(5):
            assert torch.equal(layer(x), want)


EXTREMES = {
    "zeros": torch.zeros(1),
    "huge": torch.tensor([1e30, -1e30, 1e29]),
    "subnormal": torch.tensor([1e-42, -1e-42, 0.0]),
    "mixed": torch.tensor([1e30, 1e-42, 1.0, 0.0]),
    "largest": torch.tensor([3.4e38]),
    "nan": torch.tensor([1.0, float("nan"), 2.0]),
    "infinite": torch.tensor([1.0, float("inf"), -2.0]),
}


@pytest.mark.parametrize("extreme", EXTREMES)
def test_an_extreme_row_leaves_the_others_alone(native_path: str, packed: Packed, extreme: str) -> None:
    for name, (layer, k) in layers_of(native_path, packed).items():
        x = torch.randn(9, k, generator=generator(8))
        want = layer(x)
        x[4] = EXTREMES[extreme].repeat(k)[:k]
        got = layer(x)
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert torch.equal(got[others], want[others]), name
        if name in CASES and extreme not in ("nan", "infinite"):
            # Sums that overflow are no numbers on both sides.
            theirs = packed_linear(packed(**CASES[name]))(x)
            assert torch.allclose(got, theirs, rtol=0, atol=0, equal_nan=True), name
        if extreme in ("zeros", "huge", "subnormal", "mixed"):
            assert torch.isfinite(got).all(), name
        elif extreme in ("nan", "infinite") and "static" not in name and k > 1:
            # A static scale maps everything to codes: what is no number ends at the limit.
            assert not torch.isfinite(got[4]).any(), name


def test_a_row_of_zeros_gives_the_bias(native_path: str, packed: Packed) -> None:
    for name, case in CASES.items():
        weight = packed(**case)
        bias = torch.zeros(weight.shape[0]) if weight.bias is None else weight.bias
        assert torch.equal(on(native_path, weight)(torch.zeros(3, case["k"])), bias.expand(3, -1)), name


def test_a_view_of_other_strides_is_read_as_what_it_shows(native_path: str, packed: Packed) -> None:
    layer = on(native_path, packed("int8", 40, 64))
    x = torch.randn(6, 128, generator=generator(9))
    assert torch.equal(layer(x[:, ::2]), layer(x[:, ::2].clone()))
    # Odd starts in memory: nothing may ask for alignment.
    shifted = torch.randn(6 * 64 + 1, generator=generator(10))[1:].view(6, 64)
    assert torch.equal(layer(shifted), layer(shifted.clone()))
    codes = packed("int8", 64, 40).codes.t()
    transposed = replace(packed("int8", 40, 64), codes=codes)
    assert torch.equal(on(native_path, transposed)(x[:, :64]), packed_linear(transposed)(x[:, :64]))


def test_equal_orders_and_static_scales_of_one_input_are_one_tensor(native_path: str, packed: Packed) -> None:
    """The kernels round x once for layers whose order and scale lie at one address; other layers keep their own."""
    first, second, third = (packed("int4", 40, 64, 32, perm=True, static=True, seed=seed) for seed in (1, 2, 3))
    assert first.perm is not None and first.input_scale is not None
    second = replace(second, perm=first.perm.clone(), input_scale=first.input_scale.clone())
    third = replace(third, input_scale=torch.tensor(0.5))
    joined = join([first, second, third], [None] * 3, [40] * 3, choose(native_path, "cpu", 1))
    structs = [part.weight.struct for part in joined.parts]  # type: ignore[attr-defined]
    assert structs[0].perm == structs[1].perm != structs[2].perm
    assert structs[0].input_scale == structs[1].input_scale != structs[2].input_scale
    x = torch.randn(9, 64, generator=generator(13))
    for got, weight in zip(joined.split(x), (first, second, third), strict=True):
        assert torch.equal(got, packed_linear(weight)(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_that_fit_sixteen_bits_are_read_in_sixteen(native_path: str, packed: Packed, dtype: torch.dtype) -> None:
    weight = packed("int4", 70, 96, 32)
    weight = replace(weight, scale=weight.scale.to(dtype).float())
    made = native_weight(weight, None, pool(1))
    assert made.tensors[1].dtype == dtype
    x = torch.randn(9, 96, generator=generator(11))
    assert torch.equal(on(native_path, weight)(x), packed_linear(weight)(x))


# Planes: with both of them an int8 layer is one of CASES; here the upper one alone.


PLANES = {name: case for name, case in CASES.items() if case.get("planes")}


@pytest.mark.parametrize("name", PLANES)
def test_the_upper_plane_alone_is_int8_of_coarser_codes(native_path: str, packed: Packed, name: str) -> None:
    weight = packed(**PLANES[name])
    x = torch.randn(150, weight.shape[1], generator=generator(12))
    ours, want = upper_half(native_path, weight), packed_linear(coarse(weight))(x)
    assert torch.equal(ours(x), want) and torch.equal(upper_half(native_path, weight, 2)(x), want)
    for width in range(17):
        assert torch.equal(ours(x[5 : 5 + width]), want[5 : 5 + width])
    # Coarser, and still the same layer.
    whole = packed_linear(weight)(x)
    assert not torch.equal(want, whole) and float((want - whole).norm() / whole.norm()) < 0.1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_upper_plane_of_any_layer(native_path: str, packed: Packed, data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 100), "n"), data.draw(st.integers(1, 200), "k")
    options = {name: data.draw(st.booleans(), name) for name in ("bias", "static")}
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    weight = packed("int8", n, k, planes=True, seed=seed, **options)
    x = torch.randn(data.draw(ROWS, "rows"), k, generator=generator(seed))
    x = x * 10.0 ** data.draw(st.integers(-6, 6), "exponent")
    assert torch.equal(upper_half(native_path, weight)(x), packed_linear(coarse(weight))(x))


def test_upper_codes_are_the_middle_of_what_their_nibble_may_mean() -> None:
    codes = torch.arange(-128, 128).to(torch.int8)
    upper = upper_codes(codes)
    assert upper.dtype == torch.int8 and upper.unique().tolist() == list(range(-120, 121, 16))
    assert torch.equal(upper.int(), torch.floor(codes / 16).int() * 16 + 8)
    assert int((upper.int() - codes.int()).abs().max()) == 8


def test_planes_take_the_memory_of_int8_and_the_upper_one_half_of_it(native_path: str, packed: Packed) -> None:
    plain, planes = (native_weight(packed("int8", 96, 256, planes=p), None, pool(1)) for p in (False, True))
    upper = upper_weight(planes)
    assert planes.tensors[0].nbytes == plain.tensors[0].nbytes == 96 * 256
    assert planes.nbytes - upper.nbytes == 96 * 256 // 2
    # Not a copy: the same tensors, and the same address in the struct.
    assert all(a is b for a, b in zip(upper.tensors, planes.tensors, strict=True))
    assert upper.struct.codes == planes.struct.codes and planes.struct.kind != upper.struct.kind
    for other in (plain, upper):
        with pytest.raises(ValueError, match="only int8 weights packed as planes"):
            upper_weight(other)


def test_only_int8_has_planes(native_path: str, packed: Packed) -> None:
    with pytest.raises(ValueError, match="only int8 weights have planes, found int4"):
        on(native_path, replace(packed("int4", 8, 64, 32), planes=True))


# Refusals.


@pytest.fixture
def without_pointers(monkeypatch: pytest.MonkeyPatch, native_path: str) -> None:
    """Any call into the library fails the test."""

    def require() -> None:
        raise AssertionError("the library was called")

    for module in (native_linear, native_linear):
        monkeypatch.setattr(module, "require", require)


WRONG: dict[str, tuple[dict[str, Any], Callable[[PackedWeight], dict[str, Any]], str]] = {
    "codes of another dtype": ({}, lambda w: {"codes": w.codes.int()}, "codes must be .* int8"),
    "codes of three dimensions": ({}, lambda w: {"codes": w.codes.unsqueeze(0)}, "codes must be"),
    "codes elsewhere": ({}, lambda w: {"codes": w.codes.to("meta")}, "codes must be .* on the CPU"),
    "too few scales": ({}, lambda w: {"scale": w.scale[:, :1]}, r"scale must be float \(40, 2\)"),
    "scales of integers": ({}, lambda w: {"scale": w.scale.int()}, "scale must be float"),
    "scales elsewhere": ({}, lambda w: {"scale": w.scale.to("meta")}, "scale must be .* on the CPU"),
    "offsets of another shape": ({"offset": True}, lambda w: {"offset": w.scale.t()}, "offset must be float"),
    "a bias of another length": ({}, lambda w: {"bias": torch.zeros(39)}, r"bias must be float \(40,\)"),
    "a bias of integers": ({}, lambda w: {"bias": torch.zeros(40).int()}, "bias must be float"),
    "an order with a repeated input": ({"perm": True}, lambda w: {"perm": w.perm.clamp(min=1)}, "perm must be"),  # type: ignore[union-attr]
    "an order of too few inputs": ({"perm": True}, lambda w: {"perm": torch.arange(63)}, "perm must be"),
    "an order beyond the inputs": ({}, lambda w: {"perm": torch.arange(64) + 1}, "perm must be"),
    "an order in floats": ({}, lambda w: {"perm": torch.arange(64.0)}, "perm must be"),
    "a static scale of zero": ({}, lambda w: {"input_scale": torch.tensor(0.0)}, "input_scale must be positive"),
    "a static scale below zero": ({}, lambda w: {"input_scale": torch.tensor(-1.0)}, "input_scale must be positive"),
    "a static scale that is no number": ({}, lambda w: {"input_scale": torch.tensor(torch.nan)}, "input_scale must"),
    "two static scales": ({}, lambda w: {"input_scale": torch.ones(2)}, "input_scale must be one float"),
    "no outputs": ({}, lambda w: {"codes": w.codes[:0], "scale": w.scale[:0]}, "at least one output"),
    "an unknown kind": ({}, lambda w: {"scheme": replace(w.scheme, kind="int5")}, "no native kernel for int5"),  # type: ignore[arg-type]
}


@pytest.mark.usefixtures("without_pointers")
@pytest.mark.parametrize("case", WRONG)
def test_malformed_weights_are_refused_before_any_pointer_is_taken(packed: Packed, case: str) -> None:
    options, change, message = WRONG[case]
    good = packed(**({"kind": "int4", "n": 40, "k": 64, "group": 32, "bias": True} | options))
    with pytest.raises(AssertionError, match="library was called"):
        native_weight(good, None, pool(1))
    with pytest.raises(ValueError, match=message):
        native_weight(replace(good, **change(good)), None, pool(1))


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("int4", 9, "int4 codes must lie in -8..7 or 0..15, found -8..9"),
        ("int4", -9, "int4 codes must lie in -8..7 or 0..15, found -9..7"),
        ("nf4", 16, "nf4 codes must lie in 0..15, found 0..16"),
        ("nf4", -1, "nf4 codes must lie in 0..15, found -1..15"),
        ("ternary", 2, "ternary codes must lie in -1..1, found -1..2"),
        ("ternary", -2, "ternary codes must lie in -1..1, found -2..1"),
        ("ternary-1.25", 2, "ternary-1.25 codes must lie in -1..1, found -1..2"),
        ("ternary-1.25", -3, "ternary-1.25 codes must lie in -1..1, found -3..1"),
    ],
)
def test_codes_out_of_range_are_refused(native_path: str, packed: Packed, kind: str, code: int, message: str) -> None:
    group = 0 if kind.startswith("ternary") else 32
    # In whole vectors of codes and behind them, in whole blocks of outputs and behind them.
    for n, k, at in ((40, 64, (3, 5)), (40, 64, (39, 63)), (33, 77, (32, 76)), (1000, 96, (500, 40))):
        weight = packed(kind, n, k, group)
        on(native_path, weight)
        codes = weight.codes.clone()
        codes[at] = code
        with pytest.raises(ValueError, match=re.escape(message)):
            on(native_path, replace(weight, codes=codes), threads=2)


@pytest.mark.parametrize("code", [-1, 0, 1])
def test_fours_without_exactly_one_zero_are_refused(native_path: str, packed: Packed, code: int) -> None:
    # In whole steps of 128 inputs and behind them, in whole blocks of outputs and behind them.
    for n, k, row, four in ((40, 256, 3, 5), (40, 256, 39, 63), (33, 141, 32, 34), (5, 20, 4, 0)):
        weight = packed("ternary-1.25", n, k)
        on(native_path, weight)
        codes = weight.codes.clone()
        codes[row, 4 * four : 4 * four + 4] = code
        with pytest.raises(ValueError, match=r"of every four ternary-1\.25 codes of a row exactly one must be 0"):
            on(native_path, replace(weight, codes=codes), threads=2)


@pytest.mark.usefixtures("without_pointers")
def test_malformed_float_weights_are_refused_before_any_pointer_is_taken() -> None:
    weight = torch.randn(8, 16)
    with pytest.raises(AssertionError, match="library was called"):
        native_weight(weight, torch.zeros(8), pool(1))
    for wrong in (weight[0], weight.int(), weight.to("meta")):
        with pytest.raises(ValueError, match="float weight must be"):
            native_weight(wrong, None, pool(1))
    for bias in (torch.zeros(9), torch.zeros(8, 1), torch.zeros(8, dtype=torch.long)):
        with pytest.raises(ValueError, match="bias must be float"):
            native_weight(weight, bias, pool(1))


def test_sums_that_could_overflow_are_refused(native_path: str, packed: Packed) -> None:
    assert on(native_path, packed("ternary", 2, MAX_INPUTS))(torch.ones(1, MAX_INPUTS)).shape == (1, 2)
    with pytest.raises(ValueError, match="overflow"):
        on(native_path, packed("ternary", 2, MAX_INPUTS + 1))


def test_the_largest_sums_do_not_overflow(native_path: str, packed: Packed) -> None:
    """Codes and inputs at their limits over as many inputs as are allowed: sums reach 2^31 − 2^24."""
    for code in (-128, 127):
        weight = packed("int8", 3, MAX_INPUTS)
        weight = replace(weight, codes=torch.full_like(weight.codes, code))
        planes = replace(weight, planes=True)
        for sign in (1.0, -1.0):
            x = torch.full((2, MAX_INPUTS), sign)
            want = packed_linear(weight)(x)
            assert torch.equal(on(native_path, weight)(x), want) and torch.equal(on(native_path, planes)(x), want)
            assert torch.equal(upper_half(native_path, planes)(x), packed_linear(coarse(planes))(x))


@pytest.mark.parametrize(("kind", "code"), [("int4", 15), ("ternary", 1), ("nf4", 15)])
def test_sums_of_16_bits_hold_the_largest_codes(native_path: str, packed: Packed, kind: str, code: int) -> None:
    """AVX2 adds up products in 16 bits: as many as fit where all codes and all inputs are the largest there are."""
    options = {"unsigned": True, "offset": True} if kind == "int4" else {}
    weight = packed(kind, 40, 1100, **options)
    weight = replace(weight, codes=torch.full_like(weight.codes, code))
    for rows in (1, 2, 3, 5):
        for sign in (1.0, -1.0):
            x = torch.full((rows, 1100), sign)
            assert torch.equal(on(native_path, weight)(x), packed_linear(weight)(x))


def test_sums_of_16_bits_hold_the_fullest_fours(native_path: str, packed: Packed) -> None:
    weight = packed("ternary-1.25", 40, 1100)
    weight = replace(weight, codes=weight.codes.abs())
    for rows in (1, 2, 3, 5):
        for sign in (1.0, -1.0):
            x = torch.full((rows, 1100), sign)
            assert torch.equal(on(native_path, weight)(x), packed_linear(weight)(x))


def test_malformed_inputs_are_refused_before_any_pointer_is_taken(
    native_path: str, packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = on(native_path, packed("int8", 40, 64))
    x = torch.randn(3, 64)
    assert layer(x).shape == (3, 40) and layer.nbytes > 40 * 64  # type: ignore[attr-defined]

    def require() -> None:
        raise AssertionError("the library was called")

    monkeypatch.setattr(native_linear, "require", require)
    with pytest.raises(AssertionError, match="library was called"):
        layer(x)
    for wrong in (x.double(), x.bfloat16(), x.long(), x[:, :63], x[0], x.unsqueeze(0), x.to("meta")):
        with pytest.raises(ValueError, match=r"takes \(T, 64\) float32 on the CPU, found"):
            layer(wrong)
