"""GPTQ's layout: read exactly as its own library dequantises it, written so that it reads ours exactly.

Bytes are packed here a second way, by long integers; GPTQModel itself takes part where it is installed (it is not in
the test environment: tests/compress/export/test_peers.py runs it in the compressors' one).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import formats, load
from runtime.checkpoints.open import open_checkpoint
from runtime.errors import UserError
from runtime.formats import gptq
from runtime.formats.packed import PackedWeight

Tiny = Callable[..., Path]
BITS = (2, 3, 4, 8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(codes: np.ndarray, bits: int) -> Tensor:
    """(rows, columns) codes from 0, along the rows: each column is one long number, cut into words of 32 bits."""
    count = -(-codes.shape[0] * bits // 32)
    numbers = [sum(int(code) << bits * place for place, code in enumerate(column)) for column in codes.T]
    cut = [[number >> 32 * word & 0xFFFFFFFF for word in range(count)] for number in numbers]
    return torch.from_numpy(np.array(cut, dtype=np.uint32).view(np.int32).T.copy())


def stored(
    n: int, k: int, bits: int, group: int, *, v1: bool = False, order: bool = False, sym: bool = False, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """A random layer "a.b" as a file has it, its weights (N, K) float32, and its configuration."""
    g, size, most = generator(seed), k if group == -1 else group, (1 << bits) - 1
    groups = -(-k // size)
    codes = torch.randint(0, most + 1, (k, n), generator=g)
    zeros = torch.full((groups, n), most // 2 + 1) if sym else torch.randint(0, most + 1, (groups, n), generator=g)
    if not sym:
        zeros[0, 0], zeros[-1, -1] = 0, most
    scales = (torch.rand(groups, n, generator=g) * 0.05 + 0.001).half()
    index = torch.arange(k) // size
    if order:
        index = index[torch.randperm(k, generator=g)]
    kept = (zeros - 1) & most if v1 else zeros
    tensors = {
        "a.b.qweight": words(codes.numpy(), bits),
        "a.b.qzeros": words(kept.T.numpy(), bits).T.contiguous(),
        "a.b.scales": scales,
        "a.b.g_idx": index.int(),
        "a.b.bias": torch.randn(n, generator=g).half(),
    }
    weights = ((codes - zeros[index]).float() * scales[index].float()).T
    layout = "gptq" if v1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "checkpoint_format": layout}
    return tensors, weights, config


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> PackedWeight:
    formats.check_supported(config)
    packed = formats.read(config, tensors, "a.b")
    assert isinstance(packed, PackedWeight)
    return packed


@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_every_width_zero_point_and_order_is_read_exactly(bits: int, order: bool, v1: bool) -> None:
    for n, k, group in ((32, 64, 32), (96, 128, -1), (64, 192, 64), (32, 96, 64)):
        tensors, weights, config = stored(n, k, bits, group, v1=v1, order=order)
        packed = read(config, tensors)
        assert torch.equal(formats.dequantize(packed), weights), (n, k, group)
        assert torch.equal(packed.bias, tensors["a.b.bias"].float())
        kind = "int8" if bits == 8 else "int4"
        # A short last group cuts all of them: 96 inputs in groups of 64 are three of 32.
        size = 0 if group == -1 else 32 if k % group else group
        assert (packed.scheme.kind, packed.scheme.bits, packed.scheme.group_size) == (kind, bits, size)
        assert (packed.perm is not None) == (order and group != -1)


@pytest.mark.parametrize("bits", BITS)
def test_the_zero_points_say_whether_a_layer_is_symmetric(bits: int) -> None:
    for v1 in (True, False):
        tensors, weights, config = stored(32, 64, bits, 32, v1=v1, sym=True)
        packed = read(config | {"sym": False}, tensors)
        assert packed.scheme.symmetric and packed.offset is None
        assert torch.equal(formats.dequantize(packed), weights)


def test_one_is_added_field_by_field() -> None:
    """The word-wise addition in the wild reads 5 as 6 beside a zero point of 0."""
    tensors, weights, config = stored(32, 64, 4, 32, v1=True)
    raw = tensors["a.b.qzeros"].numpy().view(np.uint32)
    assert (raw & 15 == 15).any(), "a zero point of 0 is stored as 15"
    wordwise = torch.from_numpy((raw + np.uint32(0x11111111)).view(np.int32))
    wrong = read(config | {"checkpoint_format": "gptq_v2"}, tensors | {"a.b.qzeros": wordwise})
    assert not torch.equal(formats.dequantize(wrong), weights)
    assert torch.equal(formats.dequantize(read(config, tensors)), weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_other_types_and_a_missing_order(dtype: torch.dtype) -> None:
    tensors, _, config = stored(32, 64, 4, 32)
    scales = tensors["a.b.scales"].to(dtype)
    with_order = formats.dequantize(read(config, tensors | {"a.b.scales": scales}))
    del tensors["a.b.g_idx"]
    assert torch.equal(formats.dequantize(read(config, tensors | {"a.b.scales": scales})), with_order)


def test_overrides_are_told_by_shapes() -> None:
    """`dynamic` is regular expressions out of a file: none of them is run."""
    evil = {r"+:(a+)+$": {"bits": 8, "group_size": 64}, "-:lm_head": {}, "+:other": {"bits": 2}}
    for bits, group in ((4, 32), (8, 64), (2, 32)):
        tensors, weights, config = stored(32, 128, bits, group)
        packed = read(config | {"bits": 4, "group_size": 32, "dynamic": evil}, tensors)
        assert packed.scheme.bits == bits and torch.equal(formats.dequantize(packed), weights)
    # Sizes that give as many groups are told apart by the first group.
    for group in (64, 48):
        tensors, weights, config = stored(32, 96, 4, group)
        packed = read(config | {"group_size": 64, "dynamic": {"+:x": {"group_size": 48}}}, tensors)
        assert torch.equal(formats.dequantize(packed), weights)
    plain = torch.randn(32, 64, generator=generator())
    found = formats.read(config, {"a.b.weight": plain}, "a.b")
    assert isinstance(found, Tensor) and torch.equal(found, plain)


def test_both_layouts_are_written_as_they_are_read() -> None:
    for bits in BITS:
        for order in (False, True):
            tensors, weights, config = stored(64, 96, bits, 32, order=order)
            packed = read(config, tensors)
            again = gptq.to_tensors(packed, "a.b", torch.float16, layout="gptq_v2")
            assert all(
                torch.equal(again[name], tensor) and again[name].dtype == tensor.dtype
                for name, tensor in tensors.items()
            )
            with pytest.raises(ValueError, match="gptq holds zero points of 1 to"):
                gptq.to_tensors(packed, "a.b", torch.float16)
            tensors, weights, config = stored(64, 96, bits, 32, order=order, v1=True, sym=True)
            packed = read(config, tensors)
            again = gptq.to_tensors(packed, "a.b", torch.float16)
            assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
            if bits == 4:
                assert set(again["a.b.qzeros"].flatten().tolist()) == {0x77777777}
            # Cut into smaller groups, the same weights.
            smaller = gptq.to_tensors(packed, "a.b", torch.float16, group_size=8)
            assert torch.equal(formats.dequantize(read(config | {"group_size": 8}, smaller)), weights)


def test_what_cannot_be_held_is_refused(packed: Callable[..., PackedWeight]) -> None:
    good = packed("int4", 32, 64, 32)
    halves = {"scale": good.scale.half().float()}
    good = PackedWeight(good.scheme, good.codes, **halves)
    assert gptq.to_tensors(good, "x")
    for bad, message in (
        (packed("nf4", 32, 64, 32), "holds integers"),
        (packed("int4", 33, 64, 32), "do not fill words"),
        (PackedWeight(good.scheme, good.codes, good.scale + 1e-5), "neither float16 nor bfloat16"),
        (PackedWeight(good.scheme, good.codes + 1, **halves), "codes must lie in"),
        (PackedWeight(good.scheme, good.codes, good.scale, good.scale * 0.5), "whole zero points"),
    ):
        with pytest.raises(ValueError, match=message):
            gptq.to_tensors(bad, "x")
    with pytest.raises(ValueError, match="cannot be cut"):
        gptq.to_tensors(good, "x", group_size=64)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_layer_survives_writing_and_reading(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from(BITS))
    n, k = (32 * data.draw(st.integers(1, 3)) for _ in range(2))
    group = data.draw(st.sampled_from([-1, 4, 8, 16, 32, 48]))
    tensors, weights, config = stored(
        n, k, bits, group, order=data.draw(st.booleans()), seed=data.draw(st.integers(0, 99))
    )
    packed = read(config, tensors)
    assert torch.equal(formats.dequantize(packed), weights)
    size = packed.scheme.group_size or -1
    again = gptq.to_tensors(packed, "a.b", torch.float16, layout="gptq_v2")
    assert torch.equal(formats.dequantize(read(config | {"group_size": size}, again)), weights)


def _change(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[f"a.b.{name}"] = change(tensors[f"a.b.{name}"].clone())

    return apply


def _set(tensor: Tensor, value: float) -> Tensor:
    tensor.view(-1)[3] = value
    return tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change("qweight", lambda t: t[:-1]), "8 rows|7 rows of words.*do not belong together"),
        (_change("qweight", lambda t: t.to(torch.int64)), "a.b.qweight must be int32"),
        (_change("qweight", lambda t: t.flatten()), "a.b.qweight must have two dimensions"),
        (_change("qweight", lambda t: t[:, :0]), "a.b.qweight must have two dimensions"),
        (_change("qzeros", lambda t: t[:, :-1]), "a.b.qzeros has shape"),
        (_change("scales", lambda t: t[:, :-1]), "a.b.scales has shape"),
        (_change("scales", lambda t: _set(t, float("nan"))), "a.b.scales must be finite"),
        (_change("scales", lambda t: t.double()), "a.b.scales must be float16"),
        (_change("g_idx", lambda t: _set(t, 2**31 - 1)), "a.b.g_idx must put 32 of the 64 inputs"),
        (_change("g_idx", lambda t: _set(t, -1)), "a.b.g_idx must put"),
        (_change("g_idx", lambda t: _set(t, 1)), "a.b.g_idx must put"),
        (_change("g_idx", lambda t: t.float()), "a.b.g_idx must be int32 or int64"),
        (_change("g_idx", lambda t: t[:-8]), "for 56 inputs"),
        (_change("bias", lambda t: t[:-1]), "a.b.bias has shape"),
        (lambda tensors: tensors.pop("a.b.scales"), "a.b.scales is missing"),
        (lambda tensors: tensors.pop("a.b.qzeros"), "a.b.qzeros is missing"),
    ],
)
def test_damaged_layers_are_one_sentence(change: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    tensors, weights, config = stored(32, 64, 4, 32)
    assert torch.equal(formats.dequantize(read(config, tensors)), weights)
    change(tensors)
    with pytest.raises(UserError, match=message) as caught:
        read(config, tensors)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "found bits 5"),
        ({"bits": True}, "found bits True"),
        ({"bits": None}, "found bits None"),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": "128"}, "group_size '128'"),
        ({"checkpoint_format": "marlin"}, "'gptq' and 'gptq_v2' are read, found 'marlin'"),
        ({"checkpoint_format": None, "format": "bitblas"}, "found 'bitblas'"),
        ({"pack_dtype": "int64"}, "pack_dtype must be 'int32'"),
        ({"is_marlin_format": True}, "Marlin's own layout"),
        ({"dynamic": ["-:x"]}, "dynamic must map"),
        ({"dynamic": {"+:x": {"bits": 7}}}, r"dynamic\['\+:x'\].*found bits 7"),
    ],
)
def test_configurations_that_are_not_read(changes: dict[str, Any], message: str) -> None:
    _, _, config = stored(32, 64, 4, 32)
    formats.check_supported(config)
    with pytest.raises(UserError, match=message) as caught:
        formats.check_supported(config | changes)
    assert "\n" not in str(caught.value)


# Whole models.


def write_model(source: Path, out: Path, bits: int, group: int, order: bool, older: bool = False) -> dict[str, Tensor]:
    """The tiny model with random packed layers; returns what they are, by prefix."""
    out.mkdir()
    kept, dense, config = {}, {}, {}
    for number, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        if not name.endswith("_proj.weight"):
            kept[name] = tensor
            continue
        prefix = name.removesuffix(".weight")
        tensors, weights, config = stored(*tensor.shape, bits, group, v1=True, order=order, sym=True, seed=number)
        # As large as weights are: what is random all over would make any model a chaotic one.
        for part in ("a.b.scales", "a.b.bias"):
            tensors[part] = tensors[part].float() * 2.0**-bits
        weights = weights * 2.0**-bits
        del tensors["a.b.bias"]
        kept |= {prefix + name.removeprefix("a.b"): part for name, part in tensors.items()}
        dense[prefix] = weights
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((source / "config.json").read_text())
    if older:
        (out / "quantize_config.json").write_text(json.dumps({k: v for k, v in config.items() if "_m" not in k}))
    else:
        known["quantization_config"] = config
    (out / "config.json").write_text(json.dumps(known))
    for path in source.glob("token*"):
        (out / path.name).write_bytes(path.read_bytes())
    return dense


@pytest.mark.parametrize(
    ("bits", "group", "order"), [(4, 32, True), (3, 64, False), (2, 32, False), (8, -1, False), (8, 32, True)]
)
def test_models_run_on_the_kernels(
    tiny: Tiny,
    tmp_path: Path,
    text: Any,
    whole: Any,
    kernels: str,
    bits: int,
    group: int,
    order: bool,
    torch_threads: None,
) -> None:
    dense = write_model(tiny("llama"), tmp_path / "m", bits, group, order, older=bits == 3)
    checkpoint = open_checkpoint(tmp_path / "m")
    for prefix, weights in dense.items():
        packed = checkpoint.weight(prefix)
        assert isinstance(packed, PackedWeight) and torch.equal(formats.dequantize(packed), weights)
    # The same weights unpacked, in float: inputs are rounded to 8 bits in the one and not in the other.
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in tiny("llama").iterdir():
        (plain / path.name).write_bytes(path.read_bytes())
    source = load_file(plain / "model.safetensors")
    save_file(source | {f"{p}.weight": w.contiguous() for p, w in dense.items()}, plain / "model.safetensors")
    packed_logits, logits = (
        whole(load(path, kernels=kernels, threads=1).decoder, text(24)) for path in (tmp_path / "m", plain)
    )
    assert float((packed_logits - logits).norm() / logits.norm()) < 0.05


def test_gptqmodel_agrees() -> None:
    pytest.importorskip("gptqmodel", reason="GPTQModel is not in the test environment")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    for bits in BITS:
        tensors, weights, _ = stored(64, 96, bits, 32, order=True)
        shape = {"in_features": 96, "out_features": 64}
        layer = TorchLinear(
            bits=bits,
            group_size=32,
            sym=False,
            desc_act=True,
            bias=True,
            pack_dtype=torch.int32,
            register_buffers=True,
            **shape,
        )
        layer.load_state_dict({name.removeprefix("a.b."): tensor for name, tensor in tensors.items()})
        layer.qzero_format(2)
        layer.post_init()
        assert torch.equal(layer.dequantize_weight().float().T, weights.half().float())
