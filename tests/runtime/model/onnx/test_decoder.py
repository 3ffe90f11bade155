"""ONNX Runtime sessions as decoders: the contract, speculation without mismatches, damaged files.

Needs onnx, onnxscript and onnxruntime (the extra `onnx`).
"""

import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import Speculator, load
from runtime.contract import Decoder, Rows, integers
from runtime.errors import UserError
from runtime.sampling.params import Sampling
from runtime.speculate import lossless_class
from runtime.speculative.drafters.lookup import LookupDrafter
from tests.compress.onnx_models import export
from tests.compress.packed_models import write_packed

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

Tiny = Callable[..., Path]
PROMPTS = [[5, 17, 200, 9], [7, 7, 31, 250, 40, 3, 7, 31], [299]]


@pytest.fixture(scope="module")
def folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("onnx") / "target"
    export("llama", tiny("llama"), out, one_file=10_000)
    shutil.copy(tiny("llama") / "config.json", out)
    for path in tiny("llama").glob("tokenizer*"):
        shutil.copy(path, out)
    return out


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load(folder, threads=1).decoder


def run(decoder: Decoder, cache: Any, request: int, ids: list[int]) -> torch.Tensor:
    return decoder.forward(integers(ids), Rows.chains([(request, cache.length(request), len(ids))]), cache).logits


def test_any_cut_of_a_text_gives_the_same_logits_as_our_kernels(decoder: Decoder, tiny: Tiny) -> None:
    ids = torch.randint(1, 300, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    ours = load(tiny("llama"), kernels="reference").decoder
    cache = ours.new_cache()
    expected = run(ours, cache, cache.open(150), ids)
    for cuts in ((0, 150), (0, 1, 2, 9, 140, 149, 150), (0, 100, 101, 150)):
        held = decoder.new_cache()
        request = held.open(150)
        given = torch.cat([run(decoder, held, request, ids[a:b]) for a, b in itertools.pairwise(cuts)])
        assert float((given - expected).norm() / expected.norm()) < 1e-5
        assert held.length(request) == 150
    assert (decoder.vocab_size, decoder.hidden_size, decoder.max_positions) == (320, 64, 256)


def test_rows_that_are_asked_for_of_several_requests(decoder: Decoder) -> None:
    cache = decoder.new_cache()
    one, two = cache.open(9), cache.open(9)
    alone = [run(decoder, cache, r, ids) for r, ids in ((one, [5, 6, 7]), (two, [9, 8]))]
    cache.truncate(one, 0)
    cache.truncate(two, 0)
    rows = Rows.chains([(one, 0, 3), (two, 0, 2)])
    out = decoder.forward(integers([5, 6, 7, 9, 8]), rows, cache, integers([4, 1]))
    assert torch.equal(out.logits, torch.stack([alone[1][1], alone[0][1]]))
    assert out.hidden.shape == (2, 64)
    none = decoder.forward(integers([5]), Rows.chains([(one, 3, 1)]), cache, integers([]))
    assert none.logits.shape == (0, 320) and cache.length(one) == 4


def test_caches_go_back_and_fork(decoder: Decoder) -> None:
    cache = decoder.new_cache()
    first = cache.open(30)
    run(decoder, cache, first, [5, 6, 7])
    plain = run(decoder, cache, first, [8, 9])
    other = cache.fork(first)
    run(decoder, cache, first, [10, 11, 12, 13])
    cache.truncate(first, 3)
    assert torch.equal(run(decoder, cache, first, [8, 9]), plain)
    assert torch.equal(run(decoder, cache, first, [1, 2]), run(decoder, cache, other, [1, 2]))
    cache.keep(first, 3, [0, 1])
    assert cache.length(first) == 5
    with pytest.raises(ValueError, match="chains only"):
        cache.keep(first, 3, [1])
    with pytest.raises(ValueError, match="cannot truncate 5 tokens to 6"):
        cache.truncate(first, 6)
    cache.close(first)
    assert cache.open(1) == first
    assert cache.bytes_per_token() == 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("scheme", ["float", "int4", "int8"])
def test_speculation_changes_no_token(scheme: str, folder: Path, tiny: Tiny, tmp_path: Path) -> None:
    """Target and draft both on ONNX Runtime, greedy, alone and in a batch."""
    if scheme != "float":
        made = write_packed(tiny("llama"), tmp_path / "model", scheme)
        export("llama", made, tmp_path / "onnx")
        for path in folder.glob("*.json"):
            shutil.copy(path, tmp_path / "onnx")
    target, draft = load(folder if scheme == "float" else tmp_path / "onnx", threads=1), load(folder, threads=1)
    assert lossless_class(target, "coupled", Sampling()) == "measured"
    plain = Speculator(target).generate(PROMPTS, max_new_tokens=40, stop=())
    for drafter, length in ((draft, 1), (draft, 4), (draft, 9), (LookupDrafter(), 6)):
        results = [Speculator(target, drafter, length).generate([p], max_new_tokens=40, stop=())[0] for p in PROMPTS]
        results += Speculator(target, drafter, length).generate(PROMPTS, max_new_tokens=40, stop=())
        assert sum(a.tokens != b.tokens for a, b in zip(results, plain * 2, strict=True)) == 0
        assert sum(r.metrics.accepted for r in results) > 0


def test_the_last_position_can_be_used(tiny: Tiny, tmp_path: Path) -> None:
    """A table of positions has no row behind its last, which the row that is added would ask for."""
    source = tiny("gpt2", num_hidden_layers=1)
    export("gpt2", source, tmp_path / "out")
    shutil.copy(source / "config.json", tmp_path / "out")
    decoder = load(tmp_path / "out").decoder
    assert decoder.max_positions == 256
    cache = decoder.new_cache()
    request = cache.open(256)
    run(decoder, cache, request, [1 + i % 300 for i in range(255)])
    assert bool(run(decoder, cache, request, [7]).isfinite().all()) and cache.length(request) == 256


def test_what_the_graph_cannot_do_is_said(decoder: Decoder, folder: Path) -> None:
    cache = decoder.new_cache()
    request = cache.open(9)
    tree = Rows(integers([request] * 3), integers([0, 1, 1]), integers([-1, 0, 0]))
    with pytest.raises(UserError, match="takes chains of tokens and no trees"):
        decoder.forward(integers([1, 2, 3]), tree, cache)
    with pytest.raises(UserError, match="neither quantised nor paged"):
        decoder.new_cache("int8")
    with pytest.raises(UserError, match="runs on ONNX Runtime: leave out"):
        load(folder, kernels="reference")
    with pytest.raises(UserError, match="runs on ONNX Runtime: leave out"):
        load(folder, planes=True)


def test_a_graph_that_is_no_decoder_is_refused(folder: Path, tmp_path: Path) -> None:
    bad = _copy(folder, tmp_path)
    model = onnx.load_model(bad / "model.onnx", load_external_data=False)
    model.graph.output[0].name = "scores"
    for node in model.graph.node:
        for number, name in enumerate(node.output):
            if name == "logits":
                node.output[number] = "scores"
    (bad / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"a decoder with past_key_values.* was expected, and this graph lacks logits"):
        load(bad)


def test_missing_weights_and_packages_are_one_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = _copy(folder, tmp_path)
    (bad / "model.onnx.data").unlink()
    with pytest.raises(UserError, match=r"model.onnx: the file model.onnx.data is missing; fetch the model again"):
        load(bad)
    for package in ("onnxruntime", "onnx"):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, package, None)
            with pytest.raises(UserError, match=r"missing: pip install \"specpress\[onnx\]\""):
                load(folder)
    assert load(folder).decoder.vocab_size == 320


def test_cut_files_are_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "model.onnx").read_bytes()
    bad = _copy(folder, tmp_path)
    for tenth in range(10):
        (bad / "model.onnx").write_bytes(whole[: len(whole) * tenth // 10])
        with pytest.raises(UserError, match=r"target/model.onnx"):
            load(bad)
    (bad / "model.onnx").write_bytes(whole)
    data = (folder / "model.onnx.data").read_bytes()
    for tenth in range(10):
        (bad / "model.onnx.data").write_bytes(data[: len(data) * tenth // 10])
        with pytest.raises(UserError, match=r"asks for \d+ bytes, and the file has \d+"):
            load(bad)


@pytest.mark.parametrize("lie", ["shape", "offset", "outside", "absolute"])
def test_headers_that_lie_are_refused(lie: str, folder: Path, tmp_path: Path) -> None:
    bad = _copy(folder, tmp_path)
    model = onnx.load_model(bad / "model.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.external_data)
    about = {entry.key: entry for entry in tensor.external_data}
    if lie == "shape":
        tensor.dims[0] = 1 << 40
    elif lie == "offset":
        about["offset"].value = str(1 << 50)
    else:
        (tmp_path / "other").write_bytes(bytes(1 << 20))
        about["location"].value = "../other" if lie == "outside" else str(tmp_path / "other")
    (bad / "model.onnx").write_bytes(model.SerializeToString())
    expected = "leaves the directory" if lie in ("outside", "absolute") else "and the file has"
    with pytest.raises(UserError, match=expected):
        load(bad)


def _copy(folder: Path, where: Path) -> Path:
    out: Path = shutil.copytree(folder, where / "target")
    return out


def test_a_graph_that_fails_when_it_runs_is_one_sentence(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It loads, because sizes that depend on the text are known only then."""
    bad = _copy(folder, tmp_path)
    model = onnx.load_model(bad / "model.onnx", load_external_data=False)
    last = next(node for node in model.graph.node if "logits" in node.output)
    last.output[0] = "rows"
    model.graph.node.append(onnx.helper.make_node("Transpose", ["rows"], ["logits"], perm=[1, 0, 2]))
    (bad / "model.onnx").write_bytes(model.SerializeToString())
    cache = (damaged := load(bad, threads=1).decoder).new_cache()
    with pytest.raises(UserError, match=r"logits should have come out as \(1, 3, 320\), and is \(3, 1, 320\)"):
        run(damaged, cache, cache.open(9), [5, 6, 7])
    model.graph.node[-1].CopyFrom(onnx.helper.make_node("Reshape", ["rows", "five"], ["logits"]))
    model.graph.initializer.append(onnx.helper.make_tensor("five", onnx.TensorProto.INT64, [3], [1, 5, 320]))
    (bad / "model.onnx").write_bytes(model.SerializeToString())
    cache = (damaged := load(bad, threads=1).decoder).new_cache()
    capfd.readouterr()
    with pytest.raises(UserError, match="ONNX Runtime cannot run it") as error:
        run(damaged, cache, cache.open(9), [5, 6, 7])
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""
