"""Random models of real architectures: their sizes, their formats, and that they run."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import load
from runtime.bench.random_models import (
    HEADS,
    MARK,
    SCHEMES,
    model_config,
    random_weight,
    write_shape,
)
from runtime.bench.shapes import SHAPES
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight

Written = Callable[..., Path]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """written(scheme, head) is the pair's shape in that scheme."""
    made: dict[tuple[str, str], Path] = {}

    def get(scheme: str, head: str = "int8") -> Path:
        if (scheme, head) not in made:
            made[scheme, head] = write_shape(
                "pair", scheme, tmp_path_factory.mktemp("shape") / f"{scheme}-{head}", head=head
            )
        return made[scheme, head]

    return get


def logits(path: Path, kernels: str = "auto") -> torch.Tensor:
    decoder = load(path, kernels=kernels).decoder
    cache = decoder.new_cache()
    rows = Rows.chains([(cache.open(24), 0, 24)])  # type: ignore[attr-defined]
    return decoder.forward(tokens(decoder.vocab_size), rows, cache).logits


def tokens(vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (24,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("tinyllama-1.1b", 1_100_048_384),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-4b", 4_022_468_096),
        ("gemma-3-4b", 3_880_263_168),
        ("qwen3.5-4b", 4_205_751_296),
        ("gpt-oss-20b", 20_914_757_184),
        ("glm-4-9b", 9_400_279_040),
        ("granite-3.3-2b", 2_533_539_840),
        ("olmo-3-7b", 7_298_011_136),
        ("smollm3-3b", 3_075_098_624),
        ("ministral-3-8b", 8_489_553_920),
        ("lfm2-1.2b", 1_170_340_608),
        ("deepseek-v2-lite", 15_706_484_224),
        ("olmoe-1b-7b", 6_919_161_856),
        ("qwen2-57b-a14b", 57_408_658_944),
    ],
)
def test_the_shapes_have_as_many_parameters_as_the_published_models(shape: str, parameters: int) -> None:
    about = SHAPES[shape]
    left_out = "lm_head.weight" if about.architecture.tied else ""
    assert sum(prod(size) for name, size in about.tensors.items() if name != left_out) == parameters


@pytest.mark.parametrize(("shape", "least"), [("lfm2-1.2b", 3), ("qwen3.5-4b", 4)])
def test_first_layers_without_attention_are_refused(shape: str, least: int) -> None:
    assert SHAPES[shape].first(least).architecture.layers == least
    message = f"--layers: the first {least - 1} of {shape} have no attention; take {least} or more"
    with pytest.raises(UserError, match=message):
        SHAPES[shape].first(least - 1)


def test_the_pair_is_that_of_the_examples() -> None:
    theirs = json.loads((ROOT / "examples" / "pair" / "target" / "config.json").read_text())
    ours = SHAPES["pair"].config
    assert {key: theirs[key] for key in ours} == ours


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_loads_and_gives_finite_and_varied_logits(written: Written, scheme: str, head: str) -> None:
    path = written(scheme, head)
    config = json.loads((path / "config.json").read_text())
    assert config[MARK] is True and config == model_config("pair", scheme, head)
    assert config["tie_word_embeddings"] is (head == "keep")
    checkpoint = open_checkpoint(path)
    layer = checkpoint.weight("model.layers.3.mlp.down_proj")
    if isinstance(layer, PackedWeight):
        assert layer.scheme.kind in (scheme, scheme.partition("-")[0])
    else:
        assert layer.dtype == {"f32": torch.float32, "bf16": torch.bfloat16}[scheme]
    assert checkpoint.tied is (head == "keep")
    if head == "int8":
        packed = checkpoint.weight("lm_head")
        assert isinstance(packed, PackedWeight) and packed.scheme.kind == "int8"
    found = logits(path)
    assert torch.isfinite(found).all()
    # A row's logits vary by about 1, and from one row to the next by about as much.
    assert found.std(dim=1).min() > 0.5 and found.std(dim=1).max() < 2
    assert (found[1:] - found[:-1]).std() > 0.3 and len(found.argmax(dim=1).unique()) > 3


@pytest.mark.parametrize("scheme", ["nf4", "ternary", "ternary-1.25", "trellis-3"])
def test_an_int8_head_is_read_beside_layers_of_another_library(written: Written, scheme: str, tmp_path: Path) -> None:
    head, same = (open_checkpoint(written(name)).weight("lm_head") for name in (scheme, "int8"))
    assert isinstance(head, PackedWeight) and isinstance(same, PackedWeight)
    assert torch.equal(head.codes, same.codes) and torch.equal(head.scale, same.scale)
    tensors = dict(open_checkpoint(written(scheme)).shards)
    del tensors["lm_head.weight_scale"]
    (tmp_path / "m").mkdir()
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text((written(scheme) / "config.json").read_text())
    with pytest.raises(UserError, match=r"tensor lm_head.weight holds int8"):
        open_checkpoint(tmp_path / "m").weight("lm_head")


def test_a_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    def content(name: str, **options: Any) -> list[bytes]:
        path = write_shape("pair", "nf4", tmp_path / name, **options)
        return [file.read_bytes() for file in sorted(path.iterdir())]

    first = content("a")
    assert first == content("b") and first != content("c", seed=1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_random_weight_keeps_the_size_of_what_goes_in(scheme: str) -> None:
    weight = random_weight(scheme, 384, 512, torch.Generator().manual_seed(5))
    dense = dequantize(weight) if isinstance(weight, PackedWeight) else weight.float()
    assert dense.std() * 512**0.5 == pytest.approx(1, abs=0.06)
    assert abs(float(dense.mean())) * 512**0.5 < 0.05


def test_groups_divide_the_inputs() -> None:
    with pytest.raises(ValueError, match="groups of 128 do not divide rows of 88 inputs"):
        random_weight("int4", 8, 88, torch.Generator())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("scheme", ["bf16", "int8", "int4"])
def test_transformers_reads_it_too(written: Written, scheme: str, head: str) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoConfig, AutoModelForCausalLM

    path = written(scheme, head)
    config = AutoConfig.from_pretrained(path)
    assert getattr(config, MARK) is True and config.num_hidden_layers == 4
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(tokens(config.vocab_size)[None]).logits[0].float()
    ours = logits(path, "plain-torch")
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=1).min() > 0.99


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "llama-9"}, "shape 'llama-9' is unknown; use one of tinyllama-1.1b, "),
        ({"scheme": "int3"}, "scheme 'int3' is unknown; use one of f32, bf16, "),
        ({"head": "int4"}, "head 'int4' is unknown; use one of int8, keep"),
    ],
)
def test_what_is_not_offered_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_shape(**{"shape": "pair", "scheme": "int8", "out": tmp_path / "m"} | arguments)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced_and_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(UserError, match=r"m cannot be written .*No space left on device"):
            write_shape("pair", "int8", tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="does not exist; make it first"):
        write_shape("pair", "int8", tmp_path / "no" / "m")
    path = write_shape("pair", "int8", tmp_path / "m")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match="exists already"):
        write_shape("pair", "int8", path)


@pytest.mark.parametrize("shape", ["gpt-oss-20b", "deepseek-v2-lite", "qwen3.5-4b"])
def test_the_first_layers_of_any_family(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture in mxfp4, latent attention, gated delta rules: at sizes that a test can hold."""
    about = SHAPES[shape]
    small = dict(about.config) | {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 5}
    small |= {key: value[:5] for key, value in small.items() if key == "layer_types"}
    small |= {key: 8 for key in ("num_local_experts", "n_routed_experts") if key in small}
    small |= {"intermediate_size": 192, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    tiny = {**SHAPES, shape: replace(about, config=small)}
    monkeypatch.setattr("runtime.bench.random_models.SHAPES", tiny)
    path = write_shape(shape, "int4", tmp_path / "m", layers=4)
    decoder = load(path).decoder
    assert decoder.architecture.layers == 4  # type: ignore[attr-defined]
    cache, ids = decoder.new_cache(), torch.arange(100, 124)
    found = decoder.forward(ids, Rows.chains([(cache.open(24), 0, 24)]), cache).logits  # type: ignore[attr-defined]
    assert torch.isfinite(found).all() and 0.5 < found.std() < 2 and (found[1:] - found[:-1]).std() > 0.3
    with pytest.raises(UserError, match=f"--layers: {shape} has 5, found 6"):
        write_shape(shape, "int4", tmp_path / "n", layers=6)
