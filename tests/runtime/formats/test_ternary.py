"""ternary: BitNet's rule, transformers' bytes, and the same logits from its loader and from ours."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import formats, load
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.formats import dequantize, int8, nf4, ternary
from runtime.formats.packed import PackedWeight
from runtime.kernels.dispatch import choose, join, linear
from runtime.kernels.reference import packed_linear, quantize_rows

bitnet = pytest.importorskip("transformers.integrations.bitnet")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """transformers compiles its bitnet functions; run as they are written they need no compiler and no time."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _random(n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, k, generator=generator) * 0.05).to(dtype)


def _equal(a: PackedWeight, b: PackedWeight) -> bool:
    biases = a.bias is b.bias is None or (a.bias is not None and b.bias is not None and torch.equal(a.bias, b.bias))
    return a.scheme == b.scheme and torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale) and biases


def _multiplied(packed: PackedWeight, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The layer as "autobitlinear" stores it: the scale itself, and a bias that the class will multiply by it."""
    tensors = ternary.to_tensors(packed, prefix, dtype, torch.float32)
    tensors[f"{prefix}.weight_scale"] = packed.scale[:1, 0].clone()
    return tensors


# The rule.


def test_codes_and_weights_are_those_of_b158() -> None:
    weight = _random(64, 96, torch.float32)
    packed = ternary.pack(weight, scale_dtype=torch.float32)
    theirs = bitnet.WeightQuant.apply(weight)
    mean = weight.abs().mean()
    # A weight on the border may fall to either side, by the last bit of the mean.
    clear = ((weight / mean).abs() - 0.5).abs() > 1e-5
    assert clear.float().mean() > 0.99
    assert torch.allclose(dequantize(packed)[clear], theirs[clear], rtol=1e-6)
    assert packed.scheme == ternary.scheme() and packed.scale.shape == (64, 1)
    assert packed.codes.dtype == torch.int8 and set(packed.codes.unique().tolist()) == {-1, 0, 1}
    assert torch.allclose(packed.scale, mean.expand(64, 1), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_almost_empty_weights_have_the_least_scale_that_can_be_stored(dtype: torch.dtype) -> None:
    for weight in (torch.zeros(8, 16), _random(8, 16, torch.float32) * 1e-9):
        packed = ternary.pack(weight.to(dtype))
        assert (packed.codes == 0).all()
        assert float(packed.scale[0]) == pytest.approx(1.53e-5 if dtype == torch.float16 else 1e-5, rel=0.01)
        assert _equal(ternary.from_tensors(ternary.to_tensors(packed, "x", dtype), "x"), packed)


def test_values_that_no_scale_can_hold_are_refused() -> None:
    assert torch.isfinite(ternary.pack(_random(4, 8, torch.float32) * 1e30).scale).all()
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="mean magnitudes"):
            ternary.pack(torch.full((4, 8), value))
    with pytest.raises(ValueError, match=r"no inverse in torch\.float16"):
        ternary.pack(torch.full((4, 8), 1e12), scale_dtype=torch.float16)
    with pytest.raises(ValueError, match="one scale per tensor"):
        ternary.pack(_random(4, 8), 8)


# The file.


@given(
    quarter=st.integers(1, 9),
    k=st.integers(1, 70),
    power=st.floats(-6, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_any_shape_and_magnitude_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    quarter: int,
    k: int,
    power: float,
    dtype: torch.dtype,
    biased: bool,
    seed: int,
) -> None:
    power = min(power, 3) if dtype == torch.float16 else power
    weight = (_random(4 * quarter, k, torch.float32, seed) * 10**power).to(dtype)
    bias = _random(1, 4 * quarter, dtype, seed + 1)[0] if biased else None
    packed = ternary.pack(weight, bias=bias, scale_dtype=torch.float32 if dtype == torch.float32 else None)
    tensors = ternary.to_tensors(packed, "a.b", dtype, torch.float32 if dtype == torch.float32 else None)
    assert tensors["a.b.weight"].shape == (quarter, k) and tensors["a.b.weight_scale"].shape == (1,)
    file = tmp_path_factory.mktemp("ternary") / "model.safetensors"
    save_file(tensors, file)
    read = load_file(file)
    assert _equal(ternary.from_tensors(read, "a.b"), packed)
    assert torch.equal(bitnet.unpack_weights(read["a.b.weight"], torch.int8), packed.codes)
    assert torch.equal(bitnet.pack_weights(packed.codes.clone()), tensors["a.b.weight"])


def test_both_directions_of_the_scale_are_read() -> None:
    packed = ternary.pack(_random(16, 32), bias=_random(1, 16)[0])
    divided = ternary.from_tensors(ternary.to_tensors(packed, "x"), "x")
    multiplied = ternary.from_tensors(_multiplied(packed, "x", torch.bfloat16), "x", "multiply")
    assert _equal(divided, packed)
    assert torch.equal(multiplied.scale, packed.scale) and torch.equal(multiplied.codes, packed.codes)
    assert multiplied.bias is not None and packed.bias is not None
    assert torch.equal(multiplied.bias, packed.bias * packed.scale[:, 0])


def test_bits_per_weight_count_codes_and_scale(bits_per_weight: Callable[[PackedWeight], float]) -> None:
    packed = ternary.pack(_random(64, 128), bias=_random(1, 64)[0])
    assert bits_per_weight(packed) == 2 + 16 / (64 * 128)


def test_weights_that_the_layout_cannot_hold_are_refused() -> None:
    whole = ternary.pack(_random(8, 12))
    assert set(ternary.to_tensors(whole, "x")) == {"x.weight", "x.weight_scale"}
    with pytest.raises(ValueError, match=r"x: bitnet stores outputs in fours and 10 is no multiple"):
        ternary.to_tensors(ternary.pack(_random(10, 12)), "x")
    joined = PackedWeight(whole.scheme, whole.codes, whole.scale * torch.arange(1, 9).view(8, 1))
    with pytest.raises(ValueError, match="those of the rows differ"):
        ternary.to_tensors(joined, "x")
    with pytest.raises(ValueError, match="cannot hold the inverse"):
        ternary.to_tensors(PackedWeight(whole.scheme, whole.codes, torch.full((8, 1), 0.3)), "x")
    storable = ternary.storable(torch.tensor([[0.3]]), torch.bfloat16).expand(8, 1)
    assert ternary.to_tensors(PackedWeight(whole.scheme, whole.codes, storable), "x")["x.weight_scale"].numel() == 1
    with pytest.raises(ValueError, match=r"codes must lie in -1\.\.1"):
        ternary.to_tensors(PackedWeight(whole.scheme, whole.codes * 2, whole.scale), "x")
    with pytest.raises(ValueError, match="found Scheme"):
        ternary.to_tensors(int8.pack(_random(8, 12)), "x")


_NOT_A_CODE = torch.zeros(2, 12, dtype=torch.uint8)
_NOT_A_CODE[1, 7] = 0b00110100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x.weight_scale": None}, "x.weight_scale is missing"),
        ({"x.weight_scale": torch.tensor([float("nan")])}, "x.weight_scale must be finite"),
        ({"x.weight_scale": torch.tensor([0.0])}, "x.weight_scale must be a positive scale, found 0"),
        ({"x.weight_scale": torch.tensor([-2.0])}, "x.weight_scale must be a positive scale, found -2"),
        ({"x.weight_scale": torch.tensor([1e-40])}, "x.weight_scale must be a positive scale"),
        ({"x.weight_scale": torch.ones(8)}, r"x.weight_scale has shape \[8\], expected \[1\]"),
        ({"x.weight_scale": torch.ones(1, dtype=torch.int32)}, "x.weight_scale must be float16 or bfloat16 or float32"),
        ({"x.weight": None}, "x.weight is missing"),
        ({"x.weight": _NOT_A_CODE}, r"x.weight holds the two-bit code 3 \(first in the byte at \[1, 7\]\)"),
        ({"x.weight": torch.zeros(24, dtype=torch.uint8)}, "x.weight must have two dimensions"),
        ({"x.weight": torch.zeros(8, 12)}, "x.weight must be uint8, found float32"),
        ({"x.bias": torch.zeros(7)}, r"x.bias has shape \[7\], expected \[8\]"),
    ],
)
def test_damaged_tensors_are_named(change: dict[str, Tensor | None], message: str) -> None:
    tensors = ternary.to_tensors(ternary.pack(_random(8, 12), bias=_random(1, 8)[0]), "x")
    config = ternary.hf_config()
    good = formats.read(config, tensors, "x")
    assert isinstance(good, PackedWeight) and good.shape == (8, 12)
    changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    with pytest.raises(UserError, match=message) as caught:
        formats.read(config, changed, "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", range(ternary.PER_BYTE))
def test_the_code_3_is_seen_in_every_part_of_a_byte(part: int) -> None:
    tensors = ternary.to_tensors(ternary.pack(_random(8, 12)), "x")
    kept = tensors["x.weight"][1, 2] & ~(3 << 2 * part)
    tensors["x.weight"][1, 2] = kept | 2 << 2 * part
    assert int(ternary.from_tensors(tensors, "x").codes[2 * part + 1, 2]) == 1
    tensors["x.weight"][1, 2] = kept | 3 << 2 * part
    with pytest.raises(UserError, match=r"x.weight holds the two-bit code 3 \(first in the byte at \[1, 2\]\)"):
        ternary.from_tensors(tensors, "x")


def test_plain_layers_of_a_bitnet_checkpoint_stay_plain() -> None:
    weight = _random(8, 12)
    assert formats.read(ternary.hf_config(["lm_head"]), {"lm_head.weight": weight}, "lm_head") is weight
    assert not ternary.holds({"a.weight": weight}, "a") and not ternary.holds({}, "a")
    assert not ternary.holds(int8.to_tensors(int8.pack(weight), "a"), "a")
    assert ternary.holds(ternary.to_tensors(ternary.pack(weight), "a"), "a")


# The configuration.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_class": "linear"}, "linear_class must be 'bitlinear' or 'autobitlinear', found 'linear'"),
        ({"linear_class": "autobitlinear", "quantization_mode": "online"}, "quantization_mode 'online'"),
        ({"use_rms_norm": True}, "use_rms_norm: norms inside linear layers are not read"),
    ],
)
def test_configurations_that_are_not_read_are_named(change: dict[str, Any], message: str) -> None:
    config = ternary.hf_config(["lm_head"])
    formats.check_supported(config)
    with pytest.raises(UserError, match=message):
        formats.check_supported(config | change)


def test_the_class_says_the_direction() -> None:
    from transformers import BitNetQuantConfig

    config = formats.hf_config({"a": ternary.scheme(), "b": ternary.scheme()}, ["lm_head"])
    theirs = BitNetQuantConfig.from_dict(config)
    assert {key: getattr(theirs, key) for key in config} == config
    tensors = {"a.weight": torch.zeros(1, 4, dtype=torch.uint8), "a.weight_scale": torch.tensor([4.0])}
    for said, scale in ((config, 0.25), ({"quant_method": "bitnet"}, 0.25), ({"linear_class": "autobitlinear"}, 4.0)):
        read = formats.read({"quant_method": "bitnet"} | said, tensors, "a")
        assert not isinstance(read, torch.Tensor) and bool((read.scale == scale).all())
    formats.check_supported({"quant_method": "bitnet"})
    for other in (nf4.scheme(), int8.scheme()):
        with pytest.raises(ValueError, match="one checkpoint has one library"):
            formats.hf_config({"a": ternary.scheme(), "b": other})


# The reference kernel.


@pytest.mark.parametrize(("n", "k"), [(96, 256), (36, 100), (4, 1)])
def test_the_reference_is_the_exact_integer_product(n: int, k: int) -> None:
    packed = ternary.pack(_random(n, k), bias=_random(1, n, seed=3)[0])
    assert packed.bias is not None
    x = torch.randn(19, k, generator=torch.Generator().manual_seed(1))
    rounded, step = quantize_rows(x)
    exact = (rounded.long() @ packed.codes.long().t()).float()
    layer = packed_linear(packed)
    assert torch.equal(layer(x), exact * packed.scale[:, 0] * step.unsqueeze(1) + packed.bias)
    for width in range(1, 17):
        assert torch.equal(layer(x[2 : 2 + width]), layer(x)[2 : 2 + width])


def test_joined_layers_keep_their_own_scales() -> None:
    kernel = choose("reference", "cpu")
    parts = [ternary.pack(_random(n, 64, seed=n) * n, bias=None) for n in (16, 8, 4)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    joined = join(parts, [None] * 3, [16, 8, 4], kernel)
    assert len(joined.parts) == 1
    for got, part in zip(joined.split(x), parts, strict=True):
        assert torch.equal(got, linear(part, None, kernel)(x))


# Whole models.


def _is_packed(name: str) -> bool:
    return name.endswith("_proj.weight")


def _write(source: Path, out: Path, dtype: torch.dtype, multiply: bool = False) -> dict[str, Tensor]:
    """A bitnet checkpoint of a plain one; returns the state that its loaded float twin should have."""
    shutil.copytree(source, out, dirs_exist_ok=True)
    tensors, dense, schemes = load_file(source / "model.safetensors"), {}, {}
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = name.removesuffix(".weight")
        if _is_packed(name):
            bias = tensors.get(f"{prefix}.bias")
            packed = ternary.pack(tensor.to(dtype), bias=None if bias is None else bias.to(dtype))
            written |= _multiplied(packed, prefix, dtype) if multiply else ternary.to_tensors(packed, prefix, dtype)
            schemes[prefix], dense[name] = packed.scheme, dequantize(packed)
            if packed.bias is not None:
                dense[f"{prefix}.bias"] = packed.bias * packed.scale[:, 0] if multiply else packed.bias
        elif not _is_packed(f"{prefix.removesuffix('.bias')}.weight"):
            written[name], dense[name] = tensor.to(dtype), tensor.to(dtype).float()
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    quantization = formats.hf_config(schemes, ["lm_head"])
    config |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization}
    if multiply:
        quantization["linear_class"] = "autobitlinear"
    (out / "config.json").write_text(json.dumps(config))
    return dense


def _ours(path: Path, tokens: Tensor) -> Tensor:
    decoder = load(path).decoder
    cache = decoder.new_cache()
    rows = Rows.chains([(cache.open(len(tokens)), 0, len(tokens))])
    return decoder.forward(tokens, rows, cache).logits


def _theirs(path: Path, dtype: torch.dtype, state: dict[str, Tensor] | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    if state is not None:
        assert not model.load_state_dict(state, strict=False).unexpected_keys
    return model


def _logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(tokens.view(1, -1)).logits[0].float()


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# Rounding the activations alone, which both sides do, moves the logits of these models by this much.
ROUNDING = 0.03


@pytest.mark.parametrize("multiply", [False, True], ids=["bitlinear", "autobitlinear"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logits_are_those_of_transformers(tiny: Callable[..., Path], tmp_path: Path, kind: str, multiply: bool) -> None:
    pytest.importorskip("accelerate")
    source = tiny(kind)
    dense = _write(source, tmp_path / "m", torch.float32, multiply)
    tokens = torch.randint(1, 320, (48,), generator=torch.Generator().manual_seed(4))
    ours, model = _ours(tmp_path / "m", tokens), _theirs(tmp_path / "m", torch.float32)
    assert type(model.model.layers[0].mlp.up_proj) is (bitnet.AutoBitLinear if multiply else bitnet.BitLinear)
    theirs = _logits(model, tokens)
    # Float arithmetic in another order: far below the rounding, but for ties of activations.
    assert _relative(ours, theirs) < ROUNDING / 3
    # And both are the model of the dequantised weights, with its activations rounded.
    exact = _logits(_theirs(source, torch.float32, dense), tokens)
    assert 1e-4 < _relative(ours, exact) < ROUNDING
    assert 1e-4 < _relative(theirs, exact) < ROUNDING
    original = _logits(_theirs(source, torch.float32), tokens)
    assert _relative(exact, original) > 3 * ROUNDING, "ternary weights are far from the original's, so this can fail"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_checkpoints_are_loaded_by_transformers(
    tiny: Callable[..., Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    pytest.importorskip("accelerate")
    _write(tiny("llama"), tmp_path / "m", dtype)
    tokens = torch.randint(1, 320, (48,), generator=torch.Generator().manual_seed(5))
    model = _theirs(tmp_path / "m", dtype)
    checkpoint = open_checkpoint(tmp_path / "m")
    for name, layer in model.named_modules():
        if isinstance(layer, bitnet.BitLinear):
            packed = checkpoint.weight(name)
            assert isinstance(packed, PackedWeight)
            assert torch.equal(bitnet.unpack_weights(layer.weight, torch.int8), packed.codes)
            assert torch.equal((1.0 / layer.weight_scale.float()).expand(len(packed.scale)), packed.scale[:, 0])
    assert _relative(_logits(model, tokens), _ours(tmp_path / "m", tokens)) < ROUNDING


def test_a_damaged_checkpoint_is_refused_with_its_name(tiny: Callable[..., Path], tmp_path: Path) -> None:
    _write(tiny("llama"), tmp_path / "m", torch.bfloat16)
    assert load(tmp_path / "m").decoder.exact
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name][:8].clone()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError, match=rf"m: tensor {name} has shape \(32, 192\), config.json implies \(64, 192\)"):
        load(tmp_path / "m")
