"""The nested drafter: lossless, coarser than its target, and without a byte of weights of its own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import Model, Speculator, formats, load
from runtime.checkpoints.architecture import configuration, describe
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import Decoder, Rows
from runtime.engine.metrics import total
from runtime.errors import UserError
from runtime.formats import int8
from runtime.kernels.dispatch import Kernel
from runtime.model.build import build
from runtime.model.layers import linears, weight_bytes
from runtime.model.native import NativeDecoder
from runtime.sampling.params import Sampling
from runtime.speculative.drafters.nested import NestedDrafter

Tiny = Callable[..., Path]
TinyPacked = Callable[[str], Path]
Text = Callable[..., Tensor]
Whole = Callable[..., Tensor]

PROMPTS = ["def f(x):", "import os", "a", "class Tree:\n    def"]


@pytest.fixture(scope="module")
def target(tiny_packed: TinyPacked, kernels: str) -> Model:
    return load(tiny_packed("int8"), kernels=kernels, planes=True)


@pytest.fixture(scope="module")
def plain(tiny_packed: TinyPacked, kernels: str) -> Model:
    return load(tiny_packed("int8"), kernels=kernels)


@pytest.fixture(scope="module")
def int8_head(tiny_packed: TinyPacked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny int8 model with an int8 head of its own."""
    folder = tmp_path_factory.mktemp("head") / "model"
    shutil.copytree(tiny_packed("int8"), folder)
    tensors = load_file(folder / "model.safetensors")
    head = int8.pack(tensors["model.embed_tokens.weight"])
    save_file(
        tensors | int8.to_tensors(head, "lm_head", torch.float32),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    config["quantization_config"]["ignore"] = []
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def upper(model: Model) -> Any:
    """The view that the drafter runs on."""
    return model.decoder.upper()  # type: ignore[attr-defined]


def at_width(made: Decoder, tokens: Tensor, width: int) -> Tensor:
    cache = made.new_cache()
    request, done, out = cache.open(len(tokens)), 0, []
    for piece in tokens.split(width):
        out.append(made.forward(piece, Rows.chains([(request, done, len(piece))]), cache).logits)
        done += len(piece)
    return torch.cat(out)


# The target and its view.


def test_planes_change_no_bit_of_the_target(target: Model, plain: Model, text: Text, whole: Whole) -> None:
    assert torch.equal(whole(target.decoder, text(90)), whole(plain.decoder, text(90)))


def test_the_view_is_the_target_of_coarser_codes(
    target: Model, tiny_packed: TinyPacked, kernels: str, text: Text, whole: Whole, tmp_path: Path
) -> None:
    """The same bits as a model on disk whose int8 codes are the middles of their upper nibbles."""
    shutil.copytree(tiny_packed("int8"), tmp_path / "coarse")
    file = tmp_path / "coarse" / "model.safetensors"
    coarse = {
        name: torch.floor(tensor / 16).mul(16).add(8).to(torch.int8) if tensor.dtype == torch.int8 else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(coarse, file, metadata={"format": "pt"})
    logits = whole(upper(target), text(90))
    assert torch.equal(logits, whole(load(tmp_path / "coarse", kernels=kernels).decoder, text(90)))
    assert not torch.equal(logits, whole(target.decoder, text(90)))


def test_bits_of_the_view_at_every_width(native_path: str, int8_head: Path, text: Text) -> None:
    one, two = (upper(load(int8_head, kernels=native_path, planes=True, threads=n)) for n in (1, 2))
    tokens = text(70)
    want = at_width(one, tokens, 70)
    for width in range(1, 17):
        assert torch.equal(at_width(one, tokens, width), want), f"width {width}"
    assert torch.equal(at_width(two, tokens, 9), want)


def test_the_view_holds_no_weights_of_its_own(target: Model, int8_head: Path, kernels: str) -> None:
    for model in (target, load(int8_head, kernels=kernels, planes=True)):
        view = upper(model)
        alone = weight_bytes(model.decoder.parts)  # type: ignore[attr-defined]
        assert alone == model.decoder.weight_bytes == view.weight_bytes > 0  # type: ignore[attr-defined]
        assert weight_bytes(model.decoder.parts, view.parts) == alone  # type: ignore[attr-defined]
        # A second copy of the same model does count.
        other = load(model.path, kernels=kernels, planes=True).decoder
        assert weight_bytes(model.decoder.parts, other.parts) > 1.5 * alone  # type: ignore[attr-defined]


def test_an_int8_head_is_drafted_with_by_its_upper_plane(native_path: str, int8_head: Path) -> None:
    model = load(int8_head, kernels=native_path, planes=True)
    assert isinstance(model.decoder, NativeDecoder)
    whole, half = (list(linears(parts)) for parts in (model.decoder.parts, upper(model).parts))
    assert len(whole) == len(half) == 2 * 7 + 1
    for layer, other in zip(whole, half, strict=True):
        n, k = layer.weight.shape  # type: ignore[attr-defined]
        assert layer.nbytes - other.nbytes == n * k // 2  # type: ignore[attr-defined]


def test_mixtures_and_float_layers(tiny: Tiny, tmp_path: Path, kernels: str, text: Text, whole: Whole) -> None:
    """Experts in int8 words have planes; the router, kept in floats, stays whole in the view."""
    shutil.copytree(tiny("mixtral"), tmp_path / "m")
    written, schemes = {}, {}
    for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items():
        if ".experts." in name:
            prefix, packed = name.removesuffix(".weight"), int8.pack(tensor)
            written |= int8.to_tensors(packed, prefix, torch.float32)
            schemes[prefix] = packed.scheme
        else:
            written[name] = tensor
    save_file(written, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] = formats.hf_config(schemes, ["lm_head"])
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    model = load(tmp_path / "m", kernels=kernels, planes=True)
    view = upper(model)
    changed = [a is not b for a, b in zip(linears(model.decoder.parts), linears(view.parts), strict=True)]  # type: ignore[attr-defined]
    assert sum(changed) == len(schemes) if kernels != "plain-torch" else 0 < sum(changed) < len(changed)
    assert weight_bytes(model.decoder.parts, view.parts) == view.weight_bytes  # type: ignore[attr-defined]
    assert torch.equal(whole(model.decoder, text(40)), whole(load(tmp_path / "m", kernels=kernels).decoder, text(40)))
    assert not torch.equal(whole(view, text(40)), whole(model.decoder, text(40)))


# The drafter.


@pytest.mark.parametrize("gamma", [1, 5])
def test_greedy_output_is_plain_decoding_s(target: Model, plain: Model, gamma: int) -> None:
    expected = Speculator(plain).generate(PROMPTS, max_new_tokens=40)
    drafter = NestedDrafter(target)
    drafted = Speculator(target, drafter, draft_length=gamma).generate(PROMPTS, max_new_tokens=40)
    assert drafter.name == "nested"
    assert [r.tokens for r in drafted] == [r.tokens for r in expected]
    # Random weights: of 320 tokens chance would accept one in hundreds.
    assert (total([r.metrics for r in drafted]).acceptance_rate or 0) > 0.2


def test_coupled_sampling_gives_a_seed_s_text(target: Model, plain: Model) -> None:
    samplings = [Sampling(temperature=0.9, top_p=0.95, seed=seed) for seed in range(4)]
    expected = Speculator(plain).generate(PROMPTS, max_new_tokens=30, sampling=samplings)
    speculator = Speculator(target, NestedDrafter(target), draft_length=3)
    drafted = speculator.generate(PROMPTS, max_new_tokens=30, sampling=samplings)
    assert [r.tokens for r in drafted] == [r.tokens for r in expected]
    assert (total([r.metrics for r in drafted]).acceptance_rate or 0) > 0.2
    other = Speculator(plain).generate(PROMPTS, max_new_tokens=30, sampling=Sampling(temperature=0.9, seed=99))
    assert all(a.tokens != b.tokens for a, b in zip(drafted, other, strict=True))


def test_rejection_gets_the_draft_s_own_distributions(target: Model) -> None:
    drafter = NestedDrafter(target, "rejection")
    drawn = Speculator(target, drafter, draft_length=3, verify="rejection").generate(
        PROMPTS, max_new_tokens=20, temperature=1.0, seed=1
    )
    measured = total([r.metrics for r in drawn])
    assert measured.drafted > 0 and (measured.acceptance_rate or 0) > 0.2


# Refusals.


def test_a_target_without_planes_is_refused(plain: Model, target: Model) -> None:
    with pytest.raises(UserError, match="load it with planes=True"):
        NestedDrafter(plain)
    assert NestedDrafter(target).name == "nested"


@pytest.mark.parametrize("scheme", ["int4", "nf4", "ternary", ""])
def test_a_model_without_int8_layers_is_refused(tiny: Tiny, tiny_packed: TinyPacked, kernels: str, scheme: str) -> None:
    path = tiny_packed(scheme) if scheme else tiny("llama")
    assert load(path, kernels=kernels).decoder.exact
    with pytest.raises(UserError, match="has no int8 layers; compress it to int8"):
        load(path, kernels=kernels, planes=True)


def test_int8_groups_are_refused(tiny_packed: TinyPacked, tmp_path: Path, kernels: str) -> None:
    shutil.copytree(tiny_packed("int8"), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    tensors[name] = tensors[name].expand(-1, 4).contiguous()
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path / "m", kernels=kernels)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj has int8 groups of 16 inputs"):
        load(tmp_path / "m", kernels=kernels, planes=True)


def test_a_library_s_kernels_are_refused(tiny_packed: TinyPacked) -> None:
    checkpoint = open_checkpoint(tiny_packed("int8"))
    architecture = describe(checkpoint.config)
    assert architecture is not None
    kernel = Kernel("bitsandbytes", True, "", exact=False)
    with pytest.raises(UserError, match="planes need Specpress' own kernels, found 'bitsandbytes'"):
        build(checkpoint, architecture, configuration(checkpoint), kernel, torch.device("cpu"), planes=True)


def test_a_model_that_transformers_runs_is_refused(tiny: Tiny) -> None:
    with pytest.raises(UserError, match="transformers runs this model"):
        load(tiny("gpt2"), planes=True)
    with pytest.raises(UserError, match="transformers run this target"):
        NestedDrafter(load(tiny("gpt2")))
