"""A Llama checkpoint and its tokenizer as GGUF: `python -m makers.gguf_checkpoint CHECKPOINT THREADS TYPE=OUT…`.

A float32 file is written beside the first OUT, quantised by llama.cpp once for each TYPE (Q8_0, …), and removed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from makers.gguf_models import add_shape, quantize

_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# llama.cpp knows pre-tokenizers by name; this one splits like the regular expression that Llama 3 brought.
_SPLITS_LIKE_LLAMA_3, _LLAMA_3 = "dbrx", r"\p{N}{1,3}"


def make(checkpoint: Path, outs: dict[str, Path], threads: int) -> None:
    """Raises ValueError for a model or a tokenizer of another kind."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"expected a checkpoint of type llama, found {config['model_type']}")
    if config["rope_parameters"]["rope_type"] != "default":
        raise ValueError(f"expected unscaled rotary frequencies, found {config['rope_parameters']['rope_type']}")
    source = next(iter(outs.values())).with_suffix(".f32")
    try:
        writer = gguf.GGUFWriter(source, "llama")
        add_shape(writer, config)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()), config)
        for file in sorted(checkpoint.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                writer.add_tensor(_gguf_name(name), _laid_out(name, tensor.to(torch.float32).numpy(), config))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        quantize(source, outs, threads)
    finally:
        source.unlink(missing_ok=True)


def _gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` → `blk.3.ffn_up.weight`."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    return f"blk.{number}.{_INSIDE[part]}.{kind}"


def _laid_out(name: str, weight: NDArray[np.float32], config: dict[str, Any]) -> NDArray[np.float32]:
    """llama.cpp rotates neighbouring rows of a head together, transformers row i with row i + size / 2."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """A byte-level BPE that splits like Llama 3's."""
    model = tokenizer["model"]
    if model["type"] != "BPE" or _LLAMA_3 not in json.dumps(tokenizer["pre_tokenizer"]).replace("\\\\", "\\"):
        raise ValueError("expected a byte-level BPE tokenizer with the splits of Llama 3")
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = {index: text for text, index in model["vocab"].items()} | special
    if sorted(tokens) != list(range(config["vocab_size"])):
        raise ValueError(f"expected one token for each id below {config['vocab_size']}, found {len(tokens)}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_SPLITS_LIKE_LLAMA_3)
    writer.add_token_list([tokens[index] for index in range(len(tokens))])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if index in special else normal for index in range(len(tokens))])
    # Older files write a merge as one string, newer ones as a list of its two halves.
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    chosen = dict(argument.split("=", 1) for argument in sys.argv[3:])
    make(Path(sys.argv[1]), {kind: Path(out) for kind, out in chosen.items()}, int(sys.argv[2]))
