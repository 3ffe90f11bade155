"""Width pruning: every block loses key/value heads (with their query heads) and MLP channels; the rest is refitted.

The sizes are one decision for the whole model, made from its configuration before the first block, because a
config.json has one number for all blocks. Which heads and channels stay is each block's own choice, from its own
inputs. The result is an ordinary smaller model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.errors import UserError
from compress.prune.depth import weights_to_remove
from compress.prune.masks import finite
from compress.prune.sparsegpt import check_hessian, cholesky, ridge
from runtime.checkpoints.architecture import describe
from runtime.checkpoints.families import LLAMA

# Rounds in which groups are removed: after each one the rest is scored again, because two groups that say the same
# are both cheap until one of them is gone.
_ROUNDS = 32


def choose(weight: Tensor, hessian: Tensor, size: int, keep: int, damping: float = 0.01) -> Tensor:
    """(keep,) int64, ascending: the groups to keep, K / size of them being there, removing the cheapest by and by.

    weight   (N, K), any float dtype: the layer whose inputs are removed; hessian (K, K), the mean of x xᵀ.
    size     adjacent inputs in a group.
    A group S costs tr(W_S (P_SS)⁻¹ W_Sᵀ) with P the damped Hessian's inverse: the squared output error that is left
    when the other inputs are refitted (optimal brain surgeon by groups, as in ZipLM: 2302.04089).
    Raises ValueError for sizes that do not fit, and as `check_hessian` says.
    """
    inputs = weight.shape[1]
    if inputs % size or not 0 < keep <= inputs // size:
        raise ValueError(f"cannot keep {keep} groups of {size} out of {inputs} inputs")
    check_hessian(hessian, inputs)
    alive = torch.arange(inputs // size)
    if keep == len(alive):
        return alive
    inverse = torch.cholesky_inverse(cholesky(hessian, damping)[0])
    columns = weight.float().T.clone(memory_format=torch.contiguous_format)
    batch = -(-(len(alive) - keep) // _ROUNDS)
    while len(alive) > keep:
        count = min(batch, len(alive) - keep)
        # A stable sort: of equal groups the first go, whatever the machine.
        order = _costs(columns, inverse, alive, size).argsort(stable=True)
        gone, alive = alive[order[:count]], alive[order[count:].sort().values]
        # What is left is refitted, and the inverse with it, in place.
        gone = members(gone, size)
        rows = inverse[gone]
        lower = torch.linalg.cholesky(rows[:, gone])
        half = torch.linalg.solve_triangular(lower, rows, upper=False)
        inverse.addmm_(half.T, half, alpha=-1)
        columns.addmm_(half.T, torch.linalg.solve_triangular(lower, columns[gone], upper=False), alpha=-1)
    return alive


def members(groups: Tensor, size: int) -> Tensor:
    """The inputs of groups of `size` adjacent ones."""
    return (groups[:, None] * size + torch.arange(size)).flatten()


def refit(weight: Tensor, hessian: Tensor, kept: Tensor, damping: float = 0.01) -> Tensor:
    """W H[:, kept] (H[kept, kept])⁻¹, (N, kept) float32: the weight whose output from the kept inputs is nearest to the
    whole one's. Damping draws it towards the weight as it was. Raises ValueError as `check_hessian` says.
    """
    check_hessian(hessian, weight.shape[1])
    wide = weight.float()
    among = hessian[kept][:, kept].float()
    factor, used = cholesky(among, damping)
    wanted = hessian[kept].float() @ wide.T + ridge(among, used) * wide[:, kept].T
    return torch.cholesky_solve(wanted, factor).T.contiguous()


def _costs(columns: Tensor, inverse: Tensor, alive: Tensor, size: int) -> Tensor:
    if size == 1:
        return columns[alive].square().sum(1) / inverse.diagonal()[alive].clamp_min(torch.finfo(torch.float32).tiny)
    found = []
    for group in alive.tolist():
        here = slice(group * size, (group + 1) * size)
        lower = torch.linalg.cholesky(inverse[here, here])
        found.append(torch.linalg.solve_triangular(lower, columns[here], upper=False).square().sum())
    return torch.stack(found)


Config = dict[str, Any]

O_PROJ, DOWN_PROJ = "self_attn.o_proj", "mlp.down_proj"
# What kernels and quantised groups like the number of channels to be a multiple of, where that costs little.
_MULTIPLES = (128, 64, 32, 16, 8)
_LITTLE = 1 / 12


@dataclass(frozen=True)
class Sizes:
    """The sizes of every block that width pruning changes, and head_dim, which it does not."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @property
    def group(self) -> int:
        """Inputs of o_proj that belong to one key/value head."""
        return self.heads // self.kv_heads * self.head_dim


def sizes(config: Config) -> Sizes:
    """The sizes in a config.json.

    Raises UserError where the model is not of the decoder's family, or has experts.
    """
    known = describe(config)
    if known is None or known.model_type not in LLAMA or known.experts is not None:
        found = config.get("model_type")
        raise UserError(
            "width pruning: expected a dense model of the Llama family, found "
            f"{'experts in a ' if known and known.experts else ''}model_type {found!r}: use depth pruning"
        )
    return Sizes(known.heads, known.kv_heads, known.head_dim, known.intermediate)


def shrink(config: Config, block: Mapping[str, tuple[int, ...]], outside: int, share: float) -> Sizes:
    """The sizes at which the blocks lose at least `share` of their weights, norms and biases counted.

    block    the shapes of one block's tensors by path inside it; outside: weights that are in no block.
    Where the embedding allows, the whole model loses 0.8 · share too (see `weights_to_remove`). Attention loses no more
    key/value heads than `share` of them, as many as leave a configuration that transformers accepts (its Llama wants
    heads that divide the hidden size); the MLP gives the rest, rounded down to a multiple of up to 128 channels.
    Raises UserError for a share that the MLP cannot give, and as `sizes` and `weights_to_remove` say.
    """
    before = sizes(config)
    layers = config["num_hidden_layers"]
    total = sum(math.prod(shape) for shape in block.values())
    rows = _rows(before, torch.arange(before.kv_heads), torch.arange(before.intermediate))
    refitted = (f"{O_PROJ}.weight", f"{DOWN_PROJ}.weight")
    # Tensors that lose rows, or columns as the two refitted weights do.
    lost = {name: math.prod(s) for name, s in block.items() if name.rpartition(".")[0] in rows or name in refitted}
    attention, mlp = (sum(n for name, n in lost.items() if name.startswith(part)) for part in ("self_attn.", "mlp."))
    wanted = weights_to_remove(share, layers * total, outside) / layers
    kv_heads = _kv_heads(config, before, share)
    wanted -= attention * (1 - kv_heads / before.kv_heads)
    channels = before.intermediate * (1 - wanted / mlp)
    multiple = next((m for m in _MULTIPLES if m <= before.intermediate * _LITTLE), 1)
    intermediate = int(channels // multiple) * multiple
    if intermediate < multiple:
        raise UserError(
            f"width pruning: expected a share that leaves MLP channels, found {share}, which needs {wanted:.0f} of the"
            f" {mlp} weights of each MLP: ask for less"
        )
    group = before.heads // before.kv_heads
    return Sizes(kv_heads * group, kv_heads, before.head_dim, intermediate)


def narrow_config(config: Config, after: Sizes) -> Config:
    """config.json with the new sizes; head_dim stands there even where it was the quotient of the old ones."""
    return config | {
        "num_attention_heads": after.heads,
        "num_key_value_heads": after.kv_heads,
        "head_dim": after.head_dim,
        "intermediate_size": after.intermediate,
    }


def narrow(
    tensors: Mapping[str, Tensor], hessians: Mapping[str, Tensor], before: Sizes, after: Sizes, damping: float = 0.01
) -> dict[str, Tensor]:
    """The tensors of one block at its new sizes, by path inside it, in the dtypes they had.

    tensors   all of the block's, by path inside it ("self_attn.q_proj.weight"), separate or fused as in Phi-3.
    hessians  mean of x xᵀ of the inputs of "self_attn.o_proj" and "mlp.down_proj"; a part that keeps its size needs
              none and stays as it is.
    Raises ValueError for tensors that have not the sizes in `before`, and as `choose` says.
    """
    out = dict(tensors)
    kept = []
    for path, size, keep, count in (
        (O_PROJ, before.group, after.kv_heads, before.kv_heads),
        (DOWN_PROJ, 1, after.intermediate, before.intermediate),
    ):
        weight = tensors[f"{path}.weight"]
        if weight.shape[1] != size * count:
            raise ValueError(f"{path}: expected {size * count} inputs, found {weight.shape[1]}")
        if keep == count:
            kept.append(torch.arange(count))
            continue
        if not finite(weight):
            raise ValueError(f"{path}: the weight holds NaN or Inf")
        kept.append(choose(weight, hessians[path], size, keep, damping))
        fitted = refit(weight, hessians[path], members(kept[-1], size), damping)
        out[f"{path}.weight"] = fitted.to(weight.dtype)
    rows = _rows(before, *kept)
    for name, tensor in tensors.items():
        if (found := rows.get(name.rpartition(".")[0])) is not None:
            chosen, expected = found
            if len(tensor) != expected:
                raise ValueError(f"{name}: expected {expected} rows, found {len(tensor)}")
            out[name] = tensor[chosen].contiguous()
    return out


def _rows(before: Sizes, heads: Tensor, channels: Tensor) -> dict[str, tuple[Tensor, int]]:
    """By the path of a layer that loses rows, of weight and bias: those that stay, and how many it must have."""
    queries, keys = members(heads, before.group), members(heads, before.head_dim)
    query_rows, key_rows, width = before.heads * before.head_dim, before.kv_heads * before.head_dim, before.intermediate
    fused = torch.cat((queries, query_rows + keys, query_rows + key_rows + keys))
    return {
        "self_attn.q_proj": (queries, query_rows),
        "self_attn.k_proj": (keys, key_rows),
        "self_attn.v_proj": (keys, key_rows),
        "self_attn.qkv_proj": (fused, query_rows + 2 * key_rows),
        "mlp.gate_proj": (channels, width),
        "mlp.up_proj": (channels, width),
        "mlp.gate_up_proj": (torch.cat((channels, width + channels)), 2 * width),
    }


def _kv_heads(config: Config, before: Sizes, share: float) -> int:
    """The fewest key/value heads, of at least 1 − share of them, with which transformers takes the configuration."""
    group = before.heads // before.kv_heads
    for kv_heads in range(1, before.kv_heads):
        after = Sizes(kv_heads * group, kv_heads, before.head_dim, before.intermediate)
        if kv_heads >= (1 - share) * before.kv_heads and _accepted(narrow_config(config, after)):
            return kv_heads
    return before.kv_heads


def _accepted(config: Config) -> bool:
    """Whether transformers builds its configuration: each family checks its heads in its own way."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        AutoConfig.for_model(**config)
    except (StrictDataclassError, ValueError):
        return False
    return True
