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
from runtime.errors import UserError
from runtime.speculative.drafters.by_name import drafter_by_name, make
from tests.runtime.speculative.heads.published import CONFIGS, HIDDEN, VOCAB, write_head

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
    result = Speculator(target, make(target, name, heads=folder), length).generate([[5, 6, 7], [40]], 30, stop=())
    for one in result:
        first = one.prompt_tokens[-1]
        assert one.tokens == [(first + 1 + i) % VOCAB for i in range(30)]
        assert one.metrics.accepted == one.metrics.drafted > 10


def test_a_model_s_own_layer_is_found(tmp_path: Path, tiny: Tiny) -> None:
    path = counting(tmp_path / "target", tiny).path
    tensors, unit = load_file(path / "model.safetensors"), torch.eye(HIDDEN)
    block = {
        name.replace("layers.1.", "layers.2."): one.clone() for name, one in tensors.items() if ".layers.1." in name
    }
    around = {f"model.layers.2.{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    around["model.layers.2.eh_proj.weight"] = torch.cat((unit, 0 * unit), 1)
    save_file(tensors | block | around, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="brings no multi-token prediction"):
        drafter_by_name(load(path), "mtp")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    target = load(path)
    # Its own file, or another's of the same model.
    for named, note in ((None, "the target's own layer"), (path, "target")):
        drafter = drafter_by_name(target, "mtp", named)
        assert drafter.note == f" ({note})"
        one = Speculator(target, drafter.drafter, 4).generate([[5, 6, 7]], 20, stop=())[0]
        assert one.tokens == [8 + i for i in range(20)] and one.metrics.accepted == one.metrics.drafted > 10
