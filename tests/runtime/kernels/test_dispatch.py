"""Packed layers against float64 arithmetic on the same codes, their bits at every width, and which kernels run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import load, native
from runtime.errors import UserError
from runtime.formats.nf4 import INT8_LEVELS
from runtime.formats.packed import PackedWeight, Scheme
from runtime.kernels import plain_torch, reference
from runtime.kernels.dispatch import available, choose, join, linear
from runtime.kernels.exact import TILE
from runtime.native import binding

N, K = 96, 256
Case = Callable[..., PackedWeight]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(weight: PackedWeight) -> Tensor:
    """The weight in float64, nf4 through its int8 levels as the kernels have it."""
    codes = INT8_LEVELS[weight.codes.long()].double() / 127 if weight.scheme.kind == "nf4" else weight.codes.double()
    group = weight.scheme.group_size or weight.shape[1]
    spread = weight.scale.double().repeat_interleave(group, dim=1)[:, : weight.shape[1]]
    value = codes * spread
    if weight.offset is not None:
        value = value - weight.offset.double().repeat_interleave(group, dim=1)[:, : weight.shape[1]]
    if weight.perm is not None:
        unpermuted = torch.empty_like(value)
        unpermuted[:, weight.perm] = value
        value = unpermuted
    return value


def rounded(x: Tensor, weight: PackedWeight) -> Tensor:
    """x as the kernels see it: int8 per token, or per token and group (in the weight's input order)."""
    k = weight.shape[1]
    ordered = x if weight.perm is None else x[:, weight.perm]
    group = weight.scheme.group_size or k
    padded = torch.nn.functional.pad(ordered, (0, -k % group)).view(len(x), -1, group).double()
    step = padded.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(step > 0, (padded / step.clamp(min=1e-300)).round(), torch.zeros_like(padded))
    out = (codes * step).flatten(1)[:, :k]
    if weight.perm is None:
        return out
    back = torch.empty_like(out)
    back[:, weight.perm] = out
    return back


CASES: dict[str, dict[str, Any]] = {
    "int8": {"kind": "int8", "bias": True},
    "int8 odd": {"kind": "int8", "n": 37, "k": 100, "bias": True},
    "int4 g128": {"kind": "int4", "group": 128},
    "int4 g32": {"kind": "int4", "group": 32},
    "int4 ragged": {"kind": "int4", "k": 200, "group": 64},
    "int4 zero points": {"kind": "int4", "group": 64, "unsigned": True, "offset": True},
    "int4 activation order": {"kind": "int4", "group": 64, "perm": True},
    "int4 rows": {"kind": "int4", "k": 9000, "n": 5, "offset": True},
    "int3 zero points": {"kind": "int4", "bits": 3, "group": 32, "offset": True},
    "int2 activation order": {"kind": "int4", "bits": 2, "group": 32, "offset": True, "perm": True},
    "int8 zero points": {"kind": "int8", "k": 1100, "offset": True},
    "nf4": {"kind": "nf4", "group": 64},
    "ternary": {"kind": "ternary", "bias": True},
}


@pytest.fixture(scope="module")
def case(packed: Callable[..., PackedWeight]) -> Callable[..., PackedWeight]:
    """case(name) is that weight of `CASES`, 96 outputs by 256 inputs where it says nothing else."""
    return lambda name, **changes: packed(**({"n": N, "k": K} | CASES[name] | changes))


@pytest.mark.parametrize("name", CASES)
def test_against_float64(case: Case, name: str) -> None:
    weight = case(name)
    x = torch.randn(19, weight.shape[1], generator=generator(8))
    want = rounded(x, weight) @ dense(weight).t()
    if weight.bias is not None:
        want = want + weight.bias
    got = reference.packed_linear(weight)(x).double()
    # A tie in the rounding of x can fall the other way in float32: one step of one input.
    assert (got - want).norm() / want.norm() < 1e-3
    assert (got - want).abs().median() / want.abs().median() < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_bits_at_every_width(case: Case, name: str) -> None:
    weight = case(name)
    x = torch.randn(40, weight.shape[1], generator=generator(9))
    layer = reference.packed_linear(weight)
    whole = layer(x)
    for width in range(1, 17):
        for start in (0, 11):
            assert torch.equal(layer(x[start : start + width]), whole[start : start + width])


@pytest.mark.parametrize("name", ["int8", "int4 g128", "nf4"])
def test_extreme_inputs(case: Case, name: str) -> None:
    weight = case(name)
    layer, k, bias = reference.packed_linear(weight), weight.shape[1], weight.bias
    assert torch.equal(layer(torch.zeros(1, k))[0], torch.zeros(N) if bias is None else bias)
    huge = torch.randn(2, k, generator=generator(10)) * 1e30
    assert torch.isfinite(layer(huge)).all()
    tiny = torch.full((1, k), 1e-42)
    assert torch.isfinite(layer(tiny)).all()
    assert layer(torch.empty(0, k)).shape == (0, N)


@pytest.mark.parametrize(("kind", "size"), [("int8", 1032), ("int8", 1033), ("int4", 8806), ("int4", 8807)])
def test_large_groups_keep_their_sums_exact(kind: str, size: int) -> None:
    """All inputs and codes at their limits, less one: float32 alone would round the sum."""
    top = 128 if kind == "int8" else 15
    codes = torch.full((2, 2 * size), -top if kind == "int8" else top, dtype=torch.int8)
    codes[:, 1::size] //= 2
    weight = PackedWeight(Scheme(kind, 8, size, True, "int8-group"), codes, torch.ones(2, 2))  # type: ignore[arg-type]
    sums = codes.view(2, 2, size).long().sum(-1) * 127
    # Inputs of 1 have the step 1 / 127; every product and sum below is rounded once, as the layer's are.
    terms = sums.float() * (torch.ones(1) / 127)
    assert torch.equal(reference.packed_linear(weight)(torch.ones(1, 2 * size)), (terms[:, 0] + terms[:, 1]).view(1, 2))
    assert (reference.packed_linear(weight).codes.dtype == torch.float32) == (127 * top * size < 1 << 24)  # type: ignore[union-attr]


def test_joined_layers_equal_single_ones(case: Case, kernels: str) -> None:
    kernel = choose(kernels, "cpu", 2)
    x = torch.randn(5, K, generator=generator(11))
    for pair in (
        [case("int8"), case("int8", n=64)],
        [case("nf4")] * 2,
        [case("ternary"), case("ternary", n=40)],
        [case("int8"), case("int4 zero points")],
        [case("int8", static=True), case("int8", static=True, seed=7), case("int8", static=True, bias=False)],
        [case("int3 zero points"), case("int2 activation order"), case("int2 activation order", seed=3)],
        [case("int4 activation order"), case("int4 activation order", seed=5), case("int4 g32")],
    ):
        sizes = [w.shape[0] for w in pair]
        parts = join(pair, [None] * len(pair), sizes, kernel).split(x)
        for part, weight in zip(parts, pair, strict=True):
            assert torch.equal(part, linear(weight, None, kernel)(x))


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_bitsandbytes_kernels_agree(case: Case, name: str) -> None:
    if not next(k for k in available() if k.name == "bitsandbytes").usable:
        pytest.skip("bitsandbytes is not installed")
    weight = case(name)
    x = torch.randn(6, K, generator=generator(12))
    got = linear(weight, None, choose("bitsandbytes", "cpu"))(x)
    want = linear(weight, None, choose("reference", "cpu"))(x)
    assert (got - want).norm() / want.norm() < 0.02


@pytest.mark.parametrize("kernels", [reference, plain_torch])
def test_attention_against_float64(kernels: Any) -> None:
    tiles, heads, kv_heads, d = 2, 4, 2, 16
    q = torch.randn(tiles, TILE, heads, d, generator=generator(13))
    keys, values = (torch.randn(1, 128, kv_heads, d, generator=generator(s)) for s in (14, 15))
    positions = torch.tensor([[3, 17, 63, 64, 65, 98, 99, 0], [99] * 8])

    def blocks(x: Tensor) -> Tensor:
        return x.view(1, 2, 64, kv_heads, d).transpose(2, 3).expand(tiles, -1, -1, -1, -1).contiguous()

    for window in (None, 20):
        got = kernels.attention(q, blocks(keys), blocks(values), positions, d**-0.5, window)
        for tile in range(tiles):
            for row in range(TILE):
                last = int(positions[tile, row])
                first = 0 if window is None else max(0, last - window + 1)
                for head in range(heads):
                    k, v = (x[0, first : last + 1, head // 2].double() for x in (keys, values))
                    odds = torch.softmax(k @ q[tile, row, head].double() * d**-0.5, 0)
                    assert torch.allclose(got[tile, row, head].double(), odds @ v, atol=1e-5)


# Which kernels run, and why.


def test_auto_takes_the_first_that_is_usable() -> None:
    options = available()
    assert [option.name for option in options[: len(native.PATHS) + 1]] == [*native.PATHS, "plain-torch"]
    first = next(option for option in options if option.usable)
    assert choose("auto", "cpu") == first and first.exact and first.why
    for name, everywhere in (("plain-torch", False), ("reference", True)):
        made = choose(name, "cpu")
        assert made.usable and made.exact and made.everywhere == everywhere and not made.backend.repacks
    assert all(option.everywhere for option in options if option.name in native.PATHS)


@pytest.mark.usefixtures("torch_threads")
def test_what_was_asked_for_runs_and_says_so(tiny: Callable[..., Path], native_path: str) -> None:
    assert choose(native_path, "cpu", 3).threads == 3
    assert choose(native_path, "cpu").threads == native.default_threads() >= 1
    decoder = load(tiny("llama"), kernels=native_path, threads=2).decoder
    assert (decoder.kernels, decoder.threads, decoder.exact) == (native_path, 2, True)
    reference_decoder = load(tiny("llama"), kernels="reference", threads=1).decoder
    assert (reference_decoder.kernels, reference_decoder.threads) == ("reference", 1)
    auto = load(tiny("llama")).decoder
    assert auto.kernels == next(option.name for option in available() if option.usable)


def test_unknown_and_unusable_kernels_are_refused(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"kernels='avx1024' is unknown; use one of auto, amx-int8, .*reference"):
        load(tiny("llama"), kernels="avx1024")
    for name in (*native.PATHS,):
        with pytest.raises(UserError, match=f"kernels='{name}' run on a CPU, and the device is cuda"):
            choose(name, "cuda")
    with pytest.raises(UserError, match="threads must be at least 1 and at most 1024, found 0"):
        load(tiny("llama"), threads=0)
    monkeypatch.setattr(native, "usable", lambda path: (path == "portable", "this processor lacks the instructions"))
    with pytest.raises(UserError, match="kernels='avx2' cannot run here: this processor lacks the instructions"):
        load(tiny("llama"), kernels="avx2")
    assert choose("auto", "cpu").name == "portable"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library is looked for in an empty folder instead: an install without a compiler."""
    monkeypatch.setattr(binding, "__file__", str(tmp_path / "binding.py"))
    binding.library.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    binding.library.cache_clear()


def test_an_install_without_a_compiler_works_and_says_so(
    tiny: Callable[..., Path],
    text: Callable[..., Tensor],
    whole: Callable[..., Tensor],
    elsewhere: Path,
) -> None:
    why = "the native kernels were not compiled when specpress was installed (no C++ compiler?)"
    assert [(option.usable, option.why) for option in available()[: len(native.PATHS)]] == [(False, why)] * len(
        native.PATHS
    )
    assert choose("auto", "cpu").name == "plain-torch"
    decoder = load(tiny("llama")).decoder
    assert decoder.kernels == "plain-torch"
    meant = whole(load(tiny("llama"), kernels="reference").decoder, text(20))
    assert torch.allclose(whole(decoder, text(20)), meant, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="kernels='avx2' cannot run here: the native kernels were not compiled"):
        load(tiny("llama"), kernels="avx2")
    with pytest.raises(RuntimeError, match="were not compiled"):
        native.bandwidth_reader(1, size=4096)


def test_a_damaged_library_is_as_good_as_none(elsewhere: Path) -> None:
    (elsewhere / f"_specpress{binding.EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    binding.library.cache_clear()
    usable, why = native.usable("portable")
    assert not usable and "cannot be loaded" in why and "install specpress again" in why
    assert choose("auto", "cpu").name == "plain-torch"


def test_the_memory_is_read_at_a_plausible_speed(native_path: str) -> None:
    read = native.bandwidth_reader(1, size=1 << 22)
    assert all(1e8 < read() < 1e13 for _ in range(3))
