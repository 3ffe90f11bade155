"""Both directions with the libraries themselves: `make compressors` builds the environment that they live in.

transformers loads our GPTQ and AWQ exports with GPTQModel's kernels; GPTQModel's own checkpoints run on ours.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress import Recipe, export
from compress.pipeline import compress
from runtime import formats, load
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.formats.packed import PackedWeight

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".compressors" / "bin" / "python"
Tiny = Callable[..., Path]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs `make compressors`: GPTQModel and optimum"),
]


def peer(*words: object) -> None:
    """Runs the script in the compressors' environment: GPTQModel refuses two cores unless it is told a number."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "GPTQMODEL_CPU_WORKERS": "4"}
    command = [str(PYTHON), str(HERE / "export_peer.py"), *map(str, words)]
    # It writes logs where it stands.
    with tempfile.TemporaryDirectory() as here:
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


def weights(model: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(model)
    # GPTQ and AWQ; compressed-tensors, packed or not.
    endings = (".qweight", ".weight_packed", "_proj.weight")
    names = {name.rpartition(".")[0] for name in checkpoint.names() if name.endswith(endings)}
    packed = {name: checkpoint.weight(name) for name in sorted(names)}
    return {name: formats.dequantize(weight) for name, weight in packed.items() if isinstance(weight, PackedWeight)}


def logits(model: Path) -> Tensor:
    """Of the peer's text, on our kernels."""
    text = torch.randint(1, 320, (1, 48), generator=torch.Generator().manual_seed(7))[0]
    decoder: Any = load(model, threads=1).decoder
    cache = decoder.new_cache()
    handle = cache.open(64)
    return decoder.forward(text, Rows.chains([(handle, 0, len(text))]), cache).logits.float()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("form", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("recipe", "family"), [("int4-rtn", "llama"), ("int4-rtn", "qwen2"), ("asymmetric", "llama"), ("learned", "llama")]
)
def test_transformers_reads_ours_exactly(
    tiny: Tiny, tmp_path: Path, torch_threads_one: None, form: str, recipe: str, family: str
) -> None:
    wished = Recipe.load("int4-rtn")
    if recipe == "asymmetric":
        (tmp_path / "asymmetric.yaml").write_text(
            "stages: [{quantize: {scheme: int4, group_size: 32, symmetric: false}}]\n"
        )
        wished = Recipe.load(tmp_path / "asymmetric.yaml")
    if recipe == "learned":
        (tmp_path / "learned.yaml").write_text(
            "stages:\n"
            "  - quantize: {scheme: int4, group_size: 32, method: gptq}\n"
            "  - learn: {training: {tokens: 2048, batch: 4, length: 64}}\n"
        )
        wished = Recipe.load(tmp_path / "learned.yaml")
    folder = compress(tiny(family), wished, tmp_path / "run", report=lambda *_: {}).path
    exported = export.run(form, folder / "model", tmp_path / form)
    assert exported.repacked == 14 and not exported.losses
    peer("read", tmp_path / form, tmp_path / "found.safetensors", "float16")
    theirs, ours = load_file(tmp_path / "found.safetensors"), weights(tmp_path / form)
    assert len(ours) == 14 and theirs.keys() == ours.keys() | {"logits"}
    for name, weight in ours.items():
        assert torch.equal(weight.half().float(), theirs[name]), name
    # Their products are in float16; ours round the inputs to 8 bits, which a random model shows most.
    assert relative(logits(tmp_path / form), theirs["logits"]) < 0.05


@pytest.mark.parametrize(
    "said",
    [
        {"method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        {"method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
        {"method": "gptq", "bits": 3, "group_size": 64, "sym": False, "desc_act": False, "format": "gptq_v2"},
        {"method": "gptq", "bits": 2, "group_size": 32, "sym": False, "desc_act": False},
        {"method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": False, "act_group_aware": False},
        {"method": "awq", "bits": 4, "group_size": 32},
    ],
    ids=lambda said: f"{said['method']}-{said['bits']}-{said['group_size']}-{said.get('desc_act')}-{said.get('sym')}",
)
def test_a_checkpoint_of_gptqmodel_is_read_exactly(tiny: Tiny, tmp_path: Path, said: dict[str, Any]) -> None:
    # Its AWQ takes outputs in 64s.
    peer("write", tiny("llama", num_key_value_heads=4), tmp_path / "theirs", json.dumps(said))
    peer("read", tmp_path / "theirs", tmp_path / "found.safetensors", "float16")
    theirs, ours = load_file(tmp_path / "found.safetensors"), weights(tmp_path / "theirs")
    assert len(ours) == 14 and theirs.keys() == ours.keys() | {"logits"}
    for name, weight in ours.items():
        assert torch.equal(weight.half().float(), theirs[name]), name
    assert relative(logits(tmp_path / "theirs"), theirs["logits"]) < 0.05


def scheme(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | more


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("rtn", {"config_groups": {"all": {"targets": ["Linear"], "weights": scheme(4)}}}),
        ("rtn", {"config_groups": {"all": {"targets": ["Linear"], "weights": scheme(4, symmetric=False)}}}),
        ("gptq", {"config_groups": {"all": {"targets": ["Linear"], "weights": scheme(4)}}, "actorder": "static"}),
        ("rtn", {"scheme": "W8A8"}),
    ],
    ids=["int4", "int4 zero points", "gptq in static activation order", "W8A8"],
)
def test_a_checkpoint_of_llm_compressor_is_read_exactly(
    tiny: Tiny, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    peer("oneshot", tiny("llama"), tmp_path / "theirs", json.dumps({"method": method, "options": options}))
    peer("dense", tmp_path / "theirs", tmp_path / "found.safetensors", "float32")
    theirs, ours = load_file(tmp_path / "found.safetensors"), weights(tmp_path / "theirs")
    assert len(ours) == 14 and theirs.keys() == ours.keys() | {"logits"}
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
    assert relative(logits(tmp_path / "theirs"), theirs["logits"]) < 0.05


@pytest.fixture
def torch_threads_one() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
