"""mxfp4 against the specification and transformers, and gpt-oss with experts stored so."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import formats, load
from runtime.errors import UserError
from runtime.formats import mxfp4
from runtime.model.base import BaseDecoder
from tests.runtime.model import families
from tests.runtime.model.test_families import relative, run, text

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 40}


def stored(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks (E, N, K/32, 16) and scales (E, N, K/32) of weights (E, N, K), each rounded to the nearest level."""
    groups = weight.unflatten(-1, (-1, mxfp4.BLOCK))
    exponents = torch.floor(torch.log2(groups.abs().amax(dim=-1))) - 2
    scaled = groups / torch.exp2(exponents).unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - mxfp4.LEVELS).abs().argmin(dim=-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def test_a_code_is_a_sign_two_bits_of_exponent_and_one_of_fraction() -> None:
    def value(code: int) -> float:
        sign, exponent, fraction = -1.0 if code >> 3 else 1.0, code >> 1 & 3, code & 1
        return sign * (fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1))

    assert mxfp4.LEVELS.tolist() == [value(code) for code in range(16)]
    assert torch.equal(mxfp4.INT8_LEVELS.float() / 2, mxfp4.LEVELS)


def test_transformers_reads_the_same_numbers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 5, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 5, 4), generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    tensors = {"w_blocks": blocks, "w_scales": scales}
    for unpack in (True, False):
        found = mxfp4.read_experts(tensors, "w", unpack)
        assert [weight.shape for weight in found] == [(5, 128)] * 3
        if unpack:
            assert torch.equal(torch.stack([formats.dequantize(weight) for weight in found]), theirs)


@pytest.mark.parametrize("change", ["scale", "shape", "rank"])
def test_what_is_no_weight_is_refused(change: str) -> None:
    blocks, scales = torch.zeros(2, 3, 1, 16, dtype=torch.uint8), torch.full((2, 3, 1), 127, dtype=torch.uint8)
    if change == "scale":
        scales[1, 2] = 255
    elif change == "shape":
        scales = scales[:1]
    else:
        blocks = blocks.flatten(2)
    with pytest.raises(UserError, match="tensor w_"):
        mxfp4.read_experts({"w_blocks": blocks, "w_scales": scales}, "w")


def test_gpt_oss_with_experts_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub has it; near to the same numbers as plain experts, whose inputs are not rounded to int8."""
    monkeypatch.setitem(families.FAMILIES, "gpt_oss", families.FAMILIES["gpt_oss"] | SIZES)
    plain = families.write("gpt_oss", tmp_path / "plain")
    held = load_file(plain / "model.safetensors")
    packed = dict(held)
    for name in [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = stored(packed.pop(name).transpose(1, 2))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights = [formats.dequantize(weight) for weight in mxfp4.read_experts(packed, name)]
        held[name] = torch.stack(weights).transpose(1, 2).contiguous()
    save_file(held, plain / "model.safetensors", metadata={"format": "pt"})
    whole = tmp_path / "packed"
    whole.mkdir()
    save_file(packed, whole / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((plain / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(told | {"quantization_config": {"quant_method": "mxfp4"}}))
    tokens = text(40)
    decoder = load(whole, threads=1).decoder
    assert isinstance(decoder, BaseDecoder)
    found = run(decoder, tokens, 40)
    assert relative(found, run(load(plain, threads=1).decoder, tokens, 40)) < 0.03
    assert torch.equal(run(load(whole, kernels="reference").decoder, tokens, 40), found)
    for width in (1, 7):
        assert torch.equal(run(decoder, tokens, width), found)
    assert isinstance(before := load(plain, threads=1).decoder, BaseDecoder)
    assert decoder.weight_bytes < before.weight_bytes
