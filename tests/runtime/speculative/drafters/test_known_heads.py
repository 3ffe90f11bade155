"""Heads that know what the target writes are always right: rows, states and tokens belong together."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm

from runtime import Model, Speculator, load
from runtime.speculative.drafters.by_name import drafter_by_name, make
from tests.runtime.speculative.heads.published import CONFIGS, HIDDEN, VOCAB, speculators, write_head

Tiny = Callable[..., Path]


def counting(folder: Path, tiny: Tiny) -> Model:
    """A target that writes the token after the last one: what its blocks add is zero, its output layer is shifted."""
    shutil.copytree(tiny("qwen2"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return load(folder)


def known(name: str, target: Model) -> dict[str, Tensor]:
    """What a head of random tensors needs in place of its own, to count as well."""
    table = load_file(target.path / "model.safetensors")["model.embed_tokens.weight"]
    unit = torch.eye(HIDDEN)
    if name == "mtp":
        return {"mtp_layers.0.input_proj.weight": torch.cat((unit, 0 * unit), 1)}
    if name == "dspark":
        unit_rows = rms_norm(table, (HIDDEN,))
        return {
            "markov_head.markov_w1.weight": unit_rows,
            "markov_head.markov_w2.weight": table.roll(1, 0),
            "lm_head.weight": torch.zeros(VOCAB, HIDDEN),
            "confidence_head.proj.bias": torch.full((1,), 50.0),
        }
    # From the embedding of the token before the last one, two further on.
    return {"fc.weight": unit, "lm_head.weight": table.roll(2, 0)}


@pytest.mark.parametrize(("name", "length"), [("mtp", 6), ("dspark", 5), ("eagle3", 1), ("peagle", 1)])
def test_a_head_that_knows_the_text_is_right(tmp_path: Path, tiny: Tiny, name: str, length: int) -> None:
    target = counting(tmp_path / "target", tiny)
    values = CONFIGS[name] | {"draft_vocab_size": VOCAB}
    if name in ("eagle3", "peagle"):
        values |= {"eagle_aux_hidden_state_layer_ids": [0]}
    folder = write_head(tmp_path / "head", values | {"markov_rank": HIDDEN}, own_tables=False)
    tensors = load_file(folder / "model.safetensors")
    for weight in (key for key in tensors if key.endswith(("o_proj.weight", "down_proj.weight"))):
        tensors[weight].zero_()
    tensors |= {
        key: torch.ones(HIDDEN)
        for key in tensors
        if key.endswith(("norm.weight", "layernorm.weight")) and "k_norm" not in key and "q_norm" not in key
    }
    save_file(tensors | known(name, target), folder / "model.safetensors")
    result = Speculator(target, make(target, [name], heads=folder), length).generate([[5, 6, 7], [40]], 30, stop=())
    for one in result:
        first = one.prompt_tokens[-1]
        assert one.tokens == [(first + 1 + i) % VOCAB for i in range(30)]
        assert one.metrics.accepted == one.metrics.drafted > 10


# How a model's own file begins the names of its layer for multi-token prediction, the block's and the others.
PLACES = {
    "qwen2": (
        "model.layers.2.",
        "",
        {
            "input_proj": "eh_proj",
            "hidden_layernorm": "hnorm",
            "token_layernorm": "enorm",
            "final_layernorm": "shared_head.norm",
        },
    ),
    "mimo": ("model.mtp_layers.0.", "", {}),
    "qwen3_5_text": (
        "mtp.",
        "layers.0.",
        {
            "input_proj": "fc",
            "hidden_layernorm": "pre_fc_norm_hidden",
            "token_layernorm": "pre_fc_norm_embedding",
            "final_layernorm": "norm",
        },
    ),
}
# Of Qwen 3.5's own that a Qwen 2 has no key for.
QWEN = {"model_type": "qwen3_5_text", "head_dim": 16, "layer_types": ["full_attention"] * 2, "rope_parameters": None}


@pytest.mark.parametrize("kind", PLACES)
def test_a_model_s_own_layer_drafts(tmp_path: Path, tiny: Tiny, kind: str) -> None:
    path = counting(tmp_path / "target", tiny).path
    config = json.loads((path / "config.json").read_text())
    own = config | (QWEN if kind == "qwen3_5_text" else {})
    folder = write_head(tmp_path / "head", speculators("mtp") | {"transformer_layer_config": own})
    (place, block, names), whole = PLACES[kind], load_file(path / "model.safetensors")
    for name, tensor in (load_file(folder / "model.safetensors") | known("mtp", load(path))).items():
        part, _, end = name.removeprefix("mtp_layers.0.").rpartition(".")
        if part.endswith(("o_proj", "down_proj")):
            tensor = torch.zeros_like(tensor)
        if part.endswith("layernorm"):
            # Qwen 3.5 holds norms less one.
            tensor = torch.full_like(tensor, 0.0 if kind == "qwen3_5_text" else 1.0)
        if kind == "mimo" and part == "input_proj":
            tensor = tensor.roll(HIDDEN, 1)
        whole[f"{place}{names.get(part, f'{block}{part}')}.{end}"] = tensor.contiguous()
    save_file(whole, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    target = load(path)
    if kind != "qwen2":
        # A file of this type, which only the head is read from.
        head = shutil.copytree(path, tmp_path / kind)
        said = {"model_type": "qwen3_5", "text_config": own} if kind == "qwen3_5_text" else {**own, "model_type": kind}
        (head / "config.json").write_text(json.dumps(said))
        drafter = drafter_by_name(target, "mtp", head)
        assert drafter.note == f" ({kind})"
    else:
        drafter = drafter_by_name(target, "mtp")
        assert drafter.note == " (the target's own layer)"
    one = Speculator(target, drafter.drafter, 4).generate([[5, 6, 7]], 20, stop=())[0]
    assert one.tokens == [8 + i for i in range(20)] and one.metrics.accepted == one.metrics.drafted > 10
