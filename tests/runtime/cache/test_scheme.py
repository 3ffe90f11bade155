"""The cache scheme of an artifact: what config.json and the tensors say, and that the caches follow it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from runtime import Speculator, load, native
from runtime.cache import scheme as kv_scheme
from runtime.cache.contiguous import KeyValueCache
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import CacheKind, Decoder, Rows
from runtime.errors import UserError
from runtime.generate import app
from runtime.kv_store import HALVES
from runtime.speculate import CacheOptions

KINDS: tuple[CacheKind, ...] = ("int8", "int4")
LAYERS, HEADS, DIM = 2, 2, 16


def factors(seed: int = 1) -> Tensor:
    """(LAYERS, HEADS, DIM), from about 1/4 to 4."""
    return torch.randn(LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).exp()


def artifact(source: Path, out: Path, kind: CacheKind, factor: Tensor | None = None) -> Path:
    """A copy of a plain model that asks for a cache of `kind`, with key factors (none: those of `factors`)."""
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(kv_scheme.to_config(config, kind)))
    (out / "kv_cache").mkdir()
    stored = {kv_scheme.factor_name(i): f.clone() for i, f in enumerate(factors() if factor is None else factor)}
    save_file(stored, out / kv_scheme.TENSORS)
    return out


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def logits(decoder: Decoder, tokens: Tensor, widths: list[int], kind: CacheKind, rejected: int = 0) -> Tensor:
    """Logits of all tokens, fed in forwards of these widths; after each, `rejected` other rows come and go again."""
    cache = decoder.new_cache(kind)
    request = cache.open(len(tokens) + rejected)
    out = []
    start = 0
    for width in widths:
        rows = Rows.chains([(request, start, width)])
        out.append(decoder.forward(tokens[start : start + width], rows, cache).logits)
        start += width
        if rejected:
            decoder.forward(tokens[:rejected], Rows.chains([(request, start, rejected)]), cache)
            cache.truncate(request, start)
    assert start == len(tokens)
    return torch.cat(out)


@pytest.fixture(scope="module")
def path(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact(tiny("llama"), tmp_path_factory.mktemp("kv") / "model", "int4")


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(1, 300, (90,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_caches_have_the_artifacts_factors_where_they_are_rounded(path: Path, kernels: str) -> None:
    decoder = load(path, kernels=kernels).decoder
    assert decoder.kv.kind == "int4"
    (held_by,) = decoder.kv.key_factors
    assert torch.equal(held_by, factors())
    for pages in (None, 4):
        held = {kind: decoder.new_cache(kind, pages) for kind in ("float32", "int8", "int4")}
        assert all(isinstance(cache, KeyValueCache) for cache in held.values())
        found = {kind: cache.format.key_factor for kind, cache in held.items()}  # type: ignore[attr-defined]
        assert found["float32"] is None
        assert found["int8"] is held_by and found["int4"] is held_by


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_rows_have_the_same_bits_at_every_width_and_after_rolling_back(
    path: Path, tokens: Tensor, kernels: str, kind: CacheKind
) -> None:
    decoder = load(path, kernels=kernels).decoder
    whole = logits(decoder, tokens, [90], kind)
    assert torch.equal(whole, logits(decoder, tokens, [64, 1, 8, 5, 3, 9], kind))
    assert torch.equal(whole, logits(decoder, tokens, [61, 8, 7, 14], kind, rejected=6))


@pytest.mark.skipif(not native.usable("portable")[0], reason=native.usable("portable")[1])
@pytest.mark.parametrize("kind", KINDS)
def test_native_kernels_give_what_the_reference_gives(
    path: Path, tiny: Callable[..., Path], tokens: Tensor, kind: CacheKind
) -> None:
    found, expected = (logits(load(path, kernels=k).decoder, tokens, [90], kind) for k in ("auto", "reference"))
    assert torch.equal(found, expected)
    assert not torch.equal(found, logits(load(tiny("llama")).decoder, tokens, [90], kind))


def test_a_speculator_takes_the_artifacts_kind_unless_told_otherwise(path: Path, tiny: Callable[..., Path]) -> None:
    for source, options, kind in (
        (path, CacheOptions(), "int4"),
        (path, CacheOptions("float32"), "float32"),
        (path, CacheOptions("int8", 8), "int8"),
        (tiny("llama"), CacheOptions(), "float32"),
    ):
        model = load(source)
        assert options.make(model.decoder).format.kind == kind  # type: ignore[attr-defined]
    model = load(path)
    texts = [
        Speculator(model, cache=options).generate([[5, 6, 7]], 40, stop=())[0].tokens
        for options in (CacheOptions(), CacheOptions("int4"), CacheOptions("float32"))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("said", "kind", "note"),
    [
        ({"num_bits": 8, "type": "int", "symmetric": True, "strategy": "attn_head"}, "int8", ""),
        ({"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}, "int8", ""),
        ({"num_bits": 4, "type": "int"}, "int4", ""),
        ({"num_bits": 8, "type": "float"}, "float32", "8-bit float"),
        ({"num_bits": 8, "type": "int", "symmetric": False}, "float32", "8-bit asymmetric int"),
    ],
)
def test_the_scheme_of_compressed_tensors(
    tiny: Callable[..., Path], tmp_path: Path, said: dict[str, Any], kind: str, note: str
) -> None:
    out = changed(
        artifact(tiny("llama"), tmp_path / "model", "int8"),
        lambda config: (config.pop("specpress"), config["quantization_config"].update(kv_cache_scheme=said)),
    )
    scheme = load(out).decoder.kv
    assert scheme.kind == kind and not scheme.key_factors
    assert note in scheme.note if note else not scheme.note


def test_what_is_wrong_is_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    cases: list[tuple[Tensor, Callable[[dict[str, Any]], Any], str]] = [
        (factors(), lambda c: c["specpress"]["kv_cache"].update(kind="int3"), "must have the kind int8 or int4"),
        (factors(), lambda c: c["specpress"].update(kv_cache=7), "must have the kind int8 or int4"),
        (factors(), lambda c: c["specpress"]["kv_cache"].update(tensors="../away.safetensors"), "leaves the directory"),
        (factors(), lambda c: c["specpress"]["kv_cache"].update(tensors="none.safetensors"), "is missing"),
        (factors()[:1], lambda c: c, "scales.safetensors: tensor model.layers.1.self_attn.key_factor is missing"),
        (factors()[:, :1], lambda c: c, r"shape \(1, 16\), config.json implies \(2, 16\)"),
        (factors() * 0, lambda c: c, "must hold positive numbers"),
        (factors() * torch.nan, lambda c: c, "must hold positive numbers"),
        (factors(), lambda c: (c.pop("specpress"), c["quantization_config"].update(kv_cache_scheme=3)), "a mapping"),
    ]
    for number, (factor, change, message) in enumerate(cases):
        out = changed(artifact(tiny("llama"), tmp_path / str(number), "int8", factor), change)
        with pytest.raises(UserError, match=message):
            load(out)


def test_what_is_wrong_with_bases_is_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    def rotated(out: Path, kind: CacheKind, basis: Tensor, halves: int | None = HALVES) -> Path:
        artifact(tiny("llama"), out, "int4")
        said = {"kind": kind, "rotated": True} | ({} if halves is None else {"halves": halves})
        changed(out, lambda config: config["specpress"]["kv_cache"].update(said))
        names = [kv_scheme.basis_name(layer, part) for layer in range(LAYERS) for part in ("key", "value")]
        save_file({name: basis.clone() for name in names}, out / kv_scheme.TENSORS)
        return out

    good = torch.randn(HEADS, 3, DIM, DIM)
    for kind in ("int4", "int3"):
        held = load(rotated(tmp_path / kind, kind, good)).decoder.kv  # type: ignore[arg-type]
        assert held.kind == kind and torch.equal(held.bases[0].values[1], good)
    wrong: list[tuple[CacheKind, Tensor, str]] = [
        ("int8", good, "int4 or int3, rotated"),
        ("int4", good[:, :2], r"shape \(2, 2, 16, 16\), config.json implies \(2, 3, 16, 16\)"),
        ("int3", good * torch.nan, "must hold finite numbers"),
    ]
    for number, (kind, basis, message) in enumerate(wrong):
        with pytest.raises(UserError, match=message):
            load(rotated(tmp_path / str(number), kind, basis))
    for halves, said in ((None, "none"), (16, "16")):
        with pytest.raises(UserError, match=f"found {said}: these bases are of another version.*kv-int3-rotated"):
            load(rotated(tmp_path / f"halves {said}", "int3", good, halves))


def test_a_configuration_without_groups_needs_a_cache_scheme(path: Path, tmp_path: Path) -> None:
    assert open_checkpoint(path).quantization == {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "global_compression_ratio": None,
        "kv_cache_scheme": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "attn_head", "dynamic": False},
    }
    copy = tmp_path / "model"
    shutil.copytree(path, copy)
    with pytest.raises(UserError, match="must name at least one group"):
        open_checkpoint(changed(copy, lambda config: config["quantization_config"].pop("kv_cache_scheme")))


def test_only_compressed_tensors_and_plain_weights_have_a_place_for_static_scales() -> None:
    nf4 = {"quantization_config": {"quant_method": "bitsandbytes"}, "specpress": {"other": 1}}
    said = kv_scheme.to_config(nf4, "int4")
    assert said["quantization_config"] == nf4["quantization_config"] and not kv_scheme.holds_scales(nf4)
    assert said["specpress"] == {"other": 1, "kv_cache": {"kind": "int4", "tensors": kv_scheme.TENSORS}}
    assert kv_scheme.holds_scales({})
    packed = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}}
    unknown = {"model_type": "not_described", "num_experts": 4}
    assert kv_scheme.holds_scales(unknown | packed) and kv_scheme.holds_scales(unknown | {"num_experts": 1})
    assert not kv_scheme.holds_scales(unknown)
    with pytest.raises(ValueError, match="no scheme"):
        kv_scheme.to_config({}, "float32")


def test_the_command_says_how_keys_and_values_are_held(path: Path, tiny: Callable[..., Path], tmp_path: Path) -> None:
    def run(target: Path, *more: str) -> str:
        result = CliRunner().invoke(app, ["--target", str(target), "--prompt", "x", "--max-new-tokens", "3", *more])
        assert result.exit_code == 0, result.stderr
        return " ".join(result.stdout.split())

    assert "cache int4, keys by calibrated factors" in run(path)
    assert "cache float32 kernels" in run(path, "--kv", "float32")
    assert "cache" not in run(tiny("llama"))
    floats = {"num_bits": 8, "type": "float"}
    foreign = changed(
        artifact(tiny("llama"), tmp_path / "model", "int8"),
        lambda config: (config.pop("specpress"), config["quantization_config"].update(kv_cache_scheme=floats)),
    )
    assert "cache float32 (the checkpoint asks for a cache of 8-bit float numbers" in run(foreign)


@pytest.mark.parametrize("has_scheme", [True, False])
def test_the_hub_is_asked_for_the_factors_too(
    path: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, has_scheme: bool
) -> None:
    source, asked = path if has_scheme else tiny("llama"), []

    def download(name: str, allow_patterns: list[str], ignore_patterns: object = None) -> str:
        asked.append(allow_patterns)
        return str(source)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert open_checkpoint("someone/model").path == source
    assert (["kv_cache/*.safetensors"] in asked) == has_scheme
