"""What is meant to be far from the original, what a model says alone, mixtures, draft heads, texts, and the command."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from compress.check.__main__ import app
from compress.check.check import Text, check
from compress.check.findings import Result
from compress.check.page import html
from runtime import formats
from runtime.formats import int4
from tests.compress.check import planted
from tests.compress.packed_models import write_packed

Tiny = Callable[..., Path]
NORM = "model.layers.0.input_layernorm.weight"
BEHIND_IT = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]


def said(result: Result, level: str) -> str:
    return " | ".join(finding.sentence for finding in result.findings if finding.level == level)


def changed(source: Path, out: Path, how: Callable[[str, Tensor], Tensor]) -> Path:
    shutil.copytree(source, out)
    planted.change(out, lambda tensors: tensors.update({name: how(name, t) for name, t in tensors.items()}))
    return out


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def half_zeros(name: str, weight: Tensor) -> Tensor:
    if not is_linear(name):
        return weight
    return torch.where(weight.abs() < weight.abs().flatten().median(), 0.0, weight)


def noisy(name: str, weight: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return weight + 0.04 * torch.randn(weight.shape, generator=generator) if is_linear(name) else weight


@pytest.mark.parametrize("packed", [False, True])
def test_pruned_and_trained_models_are_called_what_they_are(tiny: Tiny, tmp_path: Path, packed: bool) -> None:
    for how, words in ((half_zeros, "pruned, not broken; 50% zeros"), (noisy, "trained further (QAT, distillation)")):
        folder = changed(tiny("llama"), tmp_path / how.__name__, how)
        if packed:
            folder = write_packed(folder, tmp_path / f"{how.__name__}-packed", "int4")
        result = check(folder, tiny("llama"))
        assert result.level == "good" and words in result.verdict, result.verdict
        assert "everywhere, evenly" in said(result, "note")


def test_one_bad_layer_of_a_trained_model_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = changed(tiny("llama"), tmp_path / "model", noisy)
    planted.change(folder, lambda t: planted.swap(t, f"{planted.UP}.weight", f"{planted.OTHER}.weight"))
    result = check(folder, tiny("llama"))
    assert f"holds what the original has as {planted.OTHER}.weight" in said(result, "broken")


def scaled(source: Path, out: Path, divided: bool, strength: float = 0.6, by: float = 1.0) -> Path:
    """Columns behind a norm multiplied as AWQ does, the norm divided or not, and those of down_proj, then packed.

    by: a factor that those behind the norm have in common.
    """
    generator = torch.Generator().manual_seed(2)
    factors = by * torch.exp(strength * torch.randn(64, generator=generator))
    of_down = torch.exp(strength * torch.randn(192, generator=generator))
    down = planted.UP.replace("up_proj", "down_proj")

    def how(name: str, weight: Tensor) -> Tensor:
        if name in BEHIND_IT:
            weight = weight * factors
        if divided and name == f"{planted.UP}.weight":
            weight = weight / of_down.unsqueeze(1)
        if divided and name == f"{down}.weight":
            weight = weight * of_down
        return weight / factors if divided and name == NORM else weight

    return write_packed(changed(source, out / "plain", how), out / "packed", "int4")


def test_scaled_columns_need_what_divides_them(tiny: Tiny, tmp_path: Path) -> None:
    sound = check(scaled(tiny("llama"), tmp_path / "sound", divided=True), tiny("llama"))
    assert sound.verdict == "good" and sum(weight.scaled for weight in sound.weights) >= 3
    bad = check(scaled(tiny("llama"), tmp_path / "bad", divided=False), tiny("llama"))
    assert all(name in said(bad, "broken") for name in BEHIND_IT)
    assert "nothing before the layer is divided" in said(bad, "broken")


@pytest.mark.parametrize(("strength", "by"), [(0.1, 1.0), (0.06, 0.85), (0.03, 1.2)])
def test_factors_near_one_are_no_fault_and_hide_none(tiny: Tiny, tmp_path: Path, strength: float, by: float) -> None:
    """As AWQ's search often ends with: they move weights by as little as rounding does."""
    folder = scaled(tiny("llama"), tmp_path / "sound", True, strength, by)
    sound = check(folder, tiny("llama"))
    assert sound.verdict == "good" and sum(weight.scaled for weight in sound.weights) >= 3
    planted.change(folder, lambda t: planted.put(t, f"{planted.GATE}.weight_scale", lambda s: s.roll(1, 0)))
    assert planted.GATE in said(check(folder, tiny("llama")), "broken")


@pytest.fixture(scope="module")
def mixture(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tiny("qwen3_moe"), tmp_path_factory.mktemp("mixture") / "model", "int4")


EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def test_experts_are_compared_with_their_siblings(tiny: Tiny, mixture: Path, tmp_path: Path) -> None:
    assert check(mixture, tiny("qwen3_moe")).verdict == "good"
    plain = tmp_path / "plain"
    shutil.copytree(mixture, plain)
    planted.leave_plain(plain, EXPERT)
    assert "up_proj of expert 2 is stored plain" in said(check(plain, tiny("qwen3_moe")), "broken")

    def coarse(tensors: dict[str, Tensor]) -> None:
        weight = load_file(tiny("qwen3_moe") / "model.safetensors")[f"{EXPERT}.weight"]
        packed = int4.pack(weight * 1.9, 32)
        tensors.update(
            formats.to_tensors(int4.pack(formats.dequantize(packed) / 1.9 + 0.02, 32), EXPERT, torch.bfloat16)
        )

    worse = tmp_path / "worse"
    shutil.copytree(mixture, worse)
    planted.change(worse, coarse)
    found = check(worse, tiny("qwen3_moe"))
    assert "up_proj of expert 2 is up to" in said(found, "suspicious") + said(found, "broken")
    lost = tmp_path / "lost"
    shutil.copytree(mixture, lost)
    planted.change(lost, lambda t: [t.pop(name) for name in list(t) if name.startswith(EXPERT)])
    assert "expert 2 is missing" in said(check(lost, tiny("qwen3_moe")), "broken")


def test_draft_heads_are_carried_or_lost(tiny: Tiny, tmp_path: Path) -> None:
    original = changed(tiny("qwen3"), tmp_path / "original", lambda _, t: t)
    planted.change(
        original, lambda t: t.update({"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.randn(64)})
    )
    kept = write_packed(original, tmp_path / "kept", "nf4")
    result = check(kept, original)
    assert result.verdict == "good" and "2 weights of draft heads" in said(result, "note")
    planted.change(kept, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])
    assert "draft heads (mtp.fc.weight among them) of the original are lost" in said(
        check(kept, original), "suspicious"
    )


@pytest.mark.parametrize("form", ["gptq", "awq", "nf4", "int8", "ternary", "ternary-1.25"])
def test_alone_a_sound_model_gives_no_alarm(tiny: Tiny, tmp_path: Path, form: str) -> None:
    folder = planted.write(tiny("llama"), tmp_path / form, form)
    result = check(folder)
    assert result.verdict == "good" and all(weight.error is None for weight in result.weights)
    part = {
        "gptq": "scales",
        "awq": "scales",
        "nf4": "weight.absmax",
        "int8": "weight_scale",
        "ternary": "weight_scale",
        "ternary-1.25": "weight_patterns",
    }
    planted.change(folder, lambda t: t.pop(f"{planted.UP}.{part[form]}"))
    assert check(folder).level == "broken"


def test_a_text_shows_how_far_the_models_part(tiny: Tiny, tmp_path: Path) -> None:
    folder = write_packed(tiny("llama"), tmp_path / "model", "int4")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and again over another one.\n" * 3)
    sound = check(folder, tiny("llama"), Text(text, 40))
    depth = sound.depth
    assert sound.verdict == "good" and depth is not None and depth.tokens == 40
    assert depth.own[0] == pytest.approx(depth.inherited[0]) and 0 < depth.inherited[0] < depth.inherited[1]
    assert depth.kl_divergence is not None and depth.kl_divergence > 0
    same = check(tiny("llama"), tiny("llama"), Text(text, 40)).depth
    assert same is not None and same.kl_divergence == 0 and same.flips == 0 and same.inherited == [0, 0]
    planted.change(folder, lambda t: planted.put(t, "model.layers.1.mlp.down_proj.weight_scale", lambda s: s * 8))
    bad = check(folder, tiny("llama"), Text(text, 40)).depth
    assert bad is not None and bad.own[0] == depth.own[0] and bad.own[1] > 3 * depth.own[1]


def test_the_command(tiny: Tiny, tmp_path: Path) -> None:
    folder = write_packed(tiny("llama"), tmp_path / "model", "nf4")
    page = tmp_path / "check.html"
    words = [str(folder), "--original", str(tiny("llama")), "--tokens", "0"]
    done = CliRunner().invoke(app, [*words, "--page", str(page)])
    assert done.exit_code == 0 and "model: good" in done.output and "nf4 in groups of 64" in done.output
    planted.change(folder, lambda t: planted.put(t, f"{planted.UP}.weight", planted.nibbles))
    done = CliRunner().invoke(app, [*words, "--json", "--page", str(page)])
    found = Result.model_validate_json(done.stdout)
    assert done.exit_code == 1 and found.level == "broken" and planted.UP in found.verdict
    text = page.read_text()
    assert "nibbles" in text and "http" not in text and "<script" not in text
    for wrong in (
        [str(tmp_path / "none")],
        [str(folder), "--original", str(tmp_path / "none")],
        [str(folder), "--tokens", "-1"],
    ):
        done = CliRunner().invoke(app, wrong)
        assert done.exit_code == 2 and "Traceback" not in done.output


def test_the_page_escapes_what_files_say(tiny: Tiny, tmp_path: Path) -> None:
    folder = changed(tiny("llama"), tmp_path / "model", lambda _, t: t)
    tensors = load_file(folder / "model.safetensors") | {"<script>alert(1)</script>": torch.randn(3)}
    save_file(tensors, folder / "model.safetensors")
    result = check(folder)
    assert "<script>" in json.dumps([f.where for f in result.findings]) and "<script>" not in html(result)
