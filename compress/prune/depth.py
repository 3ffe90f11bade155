"""Depth pruning: the blocks that change their input least are taken out (ShortGPT: Men et al. 2024, 2403.03853)."""

import re
from collections.abc import Collection, Iterable, Sequence
from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor

from compress.errors import UserError

# Of the share asked for, what the whole file has to lose; and how much more the blocks give up at most for it, where
# the embedding is large: a recipe that says 25 % must not quietly take half of a small model's blocks.
WHOLE = 0.8
MOST = 1.25


def weights_to_remove(share: float, blocks: int, outside: int) -> int:
    """Weights that the blocks have to lose: `share` of them, and more (up to 1.25 · share) until the model has lost
    0.8 · share of all its weights.

    blocks   weights of all blocks; outside: embedding, head and norms, which stay.
    Raises ValueError for a share that is not between 0 and 0.8.
    """
    if not 0 < share < WHOLE:
        raise ValueError(f"expected a share above 0 and below {WHOLE}, found {share}")
    return ceil(max(share * blocks, min(WHOLE * share * (blocks + outside), MOST * share * blocks)))


Config = dict[str, Any]

# Keys of a config.json: the number of blocks; one entry for each block; the number of the first blocks that are so.
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_PER_BLOCK = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "layer_rope_theta",
    "no_rope_layers",
    "num_attention_heads_per_layer",
    "num_key_value_heads_per_layer",
)
_FIRST = ("max_window_layers", "first_k_dense_replace")
# Blocks that read what others have made, or a part of a table with a place for each.
_BOUND = ("num_kv_shared_layers", "hidden_size_per_layer_input", "per_layer_config", "global_head_dim")
# A block's number enters these and nothing in the file can say it otherwise.
_PERIODS = ("attn_layer_period", "expert_layer_period", "interleave_moe_layer_step", "moe_layer_interval")


def influence(batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Block influence: 1 − the mean cosine between a token's hidden state before a block and after it.

    batches  pairs (…, H) of any float dtype, the block's input and output on the same tokens.
    A token that is zero on both sides was not changed; one that is zero on one side only has a cosine of 0.
    Raises ValueError for NaN or Inf, for pairs of different shapes, and for no tokens.
    """
    total, tokens = 0.0, 0
    for before, after in batches:
        if before.shape != after.shape:
            raise ValueError(f"expected states of one shape, found {tuple(before.shape)} and {tuple(after.shape)}")
        # In float64, where the squares of the smallest float32 are not zero.
        x, y = before.double().flatten(0, -2), after.double().flatten(0, -2)
        norms = torch.linalg.vector_norm(x, dim=-1), torch.linalg.vector_norm(y, dim=-1)
        scale = norms[0] * norms[1]
        cosines = (x * y).sum(-1) / scale.where(scale != 0, 1.0)
        cosines[(norms[0] == 0) & (norms[1] == 0)] = 1.0
        total += float(cosines.sum())
        tokens += len(cosines)
    if tokens == 0:
        raise ValueError("no tokens to measure a block's influence on")
    if not isfinite(total):
        raise ValueError("hidden states hold NaN or Inf")
    return 1 - total / tokens


def choose(influences: Sequence[float], weights: Sequence[int], outside: int, share: float) -> tuple[int, ...]:
    """The blocks to take out, ascending: the least influential ones, until `share` of the block weights is gone.

    influences  of each block; of equal ones the later goes first.
    weights     of each block; outside: weights that are in no block (see `weights_to_remove`: they may make it one
                block more).
    Raises UserError where no block would be left, ValueError for lists of different lengths.
    """
    wanted = weights_to_remove(share, sum(weights), outside)
    dropped: list[int] = []
    by_influence = zip(influences, (-block for block in range(len(weights))), weights, strict=True)
    for _, negative, own in sorted(by_influence):
        if wanted <= 0:
            break
        dropped.append(-negative)
        wanted -= own
    if len(dropped) == len(weights):
        raise UserError(
            f"depth pruning: expected a share that leaves a block, found {share} of {len(weights)} blocks: ask for less"
        )
    return tuple(sorted(dropped))


def renumber(names: Iterable[str], blocks_at: str, dropped: Collection[int]) -> dict[str, str]:
    """Old name → new name of every tensor that stays, those outside the blocks included.

    blocks_at  the module that holds the blocks ("model.layers"); checkpoints that leave out "model." are fine.
    """
    parts = blocks_at.split(".")
    prefixes = "|".join(re.escape(".".join(parts[i:])) for i in range(len(parts)))
    pattern = re.compile(rf"({prefixes})\.(\d+)\.(.+)")
    out: dict[str, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            out[name] = name
        elif int(match[2]) not in dropped:
            number = int(match[2]) - sum(block < int(match[2]) for block in dropped)
            out[name] = f"{match[1]}.{number}.{match[3]}"
    return out


def shorten_config(config: Config, dropped: Collection[int]) -> Config:
    """config.json of the model without the dropped blocks: their number, and everything that is said block by block.

    What a family works out from a block's number (sliding windows in turn, dense layers among experts) is written out
    for the blocks that stay, so that each stays what it was.
    Raises UserError where a block's number enters its arithmetic.
    """
    from transformers import AutoConfig

    check_config(config)
    built = AutoConfig.for_model(**_with_infinities(config))
    layers = int(built.num_hidden_layers)
    kept = [block for block in range(layers) if block not in dropped]
    out = dict(config)
    for key in _COUNTS:
        if key in config:
            out[key] = len(kept)
    for key in _PER_BLOCK:
        entries = config.get(key) or getattr(built, key, None)
        if isinstance(entries, list) and len(entries) == layers and (key in config or len(set(entries)) > 1):
            out[key] = [entries[block] for block in kept]
    dense = _dense_blocks(config, layers)
    if dense is not None:
        out |= {"decoder_sparse_step": 1, "mlp_only_layers": [new for new, old in enumerate(kept) if old in dense]}
    for key in _FIRST:
        if isinstance(config.get(key), int):
            out[key] = sum(block < config[key] for block in kept)
    return out


def _with_infinities(value: Any) -> Any:
    """With the numbers for which transformers writes mappings, because JSON has none of them."""
    if isinstance(value, dict):
        return (
            float(value["__float__"])
            if set(value) == {"__float__"}
            else {k: _with_infinities(v) for k, v in value.items()}
        )
    return [_with_infinities(one) for one in value] if isinstance(value, list) else value


def check_config(config: Config) -> None:
    """Raises UserError for a config.json whose blocks depend on their number, or on one another."""
    by_number = [key for key in _BOUND if config.get(key)]
    by_number += [key for key in _PERIODS if isinstance(config.get(key), int) and config[key] > 1]
    if config.get("scale_attn_by_inverse_layer_idx"):
        by_number.append("scale_attn_by_inverse_layer_idx")
    if by_number:
        raise UserError(
            "config.json: depth pruning expected blocks that do not depend on their number, found"
            f" {by_number[0]} = {config[by_number[0]]}: use another method"
        )


def _dense_blocks(config: Config, layers: int) -> set[int] | None:
    """The blocks of a Qwen mixture of experts that have an ordinary MLP; None for models that do not say it so."""
    if "decoder_sparse_step" not in config and "mlp_only_layers" not in config:
        return None
    step, only = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return {block for block in range(layers) if block in only or (block + 1) % step}
