"""Whole jobs on a pretended GPU: nothing mixes host and device, and the texts are a CPU's. Not with a real one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import Speculator, load
from runtime.bench.random_models import write_shape
from runtime.engine.beam import beam_search
from runtime.kernels import dispatch
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.drafters.by_name import drafter_by_name
from tests.conftest import write_medusa
from tests.pretended_gpu import NAME, OnDevice, pretended_gpu
from tests.runtime.model.families import write
from tests.slices import often

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real CUDA device says more")
PAIR = Path(__file__).parents[4] / "examples" / "pair"
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 5, 6]]
WARM = Sampling(0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=3)


def texts(
    device: str,
    path: Path,
    drafter: str,
    kv: Any,
    sampling: Sampling,
    verify: str,
    adapter: bool,
    draft: Path | None = None,
) -> Any:
    options: dict[str, Any] = {"device": device, "kernels": "plain-torch"}
    model = load(path, planes=drafter == "nested", adapter=adapter, **options)
    draft = PAIR / "draft" if drafter in ("model", "tree") else draft
    made = drafter_by_name(model, drafter, draft, None, verify, options).drafter
    speculator = Speculator(model, made, 2, verify, False, CacheOptions(kv))  # type: ignore[arg-type]
    return [one.tokens for one in speculator.generate(PROMPTS, max_new_tokens=5, stop=(), sampling=sampling)]


def slow(*values: Any) -> Any:
    """Cases of which others are near enough: the interpreter takes half a minute for one."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("drafter", "kv", "sampling", "verify", "adapter"),
    [
        slow("lookup", "auto", Sampling(), "coupled", False),
        slow("model", "int8", Sampling(), "coupled", False),
        ("tree", "int4", Sampling(), "coupled", False),
        ("model", "auto", WARM, "coupled", False),
        slow("model", "auto", WARM, "rejection", False),
        ("model", "auto", WARM, "rejection", True),
    ],
)
def test_speculation(
    drafter: str, kv: str, sampling: Sampling, verify: str, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = texts("cpu", PAIR / "target", drafter, kv, sampling, verify, adapter)
    with pretended_gpu(monkeypatch):
        assert texts("cuda", PAIR / "target", drafter, kv, sampling, verify, adapter) == wanted


@pytest.mark.parametrize(("scheme", "drafter"), [slow("int8", "nested"), ("int4", "lookup"), slow("nf4", "suffix")])
def test_packed_weights(scheme: str, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_shape("pair", scheme, tmp_path / scheme)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(PAIR / "target" / name, model / name)
    wanted = texts("cpu", model, drafter, "auto", Sampling(), "coupled", False)
    with pretended_gpu(monkeypatch):
        assert texts("cuda", model, drafter, "auto", Sampling(), "coupled", False) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("sampling", "verify"), [(Sampling(), "coupled"), (WARM, "coupled"), (WARM, "rejection")])
def test_medusa(sampling: Sampling, verify: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = write_medusa(PAIR / "target", tmp_path / "medusa", scale=0.02)
    wanted = texts("cpu", PAIR / "target", "medusa", "auto", sampling, verify, False, heads)
    with pretended_gpu(monkeypatch):
        assert texts("cuda", PAIR / "target", "medusa", "auto", sampling, verify, False, heads) == wanted


@pytest.mark.parametrize("kind", often(["gemma2", "gpt_oss", "deepseek_v2", "deepseek_v3", "lfm2", "lfm2_moe"], "lfm2"))
def test_families(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that differs most, and layers with a state."""
    path = write(kind, tmp_path / kind)
    wanted = texts("cpu", path, "lookup", "auto", Sampling(), "coupled", False)
    with pretended_gpu(monkeypatch):
        assert texts("cuda", path, "lookup", "auto", Sampling(), "coupled", False) == wanted


@pytest.mark.slow
def test_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(device: str) -> list[list[int]]:
        model = load(PAIR / "draft", device=device, kernels="reference")
        return [list(beam.tokens) for beam in beam_search(model, [5, 6, 7], 2, 4)]

    wanted = found("cpu")
    with pretended_gpu(monkeypatch):
        assert found("cuda") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nf4", "kv-int8"])
def test_the_compressor_measures_on_it(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole job but the baselines, whose child process would find no such device; timed for as short as can be."""
    from compress import Recipe, compress
    from compress.report import baselines, speed, timing

    row = baselines._row("transformers, eager", "no such device in another process")
    monkeypatch.setattr(baselines, "run", lambda *_: [row])
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(speed, "COST_SECONDS", 0.0)
    plain = [dispatch.Kernel("plain-torch", True, "plain torch", exact=True)]
    usual = dispatch.available

    def found_here(*given: Any) -> list[dispatch.Kernel]:
        return plain + [one for one in usual(*given) if one.name == "reference"]

    monkeypatch.setattr(dispatch, "available", found_here)
    with pretended_gpu(monkeypatch):
        found = compress(
            str(PAIR / "draft"), Recipe.load(recipe), out=str(tmp_path / "run"), device="cuda", samples=2,
            eval_tokens=600, new_tokens=4, seq_len=64,
        )  # fmt: skip
    report = found.report
    assert report["machine"]["device"] == NAME and report["size"]["peak_memory_bytes"] == 1 << 20
    assert report["quality"]["perplexity"]["compressed"] > 1 and report["lossless"]["mismatches"] == 0
    assert report["speed"]["speculative"]["tokens_per_second"] > 0


def test_it_refuses_what_cuda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch), torch.inference_mode():
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert isinstance(there, OnDevice) and there.device.type == "cuda" and there.cpu().device.type == "cpu"
        assert (there * torch.tensor(2.0)).cpu().tolist() == [2, 2, 2] and there[torch.tensor([0, 1])].shape == (2,)
        for mixed in (
            lambda: there + here,
            lambda: here[there.long()],
            lambda: there.numpy(),
            lambda: here.add_(there),
        ):
            with pytest.raises((RuntimeError, TypeError)):
                mixed()
        with pytest.raises(RuntimeError, match="CUDA refuses"):
            torch._int_mm(there.to(torch.int8).view(1, 3), there.to(torch.int8).view(3, 1))
        with pytest.raises(RuntimeError, match="a CPU's generator"):
            there.uniform_(generator=torch.Generator())
