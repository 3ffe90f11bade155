"""`genai_config.json`: what ONNX Runtime GenAI asks of a folder, beside the graph and the tokenizer's files."""

from collections.abc import Mapping
from typing import Any

from compress.export.onnx.graph import Sizes

FILE = "genai_config.json"
# GenAI's name for any decoder of text whose inputs are named below; its others only add chat habits.
_TYPE = "decoder"
_POSITIONS = ("max_position_embeddings", "n_positions")
# Where neither config.json nor the tokenizer ends texts GenAI still wants a number; this one no vocabulary has.
_NO_TOKEN = -1


def genai_config(config: Mapping[str, Any], generation: Mapping[str, Any], sizes: Sizes, file: str) -> dict[str, Any]:
    """The file's content, for greedy decoding unless its user says otherwise.

    config, generation  config.json and generation_config.json (empty where there is none); the second's end tokens win.
    file                of the graph, in the same folder.
    """
    length = next((int(config[key]) for key in _POSITIONS if config.get(key)), 2048)
    end = generation.get("eos_token_id", config.get("eos_token_id"))
    end = _NO_TOKEN if end is None else end
    first_end = end[0] if isinstance(end, list) else end
    start = generation.get("bos_token_id", config.get("bos_token_id"))
    pad = generation.get("pad_token_id", config.get("pad_token_id"))
    heads = config.get("num_attention_heads") or config.get("n_head")
    return {
        "model": {
            "type": _TYPE,
            "bos_token_id": first_end if start is None else start,
            "eos_token_id": end,
            "pad_token_id": first_end if pad is None else pad,
            "context_length": length,
            "vocab_size": sizes.vocabulary,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": file,
                "head_size": sizes.head_dim,
                "hidden_size": sizes.hidden,
                "num_attention_heads": heads,
                "num_key_value_heads": sizes.kv_heads,
                "num_hidden_layers": sizes.layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": length,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": False,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }
