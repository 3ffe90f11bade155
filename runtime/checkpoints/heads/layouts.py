"""Who writes draft heads, and how: a row for each layout, which says what its configuration means and renames tensors.

speculators (vllm-project) names its kind in `speculators_model_type`; the others are known by their architecture:
SpecForge, whose EAGLE-3 is also that of the EAGLE authors and of vLLM, z-lab's DFlash, and DeepSpec. Multi-token
prediction that a target brings in its own file: mtp.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.checkpoints.heads.record import ACTIVATIONS, HeadDescription, HeadKind, HeadLayers, MarkovKind
from runtime.errors import UserError, fault_of

Values = Mapping[str, Any]
# Of layers that know the tokens behind them; the others' rows see their whole block.
_SLIDING = "sliding_attention"
# Model types whose configurations are read, and what sets them apart: norms of queries and keys, a gate on attention's
# output, norms that lack one, projections with a bias in any case.
_TYPES: dict[str, tuple[bool, bool, bool, tuple[str, ...]]] = {
    "llama": (False, False, False, ()),
    "qwen2": (False, False, False, ("q", "k", "v")),
    "qwen3": (True, False, False, ()),
    "qwen3_next": (True, True, True, ()),
    "qwen3_5_text": (True, True, True, ()),
}


@dataclass(frozen=True)
class Layout:
    """How one writer's heads of one kind are read.

    describe  the record of a config.json; it raises UserError naming the key, beginning with the given words.
    renames   beginnings of the file's names, and what stands for them in the record's; the first that fits counts.
    """

    name: str
    describe: Callable[[Values, str], HeadDescription]
    renames: tuple[tuple[str, str], ...] = ()


def read_layers(values: Values, shown: str, count: int | None = None) -> HeadLayers:
    """The blocks of a head from the keys of a Llama or Qwen configuration, what is left out by transformers' defaults.

    count  of blocks; None: num_hidden_layers. Raises UserError, beginning with `shown`.
    """
    from transformers import CONFIG_MAPPING

    kind = values.get("model_type") or "qwen3"
    if kind not in _TYPES:
        known = ", ".join(_TYPES)
        raise UserError(f"{shown}: draft heads are of model_type {known}, found {kind!r}; use another drafter")
    with fault_of(shown, "the head's layers cannot be read"):
        own = {key: value for key, value in values.items() if key != "quantization_config"}
        config = CONFIG_MAPPING[kind](**own | {"model_type": kind})
        blocks = int(config.num_hidden_layers if count is None else count)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        normed, gated, unit, biased = _TYPES[kind]
        biased = ("q", "k", "v", "o") if getattr(config, "attention_bias", False) else biased
        biased += ("gate", "up", "down") if getattr(config, "mlp_bias", False) else ()
        found = HeadLayers(
            hidden=int(config.hidden_size),
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads or config.num_attention_heads),
            head_dim=int(head_dim),
            inner=int(config.intermediate_size),
            count=blocks,
            eps=float(config.rms_norm_eps),
            activation=str(config.hidden_act),
            windows=(None,) * blocks if count is not None else _windows(config, blocks),
            config=config,
            biased=biased,
            query_key_norm=normed,
            gated=gated,
            unit_norms=unit,
        )
    if min(found.hidden, found.heads, found.kv_heads, found.head_dim, found.inner, found.count) < 1:
        raise UserError(f"{shown}: sizes of a head must be at least 1, found {found}; fetch the file again")
    if found.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{shown}: hidden_act must be one of {known}, found {found.activation!r}; update Specpress")
    if found.heads % found.kv_heads:
        raise UserError(
            f"{shown}: num_key_value_heads must divide num_attention_heads, found {found.kv_heads} and {found.heads}; "
            "fetch the file again"
        )
    return found


def _windows(config: Any, blocks: int) -> tuple[int | None, ...]:
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    return tuple(window if number < len(kinds) and kinds[number] == _SLIDING else None for number in range(blocks))


def whole(values: Values, key: str, shown: str, least: int = 1, default: int | None = None) -> int:
    """A whole number. Raises UserError where it is none, or smaller than `least`."""
    value = values.get(key)
    value = default if value is None else value
    if type(value) is not int or value < least:
        raise UserError(
            f"{shown}: {key} must be a whole number of at least {least}, found {value!r}; fetch the file again"
        )
    return value


def numbers(values: Values, key: str, shown: str) -> tuple[int, ...]:
    """Whole numbers, of which none may be there: (). Raises UserError for anything else."""
    value = values.get(key) or []
    if not isinstance(value, list) or any(type(one) is not int or one < -1 for one in value):
        raise UserError(f"{shown}: {key} must be a list of layers, found {value!r}; fetch the file again")
    return tuple(value)


def inner(values: Values, key: str, shown: str) -> Values:
    """An object inside a configuration; empty where it is not there. Raises UserError for anything else."""
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise UserError(f"{shown}: {key} must be an object, found {value!r}; fetch the file again")
    return value


def _markov(values: Values, hidden: int, shown: str) -> dict[str, Any]:
    """The record's fields of a dspark head's Markov and confidence heads."""
    rank = whole(values, "markov_rank", shown, 0, 0)
    kinds: dict[str, MarkovKind] = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}
    kind = str(values.get("markov_head_type") or "vanilla").lower()
    if kind not in kinds:
        raise UserError(
            f"{shown}: markov_head_type must be one of {', '.join(kinds)}, found {kind!r}; update Specpress"
        )
    confident = bool(values.get("enable_confidence_head"))
    inputs = hidden + (rank if values.get("confidence_head_with_markov") else 0)
    return {"markov": kinds[kind] if rank else "", "rank": rank, "confidence": inputs if confident else 0}


def _causal(layers: HeadLayers, said: Any) -> tuple[bool, ...]:
    """Of each block whether its rows see only those before them: windows are causal where nothing else is said."""
    return tuple(window is not None if said is None else bool(said) for window in layers.windows)


def _speculators(kind: HeadKind) -> Callable[[Values, str], HeadDescription]:
    """speculators' configurations: the layers' in transformer_layer_config, layers counted from the embedding (0)."""

    def describe(values: Values, shown: str) -> HeadDescription:
        below = inner(values, "transformer_layer_config", shown)
        layers = read_layers(below, shown, 1 if kind == "mtp" else None)
        vocab = int(layers.config.vocab_size)
        found: dict[str, Any] = {
            "target_hidden": whole(values, "target_hidden_size", shown, 1, layers.hidden),
            "draft_vocab": vocab if kind == "mtp" else whole(values, "draft_vocab_size", shown, 1, 32000),
        }
        if kind == "mtp":
            found["normed_output"] = True
        if kind in ("eagle3", "peagle"):
            norms = {"norm_before_fc": "whole", "fc_norm": "each"}
            found |= {
                "depths": numbers(values, "eagle_aux_hidden_state_layer_ids", shown),
                "normed_residual": bool(values.get("norm_before_residual")),
                "fuse_norm": next((norm for key, norm in norms.items() if values.get(key)), ""),
                "normed_output": kind == "eagle3" and bool(values.get("norm_output")),
            }
        if kind == "peagle":
            found |= {"mask_token": whole(values, "mask_token_id", shown, 0), "tokens": _proposed(values, shown)}
        if kind in ("dflash", "dspark"):
            block, anchored = whole(values, "block_size", shown, 2, 8), values.get("sample_from_anchor")
            anchored = kind == "dspark" if anchored is None else bool(anchored)
            found |= {
                "depths": numbers(values, "aux_hidden_state_layer_ids", shown),
                "mask_token": whole(values, "mask_token_id", shown, 0),
                "from_anchor": anchored,
                "tokens": block if anchored else block - 1,
                "causal": _causal(layers, False if values.get("sliding_window_non_causal") else None),
            }
        if kind == "dspark":
            defaults = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
            found |= _markov({**defaults, **values}, layers.hidden, shown)
        return HeadDescription(kind, "speculators", vocab=vocab, layers=layers, **found)

    return describe


def _proposed(values: Values, shown: str) -> int:
    """Tokens that a head was made to draft at once."""
    methods = inner(values, "speculators_config", shown).get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise UserError(f"{shown}: proposal_methods must be a list of objects, found {methods!r}; fetch the file again")
    return whole(methods[0], "speculative_tokens", shown, 1, 8)


def _eagle(kind: HeadKind, writer: str) -> Callable[[Values, str], HeadDescription]:
    """SpecForge's: layers counted from the first block (0), as SGLang does."""

    def describe(values: Values, shown: str) -> HeadDescription:
        layers = read_layers(values, shown)
        below, vocab = inner(values, "eagle_config", shown), int(layers.config.vocab_size)
        depths = tuple(layer + 1 for layer in numbers(below, "eagle_aux_hidden_state_layer_ids", shown))
        mask = next((key for key in ("mask_token_id", "ptd_token_id", "pard_token") if key in values), "mask_token_id")
        return HeadDescription(
            kind,
            writer,
            target_hidden=whole(values, "target_hidden_size", shown, 1, layers.hidden),
            vocab=vocab,
            draft_vocab=whole(values, "draft_vocab_size", shown, 1, vocab),
            layers=layers,
            # vLLM's own key counts as speculators does.
            depths=depths or numbers(values, "eagle_aux_hidden_state_layer_ids", shown),
            normed_residual=bool(values.get("norm_before_residual")),
            fuse_norm="each" if values.get("fc_norm") else "whole" if values.get("norm_before_fc") else "",
            tokens=8 if kind == "peagle" else 0,
            mask_token=whole(values, mask, shown, 0) if kind == "peagle" else -1,
        )

    return describe


def _deepspec_eagle(values: Values, shown: str) -> HeadDescription:
    layers = read_layers(values, shown)
    vocab, depths = int(layers.config.vocab_size), numbers(values, "target_layer_ids", shown)
    return HeadDescription(
        "eagle3", "DeepSpec", layers.hidden, vocab, vocab, layers, tuple(layer + 1 for layer in depths)
    )


def _dflash(kind: HeadKind, writer: str, place: str) -> Callable[[Values, str], HeadDescription]:
    """z-lab's, SpecForge's and DeepSpec's blocks; place: the key of the object that says more, "": the top."""

    def describe(values: Values, shown: str) -> HeadDescription:
        layers = read_layers(values, shown)
        below = inner(values, place, shown) if place else values
        block = whole(values if values.get("block_size") is not None else below, "block_size", shown, 2)
        depths = numbers(below, "target_layer_ids", shown)
        if not depths:
            raise UserError(f"{shown}: target_layer_ids names no layers of the target; fetch the file again")
        markov = _markov(below, layers.hidden, shown) if kind == "dspark" else {}
        bare = kind == "dspark" and writer == "DeepSpec" and not markov["markov"] and not markov["confidence"]
        said = values.get("is_causal")
        return HeadDescription(
            "dflash" if bare else kind,
            writer,
            target_hidden=whole(values, "target_hidden_size", shown, 1, layers.hidden),
            vocab=int(layers.config.vocab_size),
            draft_vocab=int(layers.config.vocab_size),
            layers=layers,
            depths=tuple(layer + 1 for layer in depths),
            tokens=block if kind == "dspark" else block - 1,
            from_anchor=kind == "dspark",
            mask_token=whole(below, "mask_token_id", shown, 0),
            causal=_causal(layers, below.get("causal") if said is None else said),
            **markov,
        )

    return describe


_MTP = (
    ("mtp_layers.0.input_proj.", "join."),
    ("mtp_layers.0.hidden_layernorm.", "join_hidden_norm."),
    ("mtp_layers.0.token_layernorm.", "join_token_norm."),
    ("mtp_layers.0.final_layernorm.", "norm."),
    ("mtp_layers.0.", "layers.0."),
)
# What training left: maps from the target's vocabulary, and parts of the target itself.
LEFT_OUT = ("t2d", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")
_EAGLE_NAMES = (("midlayer.", "layers.0."), ("model.midlayer.", "layers.0."), ("model.", ""))
_HEAD_NAMES = (("logit_head.", ""), ("model.", ""))

BY_TYPE: dict[str, Layout] = {
    "eagle3": Layout("speculators", _speculators("eagle3")),
    "peagle": Layout("speculators", _speculators("peagle")),
    "dflash": Layout("speculators", _speculators("dflash")),
    "dspark": Layout("speculators", _speculators("dspark")),
    "mtp": Layout("speculators", _speculators("mtp"), _MTP),
}
BY_ARCHITECTURE: dict[str, Layout] = {
    "LlamaForCausalLMEagle3": Layout("SpecForge", _eagle("eagle3", "SpecForge"), _EAGLE_NAMES),
    "Eagle3LlamaForCausalLM": Layout("vLLM", _eagle("eagle3", "vLLM"), _EAGLE_NAMES),
    "PEagleDraftModel": Layout("SpecForge", _eagle("peagle", "SpecForge"), _EAGLE_NAMES),
    "DFlashDraftModel": Layout("z-lab", _dflash("dflash", "z-lab", "dflash_config"), _HEAD_NAMES),
    "DSparkDraftModel": Layout("SpecForge", _dflash("dspark", "SpecForge", "dflash_config"), _HEAD_NAMES),
    "Qwen3DSparkModel": Layout("DeepSpec", _dflash("dspark", "DeepSpec", ""), _HEAD_NAMES),
    "Qwen3Eagle3Model": Layout("DeepSpec", _deepspec_eagle, _HEAD_NAMES),
}


def layout_of(values: Values) -> Layout | None:
    """The layout of a config.json; None where it is no draft head that is known."""
    architectures = values.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    known = BY_TYPE.get(str(values.get("speculators_model_type")))
    return known or next((BY_ARCHITECTURE[name] for name in names if name in BY_ARCHITECTURE), None)
