"""nf4: codes, nested absmax and files are those of bitsandbytes."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from runtime import formats
from runtime.errors import UserError
from runtime.formats import dequantize, int8, nf4
from runtime.formats.nf4 import double_quantize, dynamic_map
from runtime.formats.packed import PackedWeight

bnb = pytest.importorskip("bitsandbytes.functional")


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(96, 320, generator=generator) * 0.02
    sparse = normal.clone()
    sparse[:, 64:128] = 0
    sparse[5] = 0
    return {
        "normal": normal,
        "one block": normal[:1, :64],
        "many rows": torch.randn(700, 64, generator=generator),
        "huge": normal * 1e36,
        "tiny": normal * 1e-30,
        "subnormal": normal * 1e-40,
        "zero blocks": sparse,
        "ties": torch.randint(-8, 9, (40, 128), generator=generator) / 8.0,
        "levels": nf4.LEVELS[torch.randint(0, 16, (32, 64), generator=generator)],
        "outliers": normal * (1 + 300 * (torch.rand(96, 320, generator=generator) > 0.999)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("name", list(_weights()))
def test_every_byte_is_what_bitsandbytes_writes(name: str, double: bool, dtype: torch.dtype) -> None:
    weight = _weights()[name].to(dtype)
    if not torch.isfinite(weight).all():
        pytest.skip("beyond float16")
    data, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
    theirs = {"weight": data} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    packed = nf4.pack(weight, double_quant=double)
    ours = nf4.to_tensors(packed, "layer", dtype)
    assert set(ours) == {f"layer.{key}" for key in theirs}
    for key, value in theirs.items():
        assert ours[f"layer.{key}"].dtype == value.dtype and ours[f"layer.{key}"].shape == value.shape, key
        assert torch.equal(ours[f"layer.{key}"], value), key
    dense = bnb.dequantize_4bit(data, state).float()
    assert torch.equal(dequantize(packed).to(dtype).float(), dense)


def test_double_quantisation_holds_over_magnitudes() -> None:
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(dynamic_map(), bnb.create_dynamic_map())
    for size in (1, 255, 256, 257, 5000):
        for power in (-20, -3, 0, 9):
            absmax = torch.rand(size, generator=generator) * 10.0**power
            codes, state = bnb.quantize_blockwise(absmax - absmax.mean(), blocksize=256)
            nested = double_quantize(absmax)
            assert torch.equal(nested.codes, codes) and torch.equal(nested.absmax, state.absmax)
            assert torch.equal(nested.undo(), bnb.dequantize_blockwise(codes, state) + absmax.mean())


@pytest.mark.parametrize("double", [True, False])
def test_what_was_packed_is_what_is_read_back(double: bool) -> None:
    weight, bias = _weights()["normal"].bfloat16(), torch.randn(96).bfloat16()
    packed = nf4.pack(weight, bias=bias, double_quant=double)
    tensors = nf4.to_tensors(packed, "a.b")
    back = nf4.from_tensors(tensors, "a.b")
    assert back.scheme == packed.scheme
    for field in ("codes", "scale", "bias"):
        assert torch.equal(getattr(back, field), getattr(packed, field))
    again = nf4.to_tensors(back, "a.b")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert type(back.plain()) is PackedWeight
    assert torch.equal(formats.dequantize(back.plain()), dequantize(packed))


def test_int8_levels_err_as_their_docstring_says() -> None:
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(2))
    packed = nf4.pack(weight, double_quant=False)
    error = (nf4.INT8_LEVELS.float() / 127 - nf4.LEVELS)[packed.codes.long()]
    assert round(float(error.pow(2).mean().sqrt()), 4) == 0.0023
    assert round(float(error.abs().max()), 4) == 0.0037
    own = (dequantize(packed) - weight).view(512, -1, 64) / packed.scale.unsqueeze(-1)
    assert round(float(own.pow(2).mean().sqrt()), 2) == 0.04
    assert nf4.INT8_LEVELS.dtype == torch.int8 and len(nf4.INT8_LEVELS.unique()) == 16


def test_bits_per_weight(bits_per_weight: Callable[[PackedWeight], float]) -> None:
    weight = torch.randn(1024, 4096)
    tables = 64 + 1024
    state = len(nf4.to_tensors(nf4.pack(weight), "x")["x.weight.quant_state.bitsandbytes__nf4"])
    expected = 4 + 8 / 64 + 32 / (64 * 256) + 8 * (tables + state) / weight.numel()
    assert bits_per_weight(nf4.pack(weight)) == pytest.approx(expected, abs=1e-9)
    assert bits_per_weight(nf4.pack(weight)) < 4.2
    assert bits_per_weight(nf4.pack(weight, double_quant=False)) == pytest.approx(4.5, abs=0.01)


def test_blocks_that_straddle_rows_are_refused() -> None:
    assert nf4.pack(torch.randn(3, 128)).scale.shape == (3, 2)
    with pytest.raises(ValueError, match="straddle rows of 96 inputs"):
        nf4.pack(torch.randn(4, 96))


def test_weights_whose_mean_overflows_are_refused_where_the_library_writes_nan() -> None:
    weight = _weights()["normal"] * 1e38
    assert torch.isfinite(dequantize(nf4.pack(weight, double_quant=False))).all()
    with pytest.raises(ValueError, match="mean absmax is not finite"):
        nf4.pack(weight)


def test_a_changed_scale_is_not_written_with_the_old_bytes() -> None:
    packed = nf4.pack(_weights()["normal"])
    changed = dataclasses.replace(packed, scale=packed.scale * 1.5)
    with pytest.raises(ValueError, match="scale and nested absmax differ"):
        nf4.to_tensors(changed, "x")
    plain = nf4.to_tensors(changed.plain(), "x")
    assert torch.equal(plain["x.weight.absmax"], changed.scale.flatten())


def _state(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


STATE = "x.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x.weight.absmax": None}, "x.weight.absmax is missing"),
        ({"x.weight.absmax": torch.zeros(7, dtype=torch.uint8)}, "x.weight.absmax has shape"),
        ({"x.weight.nested_absmax": torch.tensor([float("inf")])}, "x.weight.nested_absmax must be finite"),
        ({"x.weight.quant_map": torch.linspace(-1, 1, 16)}, "not the nf4 table"),
        ({"x.weight": torch.zeros(9, 1, dtype=torch.uint8)}, "x.weight has shape"),
        ({STATE: _state("{")}, "must hold JSON"),
        ({STATE: _state('{"quant_type": "fp4"}')}, "must describe an nf4 weight"),
        ({STATE: _state('{"quant_type": "nf4", "shape": [4, -1], "blocksize": 64}')}, "shape of two sizes"),
        ({STATE: _state('{"quant_type": "nf4", "shape": [4, 96], "blocksize": 64}')}, "straddle"),
    ],
)
def test_damaged_tensors_are_named(change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = nf4.to_tensors(nf4.pack(torch.randn(8, 128)), "x")
    assert nf4.from_tensors(tensors, "x").shape == (8, 128)
    changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    with pytest.raises(UserError, match=message):
        nf4.from_tensors(changed, "x")


def test_nf4_does_not_mix_with_the_other_library() -> None:
    assert formats.hf_config({"a": nf4.scheme()}, ["lm_head"])["llm_int8_skip_modules"] == ["lm_head"]
    with pytest.raises(ValueError, match="one checkpoint has one library"):
        formats.hf_config({"a": nf4.scheme(), "b": int8.scheme()})
