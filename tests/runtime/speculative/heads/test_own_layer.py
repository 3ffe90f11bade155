"""A model's own layer for multi-token prediction: logits are those of transformers' block of its kind, drafts change no
text."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm

from runtime import Model, Speculator, load
from runtime.errors import UserError
from runtime.models.tiny import tiny_model
from runtime.sampling.params import Sampling
from runtime.speculative.draft import Request, TakenStates
from runtime.speculative.drafters.by_name import make
from runtime.speculative.drafters.published import PublishedDrafter
from tests.conftest import byte_tokenizer

QWEN = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1},
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
}
# As DeepSeek and as Qwen call what stands around the block: join, norms of token and state, last norm.
NAMES = ("model.layers.2.", "", "eh_proj", "enorm", "hnorm", "shared_head.norm")
QWEN_NAMES = ("mtp.", "layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def model_of_three(kind: str) -> Any:
    """transformers' model of three blocks, of which the last is to be the layer for multi-token prediction."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(tiny_model(kind).config)
    for key, value in {"num_hidden_layers": 3, "tie_word_embeddings": False, **KINDS[kind]}.items():
        setattr(config, key, value)
    if kind == "qwen2":
        config.layer_types = ["full_attention"] * 3
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        spread = 0.1 if parameter.ndim == 1 else 0.7 * parameter.shape[-1] ** -0.5
        parameter.data = torch.randn_like(parameter) * spread + (parameter.data if parameter.ndim == 1 else 0)
    return model


def write(model: Any, kind: str, folder: Path) -> dict[str, Tensor]:
    """The first two blocks as a model that brings the third as its layer; what stands around that."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    place, block, join, token, state, last = QWEN_NAMES if kind.startswith("qwen3") else NAMES
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(4)
    around = {join: torch.randn((hidden, 2 * hidden), generator=generator) * (2 * hidden) ** -0.5}
    unit = 0.0 if kind.startswith("qwen3") else 1.0
    around |= {name: unit + 0.2 * torch.randn(hidden, generator=generator) for name in (token, state, last)}
    tensors = load_file(folder / "model.safetensors")
    whole = {name.replace("model.layers.2.", f"{place}{block}"): tensor for name, tensor in tensors.items()}
    if not kind.startswith("qwen3"):
        whole[f"{place}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(whole | {f"{place}{name}.weight": one for name, one in around.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:2]
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "join": around[join],
        **{name: around[own] for name, own in (("token", token), ("state", state), ("last", last))},
    }


def chain(
    model: Any, kind: str, around: dict[str, Tensor], tokens: list[int], states: Tensor, steps: int
) -> list[Tensor]:
    """The logits (V,) of each step, by transformers' block over the whole text every time."""
    inner, eps, offset = model.model, model.config.rms_norm_eps, 1.0 if kind.startswith("qwen3") else 0.0

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], weight + offset, eps)

    hidden, tokens, found = normed(states, inner.norm.weight), tokens[1:], []
    for _ in range(steps):
        pair = normed(inner.embed_tokens(torch.tensor(tokens)), around["token"]), normed(hidden, around["state"])
        x, at = (torch.cat(pair, -1) @ around["join"].T)[None], torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        out = inner.layers[2](x, attention_mask=mask, position_ids=at, position_embeddings=inner.rotary_emb(x, at))
        last = (out[0] if isinstance(out, tuple) else out)[0, -1:]
        found.append((normed(last, around["last"]) @ model.lm_head.weight.T)[0])
        hidden = torch.cat((hidden, normed(last, around["last"]) if kind.startswith("qwen3") else last))
        tokens = [*tokens, int(found[-1].argmax())]
    return found


def open_target(folder: Path) -> Model:
    return load(folder, kernels="plain-torch")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_transformers_block(tmp_path: Path, kind: str) -> None:
    model = model_of_three(kind)
    around, target = write(model, kind, tmp_path / kind), open_target(tmp_path / kind)
    drafter = make(target, "mtp")
    assert isinstance(drafter, PublishedDrafter) and drafter.taps == (2,)
    generator, seen = torch.Generator().manual_seed(5), []
    tokens = torch.randint(0, model.config.vocab_size, (21,), generator=generator).tolist()
    states = torch.randn((20, model.config.hidden_size), generator=generator)
    choose = drafter._choose
    drafter._choose = lambda logits, drafts: (seen.append(logits), choose(logits, drafts))[1]  # type: ignore[assignment, func-returns-value]
    for start, end in ((0, 12), (12, 13), (13, 20)):
        one = Request(0, tokens[: end + 1], end + 1, Sampling(), 50)
        drafter.read([TakenStates(one, start, states[start:end])])
        seen.clear()
        draft = drafter.propose([one], [3])[0]
    expected = chain(model, kind, around, tokens, states, 3)
    assert draft.tokens == [int(row.argmax()) for row in expected]
    for ours, theirs in zip(seen, expected, strict=True):
        assert torch.allclose(ours[0], theirs, atol=1e-4)
    drafter.close(one)


@pytest.mark.parametrize("kind", ["qwen3_5_text", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_texts_are_those_of_plain_decoding(tmp_path: Path, kind: str) -> None:
    write(model_of_three(kind), kind, tmp_path / kind)
    target = load(tmp_path / kind)
    sampling = [Sampling(), Sampling(temperature=0.8, seed=1)]
    prompts = [[5, 6, 7, 8], [9]]
    expected = Speculator(target).generate(prompts, 12, sampling, stop=())
    found = Speculator(target, make(target, "mtp"), 3).generate(prompts, 12, sampling, stop=())
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert all(one.metrics.drafted > 5 for one in found)


def test_a_layer_that_is_not_there(tmp_path: Path) -> None:
    write(model_of_three("qwen2"), "qwen2", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name in ("eh_proj.weight", "mlp.up_proj.weight"):
        kept = {key: tensor for key, tensor in tensors.items() if key != f"model.layers.2.{name}"}
        save_file(kept, tmp_path / "model" / "model.safetensors")
        with pytest.raises(UserError, match=name.replace(".weight", "")):
            make(open_target(tmp_path / "model"), "mtp")
