"""What a GGUF file says of the architecture, from config.json."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.errors import UserError
from runtime.checkpoints.architecture import Architecture, describe
from runtime.checkpoints.gguf.config import HIGH, LOW, ORIGINAL, llama3_factors
from runtime.checkpoints.gguf.names import ARCHITECTURES

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from numpy.typing import NDArray

_PHI_3_TOKENS = {"<s>", "</s>", "<unk>", "<|endoftext|>"}
_LLAMA_3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = {"rope_type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"}


def architecture(shown: str, config: dict[str, Any]) -> tuple[str, Architecture]:
    """llama.cpp's name of the architecture, and its sizes.

    Raises UserError for architectures that have no such name here, and variants that llama.cpp computes otherwise.
    """
    found = describe(config)
    if found is None or found.model_type not in ARCHITECTURES:
        raise UserError(
            f"{shown}: expected one of {', '.join(ARCHITECTURES)} for GGUF, found {config.get('model_type')!r}: export"
            " it to another form"
        )
    if found.experts is not None and (not found.experts.renormalize or found.dense_layers):
        raise UserError(
            f"{shown}: expected experts in every layer, their weights divided by their sum, as llama.cpp has it for"
            f" {found.model_type}, found norm_topk_prob {found.experts.renormalize}, dense layers"
            f" {list(found.dense_layers)}: export it to another form"
        )
    return ARCHITECTURES[found.model_type], found


def context(a: Architecture) -> tuple[int, str | None]:
    """Tokens of context, and a note where that is fewer than the model's: llama.cpp has no windows here."""
    windows = [window for window in a.windows if window is not None and window < a.max_positions]
    if not windows:
        return a.max_positions, None
    return min(windows), (
        f"the context is {min(windows)} tokens, the model's sliding window: llama.cpp has none for this architecture"
    )


def rope(shown: str, config: dict[str, Any], a: Architecture) -> tuple[dict[str, Any], "NDArray[np.float32] | None"]:
    """`rope_parameters` with every default filled in, and Llama 3's factors where it has them.

    Raises UserError for scalings that a GGUF file has no words for here.
    """
    said = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    said.setdefault("rope_type", said.pop("type", "default"))
    said.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    share = said.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    said["rotated"] = int(a.head_dim * share)
    kind = said["rope_type"]
    if kind in ("default", "linear"):
        return said, None
    if kind == "llama3":
        theta, factor, low, high = (float(said[key]) for key in ("rope_theta", "factor", *_LLAMA_3[:2]))
        return said, llama3_factors(theta, said["rotated"], factor, low, high, int(said[_LLAMA_3[2]]))
    if kind == "yarn" and set(said) - {"rotated"} <= _YARN:
        said.setdefault("original_max_position_embeddings", a.max_positions)
        return said, None
    raise UserError(
        f"{shown}: expected rotary frequencies that are plain, linear, llama3 or plain yarn for GGUF, found {kind!r}"
        f" with {', '.join(sorted(set(said) - {'rotated'}))}: export it to another form"
    )


def reads_back(parameters: dict[str, Any]) -> bool:
    """Whether Llama 3's factors are those of its releases, which alone are recognised when the file is read here."""
    return parameters["rope_type"] != "llama3" or [parameters.get(k) for k in _LLAMA_3] == [LOW, HIGH, ORIGINAL]


def name(a: Architecture, tokens: Collection[str]) -> str:
    """What the file calls the model: transformers' model_type, which llama.cpp's architecture may not tell.

    It is not the bare word: transformers takes files called "mistral" for an architecture that it then does not find.
    And llama.cpp looks for certain tokens in files that are called phi3, and fails where they have none of that name.
    """
    if a.model_type == "phi3" and not set(tokens) >= _PHI_3_TOKENS:
        return "specpress"
    return f"specpress-{a.model_type}"


def add(writer: "GGUFWriter", called: str, a: Architecture, parameters: dict[str, Any]) -> None:
    """Adds general and architecture keys; `called` comes from `name`, `parameters` from `rope`."""
    from gguf import GGML_QUANT_VERSION, RopeScalingType

    writer.add_name(called)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_context_length(context(a)[0])
    writer.add_embedding_length(a.hidden)
    writer.add_block_count(a.layers)
    writer.add_feed_forward_length(a.intermediate)
    writer.add_head_count(a.heads)
    writer.add_head_count_kv(a.kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_layer_norm_rms_eps(a.norm_eps)
    writer.add_vocab_size(a.vocab)
    writer.add_rope_dimension_count(parameters["rotated"])
    writer.add_rope_freq_base(float(parameters["rope_theta"]))
    if parameters["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(parameters["rope_type"]))
        writer.add_rope_scaling_factor(float(parameters["factor"]))
    if parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(parameters["original_max_position_embeddings"]))
    if a.experts is not None:
        writer.add_expert_count(a.experts.count)
        writer.add_expert_used_count(a.experts.per_token)
        if a.model_type == "qwen3_moe":
            writer.add_expert_feed_forward_length(a.experts.hidden)
