"""Checkpoints are read exactly, whoever wrote them, and transformers loads those that are packed here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import formats
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.safetensors import SINGLE
from runtime.formats import dequantize, int4, int8, nf4
from runtime.formats.packed import PackedWeight, Scheme
from tests.runtime.checkpoints.folders import SIZES, TOKENS, assert_same, in_int4, load_whole, logits_of, write_packed

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_our_int4(plain: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    dense = write_packed(plain, tmp_path / "m", in_int4, dtype)
    with torch.no_grad():
        assert_same(load_whole(tmp_path / "m")(TOKENS).logits, logits_of(tmp_path / "m", dense), 1e-5)
    checkpoint = open_checkpoint(tmp_path / "m")
    for prefix in _linears_packed(checkpoint):
        packed = checkpoint.weight(prefix)
        assert isinstance(packed, PackedWeight)
        assert packed.scheme == int4.scheme(64 if "down_proj" in prefix else 128)
        assert torch.equal(formats.dequantize(packed), dense[f"{prefix}.weight"])


def _linears_packed(checkpoint: Checkpoint) -> list[str]:
    found = [n.removesuffix(".weight_packed") for n in checkpoint.names() if n.endswith(".weight_packed")]
    assert len(found) == 14
    return found


def test_transformers_loads_our_int8(plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    dense = write_packed(plain, tmp_path / "m", lambda _, w, b: int8.pack(w, bias=b), torch.bfloat16)
    model = load_whole(tmp_path / "m")
    expected = logits_of(tmp_path / "m", dense)
    with torch.no_grad():
        rounded = model(TOKENS).logits  # inputs rounded to int8 per token by the library
        assert_same(rounded, expected, 0.03)
        assert not torch.equal(rounded, expected)
        for module in model.modules():
            module.quantization_enabled = False
        assert_same(model(TOKENS).logits, expected, 1e-5)
    packed = open_checkpoint(tmp_path / "m").weight("model.layers.1.self_attn.q_proj")
    assert isinstance(packed, PackedWeight) and packed.scheme == Scheme("int8", 8, 0, True, "int8-token")
    assert packed.bias is not None and torch.equal(packed.bias, dense["model.layers.1.self_attn.q_proj.bias"])


def test_transformers_loads_int4_beside_int8(plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")

    def pack(prefix: str, weight: Tensor, bias: Tensor | None) -> PackedWeight:
        return int8.pack(weight, bias=bias) if "layers.1.mlp.down" in prefix else in_int4(prefix, weight, bias)

    dense = write_packed(plain, tmp_path / "m", pack, torch.bfloat16)
    model = load_whole(tmp_path / "m")
    for module in model.modules():
        module.quantization_enabled = False
    with torch.no_grad():
        assert_same(model(TOKENS).logits, logits_of(tmp_path / "m", dense), 1e-5)
    checkpoint = open_checkpoint(tmp_path / "m")
    kinds = [checkpoint.weight(f"model.layers.{i}.mlp.down_proj") for i in range(2)]
    assert [k.scheme.kind for k in kinds if isinstance(k, PackedWeight)] == ["int4", "int8"]


@pytest.mark.parametrize("double", [True, False])
def test_transformers_loads_our_nf4(plain: Path, tmp_path: Path, double: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    dense = write_packed(
        plain,
        tmp_path / "m",
        lambda _, w, b: nf4.pack(w, bias=b, double_quant=double),
        torch.float32,
        double_quant=double,
        compute="float32",
    )
    model = load_whole(tmp_path / "m")
    # Before any forward: the library's CPU kernel repacks its weights in place.
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            loaded = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert torch.equal(loaded, dense[f"{name}.weight"]), name
    with torch.no_grad():
        assert_same(model(TOKENS).logits, logits_of(tmp_path / "m", dense), 0.01)  # the library multiplies in bfloat16
    packed = open_checkpoint(tmp_path / "m").weight("model.layers.0.mlp.down_proj")
    assert type(packed) is PackedWeight
    assert torch.equal(formats.dequantize(packed), dense["model.layers.0.mlp.down_proj.weight"])


def test_reads_what_bitsandbytes_itself_saved(plain: Path, tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    dense = {
        name: bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
        for name, module in model.named_modules()
        if isinstance(module, bnb.nn.Linear4bit)
    }
    model.save_pretrained(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    assert len(dense) == 14
    for prefix, expected in dense.items():
        packed = checkpoint.weight(prefix)
        assert isinstance(packed, PackedWeight) and torch.equal(formats.dequantize(packed), expected)
    head = checkpoint.weight("lm_head")
    assert isinstance(head, Tensor) and head.shape == (96, 128)


def test_one_file_many_shards_and_a_run_folder_read_alike(plain: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(plain)
    model.save_pretrained(tmp_path / "run" / "model", max_shard_size="100KB")
    one, many = open_checkpoint(plain), open_checkpoint(str(tmp_path / "run"))
    assert many.path == tmp_path / "run" / "model"
    assert len(many.shards.files) > 3 and len(one.shards.files) == 1
    assert one.names() == many.names() == sorted(load_file(plain / SINGLE))
    for name, tensor in load_file(plain / SINGLE).items():
        assert torch.equal(one.tensor(name), tensor) and torch.equal(many.tensor(name), tensor)
        assert many.shape(name) == tuple(tensor.shape)
    assert one.quantization is None and not one.tied
    assert one.bytes_on_disk() == (plain / SINGLE).stat().st_size
    assert many.bytes_on_disk() == sum(p.stat().st_size for p in many.path.glob("*.safetensors"))


def test_tied_fused_and_expert_models_give_the_tensors_that_transformers_wrote(tmp_path: Path) -> None:
    sizes = SIZES | {"num_hidden_layers": 1}
    phi = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, tie_word_embeddings=True))
    phi.save_pretrained(tmp_path / "phi")
    checkpoint = open_checkpoint(tmp_path / "phi")
    assert checkpoint.tied
    assert checkpoint.shape("model.layers.0.mlp.gate_up_proj.weight") == (384, 128)
    fused = checkpoint.weight("model.layers.0.self_attn.qkv_proj")
    assert isinstance(fused, Tensor) and torch.equal(fused, phi.model.layers[0].self_attn.qkv_proj.weight)
    moe = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=2))
    moe.save_pretrained(tmp_path / "moe")
    checkpoint = open_checkpoint(tmp_path / "moe")
    both = [checkpoint.weight(f"model.layers.0.block_sparse_moe.experts.1.{part}") for part in ("w1", "w3")]
    joined = torch.cat([part for part in both if isinstance(part, Tensor)])
    assert torch.equal(joined, moe.model.layers[0].mlp.experts.gate_up_proj[1])


def _experts_int4(prefix: str, weight: Tensor, bias: Tensor | None) -> PackedWeight:
    return int4.pack(weight, 64 if ".experts." in prefix else 128, bias=bias)


def _experts_int8(prefix: str, weight: Tensor, bias: Tensor | None) -> PackedWeight:
    return int8.pack(weight, bias=bias)


@pytest.mark.parametrize("pack", [_experts_int4, _experts_int8])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_transformers_loads_packed_experts(
    tmp_path: Path, family: str, pack: Callable[[str, Tensor, Tensor | None], PackedWeight]
) -> None:
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(1)
    options = {"num_local_experts": 2} if family == "Mixtral" else {"num_experts": 2, "moe_intermediate_size": 64}
    config = getattr(transformers, f"{family}Config")(**SIZES, **options, num_experts_per_tok=2)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path / "plain")
    dense = write_packed(tmp_path / "plain", tmp_path / "m", pack, torch.float32)
    save_file(dense, tmp_path / "plain" / SINGLE, metadata={"format": "pt"})
    model = load_whole(tmp_path / "m")
    for module in model.modules():
        module.quantization_enabled = False
    with torch.no_grad():
        # The library dequantises experts in the dtype of their scales.
        assert_same(model(TOKENS).logits, load_whole(tmp_path / "plain")(TOKENS).logits, 3e-3)
    base = "block_sparse_moe.experts.1.w2" if family == "Mixtral" else "mlp.experts.1.down_proj"
    packed = open_checkpoint(tmp_path / "m").weight(f"model.layers.1.{base}")
    assert isinstance(packed, PackedWeight)
    assert torch.equal(formats.dequantize(packed), dense[f"model.layers.1.{base}.weight"])


def test_transformers_loads_conv1d_as_nf4_when_it_was_turned(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(2)
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=128, n_layer=1, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "plain")
    checkpoint = open_checkpoint(tmp_path / "plain")
    stored, dense, schemes = {}, {}, {}
    for name in checkpoint.names():
        stored[name] = dense[name] = checkpoint.tensor(name)
        if ".c_" in name and name.endswith("weight"):
            prefix = name.removesuffix(".weight")
            packed = nf4.pack(stored.pop(name).T)  # Conv1D keeps (K, N)
            stored |= nf4.to_tensors(packed, prefix, torch.float32)
            dense[name] = dequantize(packed).T.contiguous()
            schemes[prefix] = packed.scheme
    (tmp_path / "m").mkdir()
    save_file(stored, tmp_path / "m" / SINGLE, metadata={"format": "pt"})
    save_file(dense, tmp_path / "plain" / SINGLE, metadata={"format": "pt"})
    quantization = formats.hf_config(schemes, ["lm_head"], compute="float32")
    (tmp_path / "m" / "config.json").write_text(json.dumps(checkpoint.config | {"quantization_config": quantization}))
    with torch.no_grad():
        assert_same(load_whole(tmp_path / "m")(TOKENS).logits, load_whole(tmp_path / "plain")(TOKENS).logits, 0.01)
    assert len(schemes) == 4 and open_checkpoint(tmp_path / "m").tied
