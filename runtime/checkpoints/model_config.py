"""config.json as somebody else wrote it: every value that sizes memory or reaches a kernel is checked here, once.

A key that is absent or null is left to the family's default, and keys that are not named here to transformers.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from runtime.errors import UserError

# Larger than any model, and a few of them multiplied still fit the kernels' 64-bit sizes.
_MOST_LAYERS, _MOST_EXPERTS, _MOST_SIZE, _MOST_WORDS, _MOST_POSITIONS = 10_000, 1 << 16, 1 << 22, 1 << 26, 1 << 40
# As a whole number it still fits torch's 64 bits.
_MOST_NUMBER = 1e18
_DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")


def _known_dtype(name: str) -> str:
    if name.removeprefix("torch.") not in _DTYPES:
        raise ValueError(f"expected one of {', '.join(_DTYPES)}")
    return name


def _count(most: int) -> Any:
    return Annotated[int, Field(strict=True, ge=1, le=most)]


_Size: Any = _count(_MOST_SIZE)
_Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=_MOST_NUMBER)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-_MOST_NUMBER, le=_MOST_NUMBER)]
_Share = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1)]
_Text = Annotated[str, Field(strict=True, max_length=200)]
_Count0 = Annotated[int, Field(strict=True, ge=0, le=_MOST_LAYERS)]
# −1 is "none" in some files.
_Token = Annotated[int, Field(strict=True, ge=-1, le=_MOST_WORDS)]

# Types, and the names under which the families have such values.
_KEYS: list[tuple[Any, str]] = [
    (_count(_MOST_LAYERS), "num_hidden_layers n_layer n_layers num_layers decoder_sparse_step"),
    (_Size, "hidden_size n_embd d_model n_inner ffn_dim ffn_hidden_size moe_intermediate_size"),
    (_Size, "head_dim global_head_dim num_global_key_value_heads"),
    (_Size, "num_attention_heads n_head n_heads num_heads num_key_value_heads num_kv_heads rotary_dim"),
    # Some families have one for each layer.
    (_Size | list[_Size], "intermediate_size"),
    (_Size, "qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank"),
    (_Size, "block_ff_dim block_multiple_of"),
    (_Size, "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"),
    (_Size, "mamba_n_heads mamba_num_heads mamba_n_groups mamba_d_state ssm_state_size mamba_head_dim mamba_d_ssm"),
    (_Size, "mamba_expand moe_shared_expert_intermediate_size"),
    # The taps of a convolution, which are a state's floats for each channel.
    (
        _count(_MOST_LAYERS),
        "conv_L_cache linear_conv_kernel_dim full_attention_interval mamba_d_conv moe_layer_interval",
    ),
    # 0 where it is not used.
    (Annotated[int, Field(strict=True, ge=0, le=_MOST_POSITIONS)], "sliding_window max_window_layers window_size"),
    (Annotated[int, Field(strict=True, ge=0, le=_MOST_SIZE)], "hidden_size_per_layer_input shared_intermediate_size"),
    (_count(_MOST_WORDS), "vocab_size vocab_size_per_layer_input"),
    (_count(_MOST_POSITIONS), "max_position_embeddings n_positions"),
    (_count(_MOST_EXPERTS), "top_k_experts moe_k moe_num_experts"),
    (
        _count(_MOST_EXPERTS),
        "num_experts num_experts_per_tok n_routed_experts n_shared_experts n_group topk_group",
    ),
    # 0 where a family has mixtures and a model of it none.
    (Annotated[int, Field(strict=True, ge=0, le=_MOST_EXPERTS)], "num_local_experts"),
    (_Text, "model_type hidden_act hidden_activation activation_function"),
    (Annotated[_Text, AfterValidator(_known_dtype)], "dtype torch_dtype"),
    (Annotated[bool, Field(strict=True)], "tie_word_embeddings use_sliding_window norm_topk_prob attention_bias"),
    (Annotated[bool, Field(strict=True)], "tie_embedding block_auto_adjust_ff_dim conv_bias use_expert_bias"),
    (Annotated[bool, Field(strict=True)], "attention_k_eq_v enable_moe_block use_double_wide_mlp multi_query"),
    (Annotated[bool, Field(strict=True)], "use_qk_norm mup_enabled use_post_norm use_sandwich_norm use_attention_gate"),
    (
        _Positive,
        "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps rope_theta query_pre_attn_scalar",
    ),
    (_Positive, "attn_logit_softcapping final_logit_softcapping logits_scaling swiglu_limit block_ffn_dim_multiplier"),
    (_Number, "embedding_multiplier attention_multiplier residual_multiplier logit_scale routed_scaling_factor"),
    (_Number, "swiglu_alpha router_jitter_noise route_scale router_scaling_factor"),
    (_Count0, "first_k_dense_replace num_ln_in_parallel_attn num_dense_layers num_kv_shared_layers"),
    (
        _Count0,
        "moe_num_shared_experts num_shared_experts moe_layer_start_index num_nextn_predict_layers num_mtp_layers",
    ),
    (_Share, "partial_rotary_factor rotary_pct"),
    (Annotated[list[_Text], Field(max_length=_MOST_LAYERS)], "layer_types mlp_layer_types attention_layers"),
    (
        Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(max_length=_MOST_LAYERS)],
        "mlp_only_layers full_attn_idxs attn_layer_indices",
    ),
    (_Token, "bos_token_id pad_token_id"),
    (_Token | list[_Token], "eos_token_id"),
]
_ROPE_KEYS: list[tuple[Any, str]] = [
    (_Text, "rope_type type"),
    (_Positive, "rope_theta factor alpha low_freq_factor high_freq_factor beta_fast beta_slow attention_factor"),
    (_Number, "mscale mscale_all_dim llama_4_scaling_beta"),
    (_Share, "partial_rotary_factor"),
    (_count(_MOST_POSITIONS), "original_max_position_embeddings"),
    (Annotated[list[_Positive], Field(max_length=_MOST_SIZE)], "long_factor short_factor"),
]
_GENERATION_KEYS: list[tuple[Any, str]] = [
    (_Token, "bos_token_id pad_token_id"),
    (_Token | list[_Token], "eos_token_id"),
]


_CONFIG, _ROPE, _GENERATION = (
    create_model("Keys", **dict[str, Any]((key, (kind | None, None)) for kind, names in keys for key in names.split()))
    for keys in (_KEYS, _ROPE_KEYS, _GENERATION_KEYS)
)


def check(config: Mapping[str, Any], where: str) -> None:
    """Raises UserError for a value of config.json that no model can have; `where` names the file."""
    _check(_CONFIG, config, where)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise UserError(f"{where}: {key} must be a mapping, found {_shown(rope)}")
        # Models with several kinds of layers have a mapping for each.
        nested = {name: part for name, part in rope.items() if isinstance(part, dict)}
        _check(_ROPE, rope, f"{where}: {key}")
        for name, part in nested.items():
            _check(_ROPE, part, f"{where}: {key}.{_shown(name)}")
    if isinstance(config.get("text_config"), dict):
        check(config["text_config"], f"{where}: text_config")


def check_generation(config: Mapping[str, Any], where: str) -> None:
    """Raises UserError for tokens of generation_config.json that are none."""
    _check(_GENERATION, config, where)


def _check(schema: type[BaseModel], values: Mapping[str, Any], where: str) -> None:
    try:
        schema.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, why = first["loc"][0], first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {key}: {why[:1].lower()}{why[1:]}, found {_shown(values[str(key)])}") from error


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        # Python does not print integers of more than 4,300 digits.
        return f"a {type(value).__name__} of too many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
