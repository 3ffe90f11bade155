"""Calibrated caches: the mathematics, the directory that is written, and what transformers and we make of it."""

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from calib import corpora
from calib.windows import Windows, make_windows
from compress import logits as logits_
from compress.artifact import safetensors
from compress.errors import UserError
from compress.model import directory
from compress.model.source import default_pair
from compress.report import quality
from compress.stages import kv_cache
from compress.stages.kv_cache import Calibrated, Kind
from runtime import load
from runtime.cache import scheme
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import CacheKind, Decoder, Rows
from runtime.kernels.reference import rotate
from runtime.native.binding import CACHES

HEADS, DIM = 2, 32


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uneven(seed: int, count: int = 400) -> tuple[Tensor, Tensor]:
    """Keys (count, HEADS, DIM) of which few channels are large, and the moments (HEADS, DIM, DIM) of some queries."""
    g = generator(seed)
    size = (1.2 * torch.randn(HEADS, DIM // 2, generator=g)).exp().repeat(1, 2)
    keys = torch.randn(count, HEADS, DIM, generator=g) * size
    queries = torch.randn(HEADS, count, DIM, generator=g)
    return keys, queries.transpose(1, 2) @ queries / count


# ------------------------------------------------------------------------------------------------- the mathematics
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), rotated=st.sampled_from([0, 8, DIM]))
def test_the_size_of_a_pair_does_not_change_with_the_position(seed: int, rotated: int) -> None:
    keys, _ = uneven(seed, 50)
    if rotated:
        angle = torch.randn(50, rotated // 2, generator=generator(seed))
        turned = rotate(keys, angle.cos(), angle.sin())
        assert not torch.allclose(turned.square().mean(0).sqrt(), keys.square().mean(0).sqrt(), rtol=1e-2)
    else:
        turned = keys
    found = kv_cache.pair_rms(turned, rotated)
    torch.testing.assert_close(found, kv_cache.pair_rms(keys, rotated), rtol=1e-4, atol=0)
    half = rotated // 2
    assert torch.equal(found[:, :half], found[:, half:rotated])
    torch.testing.assert_close(found[:, rotated:], keys.square().mean(0).sqrt()[:, rotated:])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), exponent=st.sampled_from(kv_cache.EXPONENTS), scale=st.floats(1e-6, 1e6))
def test_factors_are_positive_of_mean_one_and_do_not_depend_on_the_scale(
    seed: int, exponent: float, scale: float
) -> None:
    rms = uneven(seed)[0].square().mean(0).sqrt()
    rms[0, 3] = 0.0
    found = kv_cache.factors_of(rms, exponent)
    assert float(found.min()) > 0
    torch.testing.assert_close(found.log().mean(-1), torch.zeros(HEADS), rtol=0, atol=1e-5)
    torch.testing.assert_close(found, kv_cache.factors_of(rms * scale, exponent), rtol=1e-4, atol=0)
    assert torch.equal(kv_cache.factors_of(rms, 0.0), torch.ones(HEADS, DIM))


def test_the_logit_error_is_that_of_the_logits() -> None:
    g = generator(1)
    keys, _ = uneven(2)
    queries = torch.randn(300, DIM, generator=g) @ torch.randn(DIM, DIM, generator=g)
    factor = torch.rand(DIM, generator=g) + 0.5
    codes = keys[:, 0] / factor
    step = codes.abs().amax(-1, keepdim=True) / 7
    stored = (codes / step).round() * step * factor
    expected = (queries @ (stored - keys[:, 0]).T).norm() / (queries @ keys[:, 0].T).norm()
    moment = queries.T @ queries / len(queries)
    assert kv_cache.logit_error(keys[:, 0], moment, factor, "int4") == pytest.approx(float(expected), rel=1e-3)
    assert kv_cache.logit_error(keys[:, 0], moment, factor, "int8") < float(expected) / 10
    assert kv_cache.logit_error(keys[:, 0] * 0, moment, factor, "int4") == 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), kind=st.sampled_from(["int8", "int4"]))
def test_the_search_never_loses_against_no_factors(seed: int, kind: Kind) -> None:
    keys, moments = uneven(seed)
    factor = kv_cache.search(keys, moments, DIM, kind)
    assert factor.shape == (HEADS, DIM)
    for head, (with_it, without) in enumerate(errors(keys, moments, factor, kind)):
        assert with_it <= without, head


def errors(keys: Tensor, moments: Tensor, factor: Tensor, kind: Kind) -> list[tuple[float, float]]:
    """Of each head, with its factors and without."""
    return [
        tuple(kv_cache.logit_error(keys[:, head].contiguous(), moments[head], f, kind) for f in (own, own * 0 + 1))
        for head, own in enumerate(factor)
    ]


def test_uneven_channels_get_factors_and_even_or_silent_ones_none() -> None:
    keys, moments = uneven(7)
    factor = kv_cache.search(keys, moments, DIM, "int4")
    assert all(with_it < 0.85 * without for with_it, without in errors(keys, moments, factor, "int4"))
    signs = torch.randn(400, HEADS, DIM, generator=generator(8)).sign()
    for dull in (signs, torch.zeros_like(signs)):
        assert torch.equal(kv_cache.search(dull, moments, DIM, "int4"), torch.ones(HEADS, DIM))


def test_static_scales_reach_the_largest_number() -> None:
    found = kv_cache.static_scale(torch.tensor([127.5, 2.0, 0.0]))
    assert found.tolist() == [1.0, pytest.approx(2 / 127.5), 1.0]


# ------------------------------------------------------------------------------------------------ what a model sees
def random_windows(count: int, length: int) -> Tensor:
    return torch.randint(1, 300, (count, length), generator=generator(3))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "phi3", "gemma", "mixtral"])
def test_calibration_sees_the_keys_and_values_that_the_cache_holds(tiny: Callable[..., Path], kind: str) -> None:
    """Also behind a sliding window (mistral: 40), with norms on keys, and through experts."""
    path, windows = tiny(kind), random_windows(3, 100)
    found = kv_cache.calibrate(path, "int8", windows)
    decoder = load(path).decoder
    key_scale, value_scale = (
        torch.stack([getattr(of, name) for of in found.layers.values()]) for name in ("key_scale", "value_scale")
    )
    highest = torch.zeros(2, *key_scale.shape)
    for window in windows:
        cache = decoder.new_cache()
        request = cache.open(100)
        decoder.forward(window, Rows.chains([(request, 0, 100)]), cache)
        for layer in range(len(key_scale)):
            for part, seen in enumerate(cache.read(layer, request, 100)):  # type: ignore[attr-defined]
                # What pads the last block is zero.
                highest[part, layer] = torch.maximum(highest[part, layer], seen.abs().amax((0, 2, 3)))
    torch.testing.assert_close(key_scale, highest[0] / 127.5, rtol=1e-3, atol=0)
    torch.testing.assert_close(value_scale, highest[1] / 127.5, rtol=1e-3, atol=0)
    (factors,) = found.key_factors(decoder.architecture)  # type: ignore[attr-defined]
    assert tuple(factors.shape) == (*key_scale.shape, decoder.architecture.head_dim)  # type: ignore[attr-defined]


def test_equal_calibrations_are_equal(tiny: Callable[..., Path]) -> None:
    steps: list[tuple[int, int]] = []
    windows = random_windows(2, 64)
    first, second = (
        kv_cache.calibrate(tiny("llama"), "int4", windows, threads, lambda *step: steps.append(step))
        for threads in (torch.get_num_threads(), None)
    )
    for one, other in ((first.tensors(), second.tensors()), (first.scales(), second.scales())):
        assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert steps == [(1, 2), (2, 2)] * 2


def test_what_cannot_be_calibrated_is_said(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="transformers runs this model"):
        kv_cache.calibrate(tiny("gpt2"), "int8", random_windows(1, 32))
    for windows in (random_windows(1, 257), random_windows(0, 32)):
        with pytest.raises(UserError, match="at most 256 tokens"):
            kv_cache.calibrate(tiny("llama"), "int8", windows)
    with pytest.raises(UserError, match="does not run 'gpt2'"):
        kv_cache.check(open_checkpoint(tiny("gpt2")).config)
    with pytest.raises(UserError, match="of a language model alone, and 'gemma3' has more beside it"):
        kv_cache.check({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})
    kv_cache.check(open_checkpoint(tiny("llama")).config)
    broken = tmp_path / "broken"
    shutil.copytree(tiny("llama"), broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][5] = torch.inf
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"broken: model.layers.1.self_attn gives keys or values"):
        kv_cache.calibrate(broken, "int8", random_windows(1, 32))


# ------------------------------------------------------------------------------------------------------ the directory
@pytest.fixture(scope="module")
def windows() -> Windows:
    return make_windows(
        corpora.load(), load(default_pair()[0]).tokenizer, length=1024, calibration=4, evaluation_tokens=4096, seed=0
    )


def attached(source: Path, out: Path, found: Calibrated, shard_bytes: int = 10**9) -> Path:
    shutil.copytree(source, out)
    kv_cache.attach(out, found, shard_bytes)
    return out


def same_files(first: Path, second: Path) -> bool:
    names = [sorted(p.relative_to(path).as_posix() for p in path.rglob("*")) for path in (first, second)]
    files = [name for name in names[0] if (first / name).is_file()]
    return names[0] == names[1] and all((first / name).read_bytes() == (second / name).read_bytes() for name in files)


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_a_directory_keeps_its_weights_in_files_of_any_number(
    tiny: Callable[..., Path], tmp_path: Path, shard_bytes: int
) -> None:
    source = tiny("llama")
    found = kv_cache.calibrate(source, "int4", random_windows(2, 64))
    out = attached(source, tmp_path / "a", found, shard_bytes)
    again = attached(source, tmp_path / "b", found, shard_bytes)
    assert same_files(out, again)
    assert (len(list(out.glob("*.safetensors"))) > 1) == (shard_bytes < 10**9)
    before, after = open_checkpoint(source), open_checkpoint(out)
    scales = found.scales()
    assert set(after.names()) == {*before.names(), *scales}
    assert all(torch.equal(after.tensor(name), before.tensor(name)) for name in before.names())
    assert all(torch.equal(after.tensor(name), scale) for name, scale in scales.items())
    decoder = load(out).decoder
    assert decoder.kv.kind == "int4"
    (factors,) = decoder.kv.key_factors
    assert torch.equal(factors, *found.key_factors(decoder.architecture))  # type: ignore[attr-defined]
    kv_cache.attach(out, found, shard_bytes)
    assert same_files(out, again)
    other = replace(found, layers={n: replace(of, key_scale=of.key_scale * 2) for n, of in found.layers.items()})
    with pytest.raises(ValueError, match="has other static scales already"):
        kv_cache.attach(out, other, shard_bytes)


@pytest.mark.parametrize("kind", ["int4", "int3"])
@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_a_rotated_cache_is_written_and_read(
    tiny: Callable[..., Path], tmp_path: Path, family: str, kind: CacheKind
) -> None:
    """Whole models: nearer to the floats than codes of as many bits without bases, at every width the same bits."""
    source, windows = tiny(family), random_windows(3, 100)
    found = kv_cache.calibrate(source, kind, windows, rotated=True)  # type: ignore[arg-type]
    assert found.rotated and not any("factor" in name for name in found.tensors())
    decoder, plain = load(attached(source, tmp_path / "a", found)).decoder, load(source).decoder
    assert decoder.kv.kind == kind and not decoder.kv.key_factors
    (basis,) = decoder.kv.bases
    assert torch.equal(basis.keys[1], found.tensors()["model.layers.1.self_attn.key_basis"])
    assert torch.equal(basis.values[0], found.tensors()["model.layers.0.self_attn.value_basis"])

    def logits(made: Decoder, held: CacheKind, *widths: int) -> Tensor:
        cache = made.new_cache(held)
        request, out = cache.open(100), []
        for piece in windows[0].split(list(widths)):
            out.append(made.forward(piece, Rows.chains([(request, cache.length(request), len(piece))]), cache).logits)
        return torch.cat(out)

    want = logits(plain, "float32", 100)
    rotated, rounded = logits(decoder, kind, 100), logits(plain, kind, 100)
    assert float((rotated - want).norm()) < 0.9 * float((rounded - want).norm())
    assert torch.equal(logits(decoder, kind, 60, 1, 8, 1, 30), rotated)
    assert torch.equal(logits(decoder, "float32", 100), want)


def test_several_shards_take_more_tensors_too(tiny: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "shards"
    shutil.copytree(tiny("llama"), source)
    safetensors.join([source / "model.safetensors"], source, 20_000)
    (source / "model.safetensors").unlink()
    assert len(open_checkpoint(source).shards.files) > 2
    found = kv_cache.calibrate(source, "int8", random_windows(2, 64))
    out = attached(source, tmp_path / "out", found)
    whole = attached(tiny("llama"), tmp_path / "whole", found)
    assert same_files(out, whole)


def test_a_draft_brings_its_scheme_along(tiny: Callable[..., Path], tmp_path: Path) -> None:
    source = attached(tiny("llama"), tmp_path / "a", kv_cache.calibrate(tiny("llama"), "int8", random_windows(1, 32)))
    directory.copy_model(source, tmp_path / "draft", open_checkpoint(source).shards.files)
    before, after = load(source).decoder.kv, load(tmp_path / "draft").decoder.kv
    assert before.kind == after.kind == "int8"
    assert torch.equal(*before.key_factors, *after.key_factors)


@pytest.mark.parametrize("recipe", ["original", "int8-dynamic", "int4-rtn", "nf4"])
def test_transformers_loads_it_without_a_word(
    pair_target: Callable[[str], Path],
    windows: Windows,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recipe: str,
) -> None:
    pytest.importorskip("bitsandbytes" if recipe == "nf4" else "compressed_tensors")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as theirs

    source = pair_target(recipe)
    found = kv_cache.calibrate(source, "int8", windows.calibration[:, :256])
    out = attached(source, tmp_path / "model", found)
    theirs.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    finally:
        theirs.disable_propagation()
    assert not [r.getMessage() for r in caplog.records if "UNEXPECTED" in r.getMessage() or "MISSING" in r.getMessage()]
    attention = model.model.layers[1].self_attn
    if recipe == "nf4":
        assert not hasattr(attention, "k_scale")
        assert scheme.scale_name(1, "v") in load_file(out / scheme.TENSORS)
    else:
        torch.testing.assert_close(attention.k_scale.float().flatten(), found.layers[1].key_scale, rtol=1e-2, atol=0)
        torch.testing.assert_close(attention.v_scale.float().flatten(), found.layers[1].value_scale, rtol=1e-2, atol=0)
    tokens = windows.evaluation[0, :256]
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1]
    decoder = load(out).decoder
    cache = decoder.new_cache(decoder.kv.kind)
    ours = decoder.forward(tokens[:-1], Rows.chains([(cache.open(255), 0, 255)]), cache).logits
    assert decoder.kv.kind == "int8"
    assert float((logits - ours).norm() / ours.norm()) < 0.03


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_transformers_loads_a_mixture_of_plain_experts(tiny: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """Its loader takes the experts of any configuration for packed ones: such models have none."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    source, tokens = tiny(kind), torch.randint(3, 256, (2, 64), generator=torch.Generator().manual_seed(1))
    out = attached(source, tmp_path / "model", kv_cache.calibrate(source, "int8", tokens))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()(tokens[:1]).logits[0]
    decoder = load(out).decoder
    cache = decoder.new_cache()
    ours = decoder.forward(tokens[0], Rows.chains([(cache.open(64), 0, 64)]), cache).logits
    assert decoder.kv.kind == "int8" and float((logits - ours).norm() / ours.norm()) < 0.03
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and scheme.scale_name(1, "v") in load_file(out / scheme.TENSORS)


def test_unexpected_tensors_beside_the_weights_would_be_reported(
    tiny: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Why the factors have a file of their own, and that the test above sees what it looks for."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as theirs

    out = tmp_path / "model"
    shutil.copytree(tiny("llama"), out)
    tensors = load_file(out / "model.safetensors") | {scheme.factor_name(0): torch.ones(2, 16)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    theirs.enable_propagation()
    before = theirs.get_verbosity()  # a run in this process silences what is not about it
    theirs.set_verbosity_warning()
    try:
        with caplog.at_level(logging.WARNING):
            AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    finally:
        theirs.set_verbosity(before)
        theirs.disable_propagation()
    assert any("UNEXPECTED" in r.getMessage() for r in caplog.records)


# ---------------------------------------------------------------------------------------------------------- the pair
@pytest.mark.slow
def test_calibrated_caches_on_the_pair(tmp_path: Path, windows: Windows) -> None:
    """Perplexity within the bounds, and predictions nearer to a float32 cache's than without factors."""
    source = default_pair()[0]
    plain = load(source).decoder
    full = [predictions(plain, tokens, "float32") for tokens in windows.evaluation]
    for kind, bound in BOUNDS.items():
        found = kv_cache.calibrate(source, kind, windows.calibration[:, :512])
        out = attached(source, tmp_path / kind, found)
        assert json.loads((out / "config.json").read_text())["specpress"]["kv_cache"]["kind"] == kind
        divergence, growth = [], []
        for decoder in (load(out).decoder, plain):
            seen = [predictions(decoder, tokens, kind) for tokens in windows.evaluation]
            divergence.append(
                float(torch.stack([logits_.kl_rows(*pair).mean() for pair in zip(full, seen, strict=True)]).mean())
            )
            growth.append(float(loss(seen, windows) - loss(full, windows)))
        assert 0 < abs(math.expm1(growth[0])) <= bound, (kind, growth)
        assert divergence[0] < 0.9 * divergence[1], (kind, divergence)


BOUNDS: dict[Kind, float] = {"int8": 0.001, "int4": 0.01}


def predictions(decoder: Decoder, tokens: Tensor, kind: CacheKind) -> Tensor:
    """Log-probabilities after each token but the last."""
    cache = decoder.new_cache(kind)
    chain = Rows.chains([(cache.open(len(tokens)), 0, len(tokens) - 1)])
    return logits_.log_probabilities(decoder.forward(tokens[:-1], chain, cache).logits)


def loss(seen: list[Tensor], windows: Windows) -> Tensor:
    return torch.cat([logits_.token_nll(p, w[1:]) for p, w in zip(seen, windows.evaluation, strict=True)]).mean()


def test_perplexity_through_a_cache(windows: Windows) -> None:
    decoder = load(default_pair()[0]).decoder
    few = replace(windows, evaluation=windows.evaluation[:2, :300])
    for kind in CACHES:
        seen = [predictions(decoder, tokens, kind) for tokens in few.evaluation]
        found = math.exp(quality.kv_losses(decoder, few, kind).mean())
        assert found == pytest.approx(math.exp(loss(seen, few)), rel=1e-6)
