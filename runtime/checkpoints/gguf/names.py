"""What llama.cpp calls architectures and the parts of a model, and what each of its architectures can hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from runtime.checkpoints.record import Architecture

_MLP = frozenset({"attn_output", "ffn_gate", "ffn_up", "ffn_down"})
_ALL = frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"})
_STATE = frozenset({"ssm_conv1d"})
_GPT_OSS = frozenset({"attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"})


@dataclass(frozen=True)
class Form:
    """An architecture of llama.cpp's.

    kinds       transformers' model_types that it computes.
    neighbours  it rotates dimensions 2i and 2i + 1 of a head together, not i and i + half.
    renamed     the names of parts that are not the usual ones.
    biases      layers that may have a bias there, besides those of queries, keys and values; `needed` must have one.
    bare        norms whose weight is called as the norm is.
    fused       gates and factors that a checkpoint has in one layer are one tensor.
    folded      multipliers of what layers make and read are in their weights.
    head        whether it has a head's own tensor always, never, or where the embedding is not the head.
    square      all heads of queries together are as wide as the residual stream.
    """

    kinds: tuple[str, ...]
    neighbours: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    biases: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    tiled: bool = False
    bare: frozenset[str] = frozenset()
    fused: bool = False
    folded: bool = False
    rope_factors: bool = False
    head: Literal["always", "never", "untied"] = "untied"
    square: bool = False


_POST = {"ffn_norm": "post_attention_norm"}
FORMS: dict[str, Form] = {
    "llama": Form(
        ("llama", "mistral", "ministral", "mixtral", "cwm", "iquestcoder"), True, biases=_MLP, rope_factors=True
    ),
    "qwen2": Form(("qwen2",), square=True),
    "qwen3": Form(("qwen3",)),
    "qwen3moe": Form(("qwen3_moe",)),
    "phi3": Form(("phi3",), fused=True, square=True),
    "gemma": Form(("gemma",), head="never"),
    "gemma2": Form(("gemma2",), head="never"),
    "gemma3": Form(("gemma3_text",)),
    "gemma4": Form(("gemma4_text",), rope_factors=True),
    "qwen2moe": Form(("qwen2_moe",), head="always", square=True),
    "gpt-oss": Form(("gpt_oss",), renamed=_POST, biases=_GPT_OSS, needed=_GPT_OSS, head="always"),
    "granite": Form(("granite",), True, biases=_MLP, rope_factors=True),
    "granitemoe": Form(("granitemoe", "granitemoeshared"), True, biases=frozenset({"attn_output"}), rope_factors=True),
    "granitehybrid": Form(
        ("granitemoehybrid",), True, biases=_STATE | {"attn_output"}, needed=_STATE, rope_factors=True
    ),
    "mamba2": Form(("mamba2",), biases=_STATE, needed=_STATE),
    "falcon-h1": Form(
        ("falcon_h1",),
        biases=_STATE | _MLP - {"attn_output"},
        needed=_STATE,
        bare=frozenset({"ffn_norm"}),
        folded=True,
        head="always",
    ),
    "nemotron_h": Form(("nemotron_h",), biases=_STATE | _MLP, needed=_STATE),
    "nemotron_h_moe": Form((), biases=_STATE | {"attn_output"}, needed=_STATE),
    "apertus": Form(("apertus",), biases=frozenset({"attn_output"}), rope_factors=True, head="always"),
    "olmo2": Form(("olmo2", "olmo3"), head="always", square=True),
    "smollm3": Form(("smollm3",), True),
    "chatglm": Form(("glm",), True, fused=True, square=True),
    "glm4": Form(("glm4",), True, fused=True),
    "mistral3": Form(("ministral3",), True, biases=_MLP, rope_factors=True),
    "deepseek2": Form(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), True),
    "lfm2": Form(("lfm2",), renamed={"output_norm": "token_embd_norm"}, square=True),
    "lfm2moe": Form(("lfm2_moe",), renamed={"output_norm": "token_embd_norm"}, square=True),
    "qwen3next": Form(("qwen3_next",), renamed=_POST),
    "qwen35": Form(("qwen3_5_text",), renamed=_POST, tiled=True),
    "qwen35moe": Form(("qwen3_5_moe_text",), renamed=_POST, tiled=True),
    "glm4moe": Form(("glm4_moe", "solar_open"), renamed=_POST),
    "dots1": Form(("dots1",), head="always"),
    "minimax-m2": Form(("minimax_m2",), head="always"),
    "exaone4": Form(("exaone4",), rope_factors=True, square=True),
    "exaone-moe": Form(("exaone_moe",), rope_factors=True, head="always"),
    "llama4": Form(("llama4_text",), True, rope_factors=True),
    "seed_oss": Form(("seed_oss",), renamed=_POST),
    "ernie4_5": Form(("ernie4_5",), True),
    "ernie4_5-moe": Form(("ernie4_5_moe",), True),
    "hunyuan-dense": Form(("hunyuan_v1_dense",)),
    "hunyuan-moe": Form(("hunyuan_v1_moe",)),
    "arcee": Form(("arcee",), True, rope_factors=True),
    "command-r": Form(("cohere",), True, head="never", square=True),
    "cohere2": Form(("cohere2",), True, head="never", square=True),
    "starcoder": Form(("gpt_bigcode",), biases=_ALL, needed=_ALL, square=True),
    "starcoder2": Form(("starcoder2",), biases=_ALL, needed=_ALL - {"attn_qkv"}, square=True),
    "stablelm": Form(("stablelm",), head="always", square=True),
    "phi2": Form(
        ("phi",), biases=_ALL | {"output"}, needed=_ALL - {"attn_qkv"} | {"output"}, head="always", square=True
    ),
    "gpt2": Form(("gpt2",), biases=_ALL, needed=_ALL, square=True),
    "gptneox": Form(("gpt_neox",), biases=_ALL, needed=_ALL, head="always", square=True),
    "falcon": Form(("falcon",), square=True),
    "nemotron": Form(("nemotron",), biases=_MLP, head="always", square=True),
    "olmoe": Form(("olmoe",), head="always", square=True),
}
"""By general.architecture."""

ARCHITECTURES: dict[str, str] = {kind: name for name, form in FORMS.items() for kind in form.kinds}
"""transformers' model_type → general.architecture; `architecture_of` knows more of a model."""


def architecture_of(a: Architecture) -> str:
    """What llama.cpp calls a model's architecture. Raises KeyError for a model_type that it does not compute."""
    if a.model_type == "nemotron_h" and a.experts is not None:
        return "nemotron_h_moe"
    if a.model_type == "granitemoehybrid" and a.experts is None and len(a.attending) == a.layers:
        return "granite"
    return ARCHITECTURES[a.model_type]


NOT_COMPUTED: dict[str, str] = {
    "phimoe": "it norms by the root mean square, without means, and shares by one softmax over both experts",
    "vaultgemma": "its gemma2 has norms of what attention and MLP add, which this family has not",
}
"""Families that are run here and not by llama.cpp as they are, by model_type: what it computes instead."""

ROPE_FACTORS = "rope_freqs.weight"
"""What Llama 3 divides its rotary frequencies by, one factor each."""

LONGROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""The same of LongRoPE, for short and for long texts, by their keys in config.json."""

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
LAYER_TABLE = "per_layer_token_embd.weight"
"""Gemma 4's inputs of layers."""
