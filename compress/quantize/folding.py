"""Where a factor per channel can be moved from a layer's inputs into the module before it, without changing the block.

A linear layer fed by a module whose output is multiplied channel by channel (a norm's weight, the rows of another
linear layer) computes the same from inputs divided by s and weights multiplied by s. AWQ and SmoothQuant choose s;
this file knows which modules of a decoder layer allow it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from compress.errors import UserError

# A norm multiplies by its weight plus this.
NORM_OFFSET = {
    "llama": 0.0,
    "mistral": 0.0,
    "qwen2": 0.0,
    "qwen3": 0.0,
    "phi3": 0.0,
    "mixtral": 0.0,
    "qwen2_moe": 0.0,
    "qwen3_moe": 0.0,
    "gemma": 1.0,
    "gemma2": 1.0,
    "gemma3_text": 1.0,
    "smollm3": 0.0,
    "granite": 0.0,
    "glm": 0.0,
    "glm4": 0.0,
    "iquestcoder": 0.0,
    "mellum": 0.0,
    "ministral": 0.0,
    "ministral3": 0.0,
    "seed_oss": 0.0,
    "internlm3": 0.0,
    "ernie4_5": 0.0,
    "helium": 0.0,
    "hunyuan_v1_dense": 0.0,
    "cwm": 0.0,
    "hyperclovax": 0.0,
    "granite_swa": 0.0,
    "vaultgemma": 1.0,
    "olmoe": 0.0,
    "minimax_m2": 0.0,
    "glm4_moe": 0.0,
    "dots1": 0.0,
    "ernie4_5_moe": 0.0,
    "exaone_moe": 0.0,
    "solar_open": 0.0,
    "hy_v3": 0.0,
    "deepseek_v2": 0.0,
    "deepseek_v3": 0.0,
    "glm4_moe_lite": 0.0,
    "youtu": 0.0,
    "qwen3_next": 1.0,
    "qwen3_5_text": 1.0,
    "qwen3_5_moe_text": 1.0,
}
# What mixes positions: the linear layers that read its input, and its others.
_MIXERS = {
    "self_attn.": (
        ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa"),
        ("o_proj", "q_b_proj", "kv_b_proj"),
    ),
    # A gated delta rule: its output is normed by head and gated, so nothing is folded into what makes it.
    "linear_attn.": (
        ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        ("out_proj",),
    ),
}
_MLP_READERS = ("gate_proj", "up_proj", "gate_up_proj")
# They decide where a token goes; they read what the experts read.
_ROUTERS = ("gate", "shared_expert_gate")


@dataclass(frozen=True)
class Fold:
    """A factor per input channel of `linears` that `previous` can be divided by.

    Names are paths inside the decoder layer.
    previous  a norm, or a linear layer whose outputs from number `start` on are the channels.
    linears   the linear layers that read them; they are to be multiplied.
    others    parameters (last dimension: the channels) that read them too and are multiplied, but not judged: routers,
              experts that are still fused.
    offset    of a norm: it multiplies by its weight plus this.
    sharing   query heads that read one key/value head: their channels, `head_dim` a head, must share factors.
    """

    previous: str
    linears: tuple[str, ...]
    others: tuple[str, ...] = ()
    offset: float = 0.0
    start: int = 0
    sharing: int = 1
    head_dim: int = 0


def is_known(model_type: str) -> bool:
    """Whether this file knows a family's data flow."""
    return model_type in NORM_OFFSET


def require_known(model_type: str) -> None:
    """Raises UserError for a family whose data flow this file does not know."""
    if not is_known(model_type):
        raise UserError(
            f"scales cannot be folded into a {model_type} layer: its structure is not known (known:"
            f" {', '.join(NORM_OFFSET)}): use a gptq, rtn or trellis recipe, the last with fold: auto or false"
        )


def folds(layer: nn.Module, model_type: str) -> list[Fold]:
    """The folds of one transformers decoder layer, in the order of the data: attention, its output, MLP, its output.

    Attention: norm → q, k, v; v → o, where query heads that share a value head share factors. MLP: norm → gate, up (of
    all experts, and routers with them); up → down (of each expert).
    Raises UserError for a family whose data flow this file does not know, and ValueError for a module in the layer that
    it did not expect: something else might read what would be divided.
    """
    require_known(model_type)
    offset = NORM_OFFSET[model_type]
    linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    mixer = next(name for name in _MIXERS if hasattr(layer, name.rstrip(".")))
    found = [Fold("input_layernorm", _reading(linears, mixer, *_MIXERS[mixer]), offset=offset)]
    # Latent attention makes values of vectors that keys are made of as well, so nothing is folded into them.
    if not linears.keys().isdisjoint(("self_attn.v_proj", "self_attn.qkv_proj")):
        found.append(_attention_output(layer, linears))
    # Gemma 2 and 3 norm the attention's output as well, and call the MLP's norm by another name.
    before_mlp = "pre_feedforward_layernorm" if hasattr(layer, "pre_feedforward_layernorm") else None
    readers = _reading(linears, "mlp.", _MLP_READERS, ("down_proj", *_ROUTERS))
    # Routers and fused experts read the norm, too, and are no linear layers to judge.
    routers = {f"{router}.weight" for router in _ROUTERS}
    inside = [name for name, _ in layer.get_submodule("mlp").named_parameters()]
    others = tuple(f"mlp.{name}" for name in inside if name in routers or _last(name) == "gate_up_proj")
    if readers:
        found.append(Fold(before_mlp or "post_attention_layernorm", readers, others, offset))
    found += [_mlp_output(linears, name) for name in linears if name.startswith("mlp.") and _last(name) == "down_proj"]
    return found


def apply(layer: nn.Module, fold: Fold, factor: Tensor) -> None:
    """Divides the fold's channels by `factor` (K,) where they are made and multiplies whatever reads them, in place.

    Raises ValueError for a factor that is not positive and finite, or that differs where heads must share it.
    """
    if factor.dim() != 1 or not bool((torch.isfinite(factor) & (factor > 0)).all()):
        raise ValueError(f"{fold.previous}: factors must be one positive finite number a channel")
    own = factor if fold.sharing == 1 else factor.view(-1, fold.sharing, fold.head_dim)[:, 0].flatten()
    if not torch.equal(spread(fold, own), factor):
        raise ValueError(f"{fold.previous}: {fold.sharing} query heads read one value head, so they share factors")
    with torch.no_grad():
        previous = layer.get_submodule(fold.previous)
        if isinstance(previous, nn.Linear):
            rows = slice(fold.start, fold.start + len(own))
            previous.weight[rows].div_(own.unsqueeze(1))
            if previous.bias is not None:
                previous.bias[rows].div_(own)
        else:
            weight = layer.get_parameter(f"{fold.previous}.weight")
            weight.copy_((weight + fold.offset) / own - fold.offset)
        for name in fold.linears:
            layer.get_parameter(f"{name}.weight").mul_(factor)
        for name in fold.others:
            layer.get_parameter(name).mul_(factor)


def storable(layer: nn.Module, fold: Fold, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor (K,) closest to `factor` that leaves a norm's weight exact in the file's `dtype`.

    The weights are multiplied by what the norm was really divided by: then nothing is lost where the norm is written. A
    factor into a linear layer is returned as it is: that layer's rows are rounded to codes anyway.
    """
    previous = layer.get_submodule(fold.previous)
    if isinstance(previous, nn.Linear):
        return factor
    weight = layer.get_parameter(f"{fold.previous}.weight").detach().float() + fold.offset
    stored = (weight / factor - fold.offset).to(dtype).float() + fold.offset
    ratio = weight / stored
    # A channel that the norm makes 0, or that rounding would make 0 or turn over, stays as it is.
    return torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0)


def share(fold: Fold, statistic: Tensor, by: Literal["mean", "max"] = "mean") -> Tensor:
    """(K,) the statistic of the channels with the same value for those that must share a factor."""
    if fold.sharing == 1:
        return statistic
    heads = statistic.view(-1, fold.sharing, fold.head_dim)
    return spread(fold, (heads.mean(dim=1) if by == "mean" else heads.amax(dim=1)).flatten())


def spread(fold: Fold, own: Tensor) -> Tensor:
    """(K,) from one value for each output of `previous` (K / sharing,)."""
    if fold.sharing == 1:
        return own
    heads = own.view(-1, 1, fold.head_dim)
    return heads.expand(-1, fold.sharing, -1).flatten()


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _reading(
    linears: dict[str, nn.Linear], prefix: str, readers: tuple[str, ...], known: tuple[str, ...]
) -> tuple[str, ...]:
    """The linear layers below `prefix` that read its input. Raises ValueError for one that is in neither list."""
    inside = [name for name in linears if name.startswith(prefix)]
    for name in inside:
        if _last(name) not in (*readers, *known):
            raise ValueError(f"{name}: not a linear layer that this family is known to have, so nothing is folded")
    return tuple(name for name in inside if _last(name) in readers)


def _attention_output(layer: nn.Module, linears: dict[str, nn.Linear]) -> Fold:
    """v → o: a head's output is a mean of its value head's rows, whatever the scores are."""
    channels = linears["self_attn.o_proj"].in_features
    fused = linears.get("self_attn.qkv_proj")
    values = (fused.out_features - channels) // 2 if fused is not None else linears["self_attn.v_proj"].out_features
    return Fold(
        "self_attn.v_proj" if fused is None else "self_attn.qkv_proj",
        ("self_attn.o_proj",),
        start=0 if fused is None else fused.out_features - values,
        sharing=channels // values,
        head_dim=int(layer.get_submodule("self_attn").head_dim),  # type: ignore[arg-type]
    )


def _mlp_output(linears: dict[str, nn.Linear], down: str) -> Fold:
    """up → down: activation(gate) · up is linear in up."""
    stem = down.removesuffix("down_proj")
    if f"{stem}up_proj" in linears:
        return Fold(f"{stem}up_proj", (down,))
    # Fused: the gate's rows come first.
    return Fold(f"{stem}gate_up_proj", (down,), start=linears[f"{stem}gate_up_proj"].out_features // 2)
