"""Logits and drafts are those of SpecForge's, z-lab's and DeepSpec's own classes, where their sources can be imported.

None of them is a package of an index: put a checkout on PYTHONPATH.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import Model, load
from runtime.speculative.drafters import published
from tests.runtime.speculative.heads.drafts import HIDDEN, LENGTH, VOCAB, block, drafted, filled, text_and_states

Tiny = Callable[..., Path]
CACHED = {"past_key_values": None, "use_cache": False}


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Model:
    return load(tiny("llama", num_hidden_layers=6), kernels="reference")


def saved(model: Any, folder: Path, seed: int) -> Any:
    model = filled(model, seed)
    model.save_pretrained(folder)
    return model


def table_of(target: Model) -> Tensor:
    return target.decoder.parts.embedding  # type: ignore[attr-defined,no-any-return]


def logits_of_block(model: Any, target: Model, tokens: list[int], taken: Tensor, name: str, size: int) -> Tensor:
    """The last hidden states (1, size, hidden) of a block behind what the target read."""
    run = getattr(model, "_forward_backbone", model)
    table = model.embed_tokens.weight if hasattr(model, "embed_tokens") else table_of(target)
    rows = table[[tokens[-1], *[7] * (size - 1)]][None]
    at = torch.arange(LENGTH - 1 + size)[None]
    with torch.no_grad():
        return run(position_ids=at, noise_embedding=rows, is_causal=False, **{name: taken[None]}, **CACHED)  # type: ignore[no-any-return]


def require_equal(found: Tensor, logits: list[Tensor], tokens: list[int]) -> None:
    assert len(found) == len(logits) == len(tokens)
    for theirs, ours in zip(found, logits, strict=True):
        assert torch.allclose(theirs, ours[0], atol=1e-4)


@pytest.mark.parametrize("writer", ["dflash.model", "specforge.modeling.draft.dflash"])
def test_dflash(target: Model, tmp_path: Path, writer: str) -> None:
    module = pytest.importorskip(writer)
    config = block("qwen3", 2, num_target_layers=6, block_size=6)
    config.dflash_config = {"mask_token_id": 7, "target_layer_ids": [0, 5]}
    model = saved(module.DFlashDraftModel(config), tmp_path / "head", 1)
    tokens, taken = text_and_states(2)
    draft, logits, _ = drafted(target, tmp_path / "head", "dflash", tokens, taken, 9)
    hidden = logits_of_block(model, target, tokens, taken, "target_hidden", 6)
    require_equal((hidden[0] @ table_of(target).T)[1:], logits, draft)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("writer", ["DeepSpec", "SpecForge"])
def test_dspark(target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, head: str) -> None:
    monkeypatch.setattr(published, "WORTH", 0.0)
    about = {"mask_token_id": 7, "target_layer_ids": [0, 5], "markov_rank": 12, "markov_head_type": head}
    about |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    config = block("qwen3", 2, num_target_layers=6, block_size=5)
    if writer == "DeepSpec":
        made = pytest.importorskip("deepspec.modeling.dspark.qwen3.modeling").Qwen3DSparkModel
        for key, value in {**about, "num_anchors": 1}.items():
            setattr(config, key, value)
    else:
        made = pytest.importorskip("specforge.modeling.draft.dspark").DSparkDraftModel
        config.dflash_config = about
    model = saved(made(config), tmp_path / "head", 2)
    tokens, taken = text_and_states(2)
    draft, logits, _ = drafted(target, tmp_path / "head", "dspark", tokens, taken, 9)
    name = "target_hidden_states" if writer == "DeepSpec" else "target_hidden"
    hidden = logits_of_block(model, target, tokens, taken, name, 5)
    lm_head = model.lm_head.weight if writer == "DeepSpec" else table_of(target)
    with torch.no_grad():
        theirs, found = model.markov_head.sample_block_tokens(
            hidden @ lm_head.T, first_prev_token_ids=torch.tensor([tokens[-1]]), hidden_states=hidden
        )
    assert theirs[0].tolist() == draft
    require_equal(found[0], logits, draft)


def test_dflash_of_deepspec_is_dspark_without_its_heads(target: Model, tmp_path: Path) -> None:
    made = pytest.importorskip("deepspec.modeling.dspark.qwen3.modeling").Qwen3DSparkModel
    config = block("qwen3", 1, num_target_layers=6, block_size=5)
    about = {"mask_token_id": 7, "target_layer_ids": [-1, 5], "markov_rank": 0, "num_anchors": 1}
    for key, value in {**about, "enable_confidence_head": False}.items():
        setattr(config, key, value)
    model = saved(made(config), tmp_path / "head", 3)
    tokens, taken = text_and_states(2)
    draft, logits, _ = drafted(target, tmp_path / "head", "dflash", tokens, taken, 9)
    hidden = logits_of_block(model, target, tokens, taken, "target_hidden_states", 5)
    require_equal(hidden[0] @ model.lm_head.weight.T, logits, draft)


def test_eagle3_of_deepspec(target: Model, tmp_path: Path) -> None:
    from transformers import DynamicCache

    made = pytest.importorskip("deepspec.modeling.eagle3.qwen3.modeling").Qwen3Eagle3Model
    config = block("qwen3", 1, num_target_layers=6)
    config.target_layer_ids, config.ttt_length, config.step_loss_decay = [0, 2, 4, 5], 4, 0.8
    model = saved(made(config), tmp_path / "head", 4)
    tokens, taken = text_and_states(4)
    draft, logits, _ = drafted(target, tmp_path / "head", "eagle3", tokens, taken, 4)
    cache, found = DynamicCache(), []
    at = torch.arange(LENGTH + 8)[None]
    with torch.no_grad():
        # Row by row: its own cache takes no mask for several rows at once.
        for i in range(LENGTH - 1):
            row, token = taken[None, i : i + 1], torch.tensor([[tokens[i + 1]]])
            hidden = model.extend_draft_cache(row, token, at[:, i : i + 1], cache)
        for step in range(4):
            found.append(model.compute_logits(hidden)[0])
            token, place = found[-1].argmax(-1)[None], at[:, LENGTH - 1 + step : LENGTH + step]
            hidden = model(
                hidden_states=hidden, input_ids=token, position_ids=place, past_key_values=cache, use_cache=True
            )
    require_equal(torch.cat(found), logits, draft)


@pytest.mark.parametrize("normed", [False, True])
def test_eagle3_of_specforge(target: Model, tmp_path: Path, normed: bool) -> None:
    module = pytest.importorskip("specforge.modeling.draft.llama3_eagle")
    config = block("llama", 1, draft_vocab_size=64, fc_norm=normed, pretraining_tp=1)
    # Layers behind which, as SGLang counts them: 1, 3 and 6 of the target's.
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    config.rope_theta, config.rope_scaling = 10000.0, None
    model = saved(module.LlamaForCausalLMEagle3(config), tmp_path / "head", 5)
    tokens, taken = text_and_states(3)
    draft, logits, _ = drafted(target, tmp_path / "head", "eagle3", tokens, taken, 3)
    hidden, ids, found = model.project_hidden_states(taken[None]), tokens[1:], []
    with torch.no_grad():
        for step in range(3):
            shape = (1, len(ids))
            mask = module.prepare_decoder_attention_mask(torch.ones(shape, dtype=torch.bool), shape, hidden, 0)
            at = torch.arange(len(ids))[None]
            out = model.backbone(model.embed_tokens(torch.tensor([ids])), hidden, None, mask, at)
            found.append(model.compute_logits(out)[0, -1:])
            hidden, ids = torch.cat((hidden, out[:, -1:]), dim=1), [*ids, draft[step]]
    require_equal(torch.cat(found), logits, draft)
    assert draft == [5 * int(row.argmax()) for row in found] and VOCAB == 320 and HIDDEN == 64


def test_peagle_of_specforge(target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("specforge.modeling.draft.peagle")

    def attention(query: Tensor, key: Tensor, value: Tensor, block_mask: Tensor, **_: Any) -> Tensor:
        # Theirs is compiled for a GPU; this one takes a dense mask.
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, block_mask, enable_gqa=True)
        return found

    monkeypatch.setattr(module, "compile_friendly_flex_attention", attention)
    config = block("llama", 2, draft_vocab_size=64, pretraining_tp=1)
    config.mask_token_id, config.rope_theta, config.rope_scaling = 7, 10000.0, None
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    model = saved(module.PEagleDraftModel(config), tmp_path / "head", 6)
    tokens, taken = text_and_states(3)
    draft, logits, _ = drafted(target, tmp_path / "head", "peagle", tokens, taken, 4)
    ids = torch.tensor([[*tokens[1:], 7, 7, 7]])
    states = torch.cat((taken[None], model.mask_hidden.expand(1, 3, -1)), dim=1)
    mask = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
    with torch.no_grad():
        hidden = model.project_hidden_states(states)
        at = torch.arange(ids.shape[1])[None]
        found = model.compute_logits(model.backbone(model.embed_tokens(ids), hidden, None, mask, at))[0, -4:]
    require_equal(found, logits, draft)
