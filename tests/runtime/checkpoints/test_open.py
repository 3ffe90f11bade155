"""The checkpoint reader: directories that transformers and its libraries load, and every way of being broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import formats
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.safetensors import INDEX, SINGLE
from runtime.errors import UserError
from runtime.formats import dequantize, int4, int8, nf4
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import check_finite, expect_shape

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = torch.tensor([[5, 17, 33, 2, 90, 41, 8]])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with attention biases, as transformers saves it."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True))
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.05)
    path = tmp_path_factory.mktemp("plain")
    model.save_pretrained(path)
    return path


def _linears(checkpoint: Checkpoint) -> list[str]:
    return [
        n.removesuffix(".weight")
        for n in checkpoint.names()
        if n.endswith("_proj.weight") or (".experts." in n and n.endswith(".weight"))
    ]


def _write(
    source: Path,
    out: Path,
    pack: Callable[[str, Tensor, Tensor | None], PackedWeight],
    dtype: torch.dtype,
    **options: Any,
) -> dict[str, Tensor]:
    """Packs every projection into `out`; returns the dense state dict that it stands for."""
    checkpoint = open_checkpoint(source)
    linears = _linears(checkpoint)
    covered = {f"{prefix}.{part}" for prefix in linears for part in ("weight", "bias")}
    stored = {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.names() if name not in covered}
    dense, schemes = dict(stored), {}
    for prefix in linears:
        name = f"{prefix}.bias"
        bias = checkpoint.tensor(name).to(dtype) if name in checkpoint.names() else None
        packed = pack(prefix, checkpoint.tensor(f"{prefix}.weight").to(dtype), bias)
        stored |= formats.to_tensors(packed, prefix, dtype)
        schemes[prefix] = packed.scheme
        dense[f"{prefix}.weight"] = formats.dequantize(packed)
        if bias is not None:
            dense[name] = bias
    out.mkdir()
    save_file(stored, out / SINGLE, metadata={"format": "pt"})
    config = checkpoint.config | {"quantization_config": formats.hf_config(schemes, ["lm_head"], **options)}
    (out / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    return {name: tensor.float() for name, tensor in dense.items()}


def _logits(path: Path, dense: dict[str, Tensor]) -> Tensor:
    config = transformers.AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(dense)
    with torch.no_grad():
        return model(TOKENS).logits


def _load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _int4(prefix: str, weight: Tensor, bias: Tensor | None) -> PackedWeight:
    return int4.pack(weight, 64 if "down_proj" in prefix else 128, bias=bias)


def _same(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((found - expected).norm() / expected.norm()) < tolerance
    assert float((found - expected.roll(1, dims=-1)).norm() / expected.norm()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_our_int4(plain: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    dense = _write(plain, tmp_path / "m", _int4, dtype)
    with torch.no_grad():
        _same(_load(tmp_path / "m")(TOKENS).logits, _logits(tmp_path / "m", dense), 1e-5)
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
    dense = _write(plain, tmp_path / "m", lambda _, w, b: int8.pack(w, bias=b), torch.bfloat16)
    model = _load(tmp_path / "m")
    expected = _logits(tmp_path / "m", dense)
    with torch.no_grad():
        rounded = model(TOKENS).logits  # inputs rounded to int8 per token by the library
        _same(rounded, expected, 0.03)
        assert not torch.equal(rounded, expected)
        for module in model.modules():
            module.quantization_enabled = False
        _same(model(TOKENS).logits, expected, 1e-5)
    packed = open_checkpoint(tmp_path / "m").weight("model.layers.1.self_attn.q_proj")
    assert isinstance(packed, PackedWeight) and packed.scheme == Scheme("int8", 8, 0, True, "int8-token")
    assert packed.bias is not None and torch.equal(packed.bias, dense["model.layers.1.self_attn.q_proj.bias"])


def test_transformers_loads_int4_beside_int8(plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")

    def pack(prefix: str, weight: Tensor, bias: Tensor | None) -> PackedWeight:
        return int8.pack(weight, bias=bias) if "layers.1.mlp.down" in prefix else _int4(prefix, weight, bias)

    dense = _write(plain, tmp_path / "m", pack, torch.bfloat16)
    model = _load(tmp_path / "m")
    for module in model.modules():
        module.quantization_enabled = False
    with torch.no_grad():
        _same(model(TOKENS).logits, _logits(tmp_path / "m", dense), 1e-5)
    checkpoint = open_checkpoint(tmp_path / "m")
    kinds = [checkpoint.weight(f"model.layers.{i}.mlp.down_proj") for i in range(2)]
    assert [k.scheme.kind for k in kinds if isinstance(k, PackedWeight)] == ["int4", "int8"]


@pytest.mark.parametrize("double", [True, False])
def test_transformers_loads_our_nf4(plain: Path, tmp_path: Path, double: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    dense = _write(
        plain,
        tmp_path / "m",
        lambda _, w, b: nf4.pack(w, bias=b, double_quant=double),
        torch.float32,
        double_quant=double,
        compute="float32",
    )
    model = _load(tmp_path / "m")
    # Before any forward: the library's CPU kernel repacks its weights in place.
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            loaded = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert torch.equal(loaded, dense[f"{name}.weight"]), name
    with torch.no_grad():
        _same(model(TOKENS).logits, _logits(tmp_path / "m", dense), 0.01)  # the library multiplies in bfloat16
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
    dense = _write(tmp_path / "plain", tmp_path / "m", pack, torch.float32)
    save_file(dense, tmp_path / "plain" / SINGLE, metadata={"format": "pt"})
    model = _load(tmp_path / "m")
    for module in model.modules():
        module.quantization_enabled = False
    with torch.no_grad():
        # The library dequantises experts in the dtype of their scales.
        _same(model(TOKENS).logits, _load(tmp_path / "plain")(TOKENS).logits, 3e-3)
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
        _same(_load(tmp_path / "m")(TOKENS).logits, _load(tmp_path / "plain")(TOKENS).logits, 0.01)
    assert len(schemes) == 4 and open_checkpoint(tmp_path / "m").tied


def _copy(source: Path, out: Path) -> Path:
    out.mkdir()
    for name in ("config.json", SINGLE):
        (out / name).write_bytes((source / name).read_bytes())
    return out


def _sharded(source: Path, out: Path, **changes: str) -> Path:
    """Two shards and an index whose weight_map has `changes` applied to the file names."""
    tensors = load_file(source / SINGLE)
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (i > 4)}-of-00002.safetensors" for i, name in enumerate(names)}
    out.mkdir()
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, out / file)
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files | changes}))
    return out


def _without_config(m: Path) -> None:
    (m / "config.json").unlink()


def _bad_json(m: Path) -> None:
    (m / "config.json").write_text('{"model_type": "llama",\n oops}')


def _list_json(m: Path) -> None:
    (m / "config.json").write_text("[]")


def _pickle(m: Path) -> None:
    (m / SINGLE).rename(m / "pytorch_model.bin")


def _no_weights(m: Path) -> None:
    (m / SINGLE).unlink()


def _truncated(m: Path) -> None:
    data = (m / SINGLE).read_bytes()
    (m / SINGLE).write_bytes(data[: len(data) // 2])


def _empty(m: Path) -> None:
    (m / SINGLE).write_bytes(b"")


def _garbage(m: Path) -> None:
    (m / SINGLE).write_bytes(b"\x80\x04 this is a pickle, really" * 99)


def _link_out(m: Path) -> None:
    outside = m.parent / "outside.safetensors"
    (m / SINGLE).rename(outside)
    (m / SINGLE).symlink_to(outside)


def _quantized(config: dict[str, Any]) -> Callable[[Path], None]:
    def change(m: Path) -> None:
        known = json.loads((m / "config.json").read_text())
        (m / "config.json").write_text(json.dumps(known | {"quantization_config": config}))

    return change


_GROUP = {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}}


def _compressed(**changes: Any) -> dict[str, Any]:
    base = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": _GROUP}}
    return base | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_config, "no config.json there"),
        (_bad_json, r"m/config.json is not valid JSON: .* line 2"),
        (_list_json, "m/config.json must hold a JSON object"),
        (_pickle, r"only pickled weights \(pytorch_model.bin\).*convert"),
        (_no_weights, "neither model.safetensors nor"),
        (_truncated, "m/model.safetensors is truncated"),
        (_empty, "m/model.safetensors is truncated"),
        (_garbage, "m/model.safetensors is truncated or no safetensors file"),
        (_link_out, "model.safetensors is a link that leaves the directory"),
        (_quantized({"quant_method": "gptq", "bits": 5}), "2, 3, 4 or 8 bits.*found bits 5"),
        (_quantized({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}), "found 'marlin'"),
        (_quantized({"quant_method": "awq", "version": "gemv"}), "of AWQ's layouts 'gemm' is read, found 'gemv'"),
        (_quantized({"quant_method": "quanto"}), "quant_method 'quanto' is not read; use"),
        (_quantized({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}), "'fp4'"),
        (_quantized(_compressed(format="nvfp4-pack-quantized")), "'nvfp4-pack-quantized' is not read yet"),
        (_quantized(_compressed(format="float-quantized")), "with symmetric floats of 8 bits by channel or tensor"),
        (_quantized(_compressed(config_groups={})), "must name at least one group"),
        (
            _quantized(_compressed(config_groups={"g": {"weights": _GROUP["weights"] | {"num_bits": 7}}})),
            "num_bits 7, symmetric True",
        ),
    ],
)
def test_broken_directories_are_one_sentence(
    plain: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    model = _copy(plain, tmp_path / "m")
    assert open_checkpoint(model).names()
    change(model)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../secret.safetensors", "leaves the directory"),
        ("sub/../../secret.safetensors", "leaves the directory"),
        ("/etc/secret.safetensors", "leaves the directory"),
        ("..\\secret.safetensors", "leaves the directory"),
        ("link.safetensors", "link that leaves the directory"),
        ("model-00009-of-00002.safetensors", "model-00009-of-00002.safetensors is missing"),
        ("weights.bin", "no .safetensors file"),
        ("model-00002-of-00002.safetensors", "tensor lm_head.weight is missing"),
    ],
)
def test_an_index_names_only_files_inside(plain: Path, tmp_path: Path, name: str, message: str) -> None:
    assert len(open_checkpoint(_sharded(plain, tmp_path / "good")).names()) == 29
    model = _sharded(plain, tmp_path / "m", **{"lm_head.weight": name})
    save_file({"lm_head.weight": torch.randn(96, 128)}, tmp_path / "secret.safetensors")
    (model / "sub").mkdir()
    (model / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(UserError, match=message):
        open_checkpoint(model)


def test_a_hub_snapshot_may_link_into_its_blobs(plain: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in ("config.json", SINGLE):
        (repository / "blobs" / name[:3]).write_bytes((plain / name).read_bytes())
        (snapshot / name).symlink_to(Path("../../blobs") / name[:3])
    assert open_checkpoint(snapshot).names() == open_checkpoint(plain).names()
    (tmp_path / "elsewhere").write_bytes((plain / SINGLE).read_bytes())
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="leaves the directory"):
        open_checkpoint(snapshot)


def test_paths_that_are_no_model(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "other.partial").mkdir(parents=True)
    assert open_checkpoint(plain).config["model_type"] == "llama"
    for path, message in [
        (tmp_path / "nowhere", "no such directory"),
        ("runs/nf4", "runs/nf4: no such directory; give"),
        ("runs/other", r"other.partial does: that run has not ended"),
        ("", "an empty path: no such directory"),
        (plain / "config.json", "is a file"),
        ("some-org/some-model", "some-org/some-model: no such directory here, and the hub did not give"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            open_checkpoint(path)
        assert "\n" not in str(caught.value)


def test_damaged_tensors_are_named_when_they_are_read(plain: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(plain)
    with pytest.raises(UserError, match=r"tensor model.layers.9.mlp.up_proj.weight is missing"):
        checkpoint.weight("model.layers.9.mlp.up_proj")
    with pytest.raises(UserError, match="tensor nothing is missing"):
        checkpoint.tensor("nothing")
    _write(plain, tmp_path / "m", _int4, torch.bfloat16)
    tensors = load_file(tmp_path / "m" / SINGLE)
    prefix = "model.layers.1.mlp.up_proj"
    tensors[f"{prefix}.weight_scale"][3, 0] = float("inf")
    (tmp_path / "m" / SINGLE).unlink()
    save_file(tensors, tmp_path / "m" / SINGLE)
    packed = open_checkpoint(tmp_path / "m")
    assert isinstance(packed.weight("model.layers.0.mlp.up_proj"), PackedWeight)
    with pytest.raises(UserError, match=rf"^m: tensor {prefix}.weight_scale must be finite, .* at \[3, 0\]"):
        packed.weight(prefix)


def test_integers_that_no_configuration_explains_are_refused(plain: Path, tmp_path: Path) -> None:
    _write(plain, tmp_path / "m", lambda _, w, b: int8.pack(w, bias=b), torch.bfloat16)
    assert isinstance(open_checkpoint(tmp_path / "m").weight("model.layers.0.mlp.up_proj"), PackedWeight)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"holds int8, which config.json's quantization_config does not explain"):
        open_checkpoint(tmp_path / "m").weight("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_finite_and_shape_checks(dtype: torch.dtype) -> None:
    good = torch.randn(7, 33).to(dtype)
    assert check_finite("x", good) is good
    assert check_finite("codes", torch.arange(4)).sum() == 6
    for bad in (float("nan"), float("inf"), float("-inf")):
        if dtype == torch.float8_e4m3fn and bad == bad:
            continue  # it has no infinity
        damaged = good.clone()
        damaged[2, 5] = bad
        with pytest.raises(UserError, match=r"tensor x must be finite, but 1 of its 231 values .* \[2, 5\]"):
            check_finite("x", damaged)
    assert expect_shape("x", good, (7, 33)) is good
    with pytest.raises(UserError, match=r"tensor x has shape \[7, 33\], expected \[33, 7\]"):
        expect_shape("x", good, (33, 7))
