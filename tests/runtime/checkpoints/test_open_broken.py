"""Folders that are no model, or a broken one: a sentence each, and nothing outside them is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.safetensors import INDEX, SINGLE
from runtime.errors import UserError
from runtime.formats import int8
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import check_finite, expect_shape
from tests.runtime.checkpoints.folders import copied, in_int4, write_packed


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
    model = copied(plain, tmp_path / "m")
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
    write_packed(plain, tmp_path / "m", in_int4, torch.bfloat16)
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
    write_packed(plain, tmp_path / "m", lambda _, w, b: int8.pack(w, bias=b), torch.bfloat16)
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
