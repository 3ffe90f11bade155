"""Rotations inside a decoder layer, folded into its weights: the layer computes the same in another basis.

R1 turns the residual stream: what reads it behind a norm is turned back in its columns, what writes to it is turned in
its rows. That needs a norm that only divides by the root mean square, so its weights go into its readers first
(SliceGPT, 2401.15024; QuaRot, 2404.00456). R2 turns each head's values in v_proj's
rows and back in o_proj's columns. Both make weights and activations more alike in size, which rounding likes;
SpinQuant, 2405.16406, has their names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.errors import UserError
from compress.quantize.folding import NORM_OFFSET, Fold, folds
from compress.rotate.hadamard import Rotation, orders

_WRITERS = ("o_proj", "out_proj", "down_proj")


@dataclass(frozen=True)
class Bases:
    """What a model is turned by. None: not at all.

    residual  R1, of the hidden size.
    values    R2, of a head's size, the same in every head and layer.
    back      whether it is undone instead.
    """

    residual: Rotation | None
    values: Rotation | None
    back: bool = False

    def stream(self, x: Tensor) -> Tensor:
        """x (…, hidden), vectors of the residual stream or rows that are multiplied with them, in the other basis."""
        return _move(x, self.residual, self.back)

    def heads(self, x: Tensor) -> Tensor:
        """x (…, heads · size): each head's numbers in the other basis."""
        if self.values is None:
            return x
        return _move(x.unflatten(-1, (-1, self.values.size)), self.values, self.back).flatten(-2)


def _move(x: Tensor, rotation: Rotation | None, back: bool) -> Tensor:
    if rotation is None:
        return x
    return rotation.back(x) if back else rotation.turn(x)


def layer_folds(layer: nn.Module, model_type: str) -> list[Fold]:
    """The layer's folds, of norms and of values, checked for rotations.

    Raises UserError for a family whose structure is not known, and for norms behind attention or the MLP: they multiply
    numbers of the residual stream one by one, which no rotation passes.
    """
    if model_type not in NORM_OFFSET:
        raise UserError(
            f"a {model_type} layer cannot be rotated: it takes RMS norms and linear layers whose order is known "
            f"(known: {', '.join(NORM_OFFSET)}): leave the stage rotate out"
        )
    found = folds(layer, model_type)
    before = {fold.previous for fold in found}
    for name, module in layer.named_children():
        if "norm" in type(module).__name__.lower() and name not in before:
            raise UserError(
                f"a {model_type} layer cannot be rotated: its {name} multiplies what goes into the residual stream, "
                "and only norms before attention and the MLP can be folded: leave the stage rotate out"
            )
    return found


def value_size(layers: Sequence[nn.Module], model_type: str) -> int:
    """The size of the heads that R2 turns.

    Raises UserError where there is not one such size, where heads are gated, and where attention is latent.
    """
    attentions = [found for layer in layers if (found := getattr(layer, "self_attn", None)) is not None]
    if any(hasattr(attention, "kv_b_proj") for attention in attentions):
        raise UserError(
            f"rotate.values: a {model_type} layer makes its values of latent vectors, which are not rotated: set it "
            "false"
        )
    # Such gates come out of q_proj, beside the queries, and multiply the heads' outputs channel by channel.
    if any(hasattr(a, "q_proj") and a.q_proj.out_features != a.o_proj.in_features for a in attentions):
        raise UserError(
            f"rotate.values: a {model_type} layer gates what its heads give, which no rotation passes: set it false"
        )
    sizes = {int(attention.head_dim) for attention in attentions}
    if len(sizes) > 1:
        raise UserError(f"rotate.values: expected heads of one size in all layers, found {sorted(sizes)}: set it false")
    return max(sizes, default=0)


def check_sizes(hidden: int, head_dim: int) -> None:
    """Raises UserError for a size of which no Hadamard matrix is known; 0: not asked for."""
    for what, size in (("hidden size", hidden), ("heads of size", head_dim)):
        if size and orders(size) is None:
            key = "residual" if what == "hidden size" else "values"
            raise UserError(
                f"rotate.{key}: expected a {what} that is a product of known Hadamard matrices' sizes (powers of two, "
                f"12, 20, 28, …), found {size}: set {key}: false"
            )


def rebase(folds: list[Fold], layer: nn.Module, bases: Bases, norms: Mapping[str, Tensor]) -> None:
    """Puts a layer into another basis, in place.

    folds  as `layer_folds` gives them.
    norms  by name, what a norm before attention or the MLP multiplies by afterwards, (hidden,); missing: ones. (Where
           `bases` turns the residual stream.)
    """
    with torch.no_grad():
        for fold in folds:
            previous = layer.get_submodule(fold.previous)
            if isinstance(previous, nn.Linear):
                if fold.linears and fold.linears[0].rpartition(".")[2] == "o_proj":
                    _rebase_values(layer, fold, previous, bases)
            elif bases.residual is not None:
                _rebase_readers(layer, fold, bases, norms.get(fold.previous))
        if bases.residual is None:
            return
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] in _WRITERS and isinstance(module, nn.Linear):
                module.weight.copy_(bases.stream(module.weight.T).T)
                if module.bias is not None:
                    module.bias.copy_(bases.stream(module.bias))


def _rebase_readers(layer: nn.Module, fold: Fold, bases: Bases, after: Tensor | None) -> None:
    norm = layer.get_parameter(f"{fold.previous}.weight")
    before = norm.double() + fold.offset
    for name in (*(f"{linear}.weight" for linear in fold.linears), *fold.others):
        weight = layer.get_parameter(name)
        weight.copy_(rebase_rows(weight, before, bases, after))
    norm.copy_((torch.ones_like(before) if after is None else after) - fold.offset)


def rebase_rows(rows: Tensor, before: Tensor, bases: Bases, after: Tensor | None) -> Tensor:
    """Rows (…, hidden) of what reads the residual stream behind a norm, for the other basis; float64.

    before, after  what the norm multiplies by, (hidden,), now and then; None: ones. Channels that it makes 0 become 0.
    """
    moved = bases.stream(rows * before)
    return moved if after is None else torch.where(after == 0, 0.0, moved / after.double())


def _rebase_values(layer: nn.Module, fold: Fold, previous: nn.Linear, bases: Bases) -> None:
    if bases.values is None:
        return
    readers = [layer.get_parameter(f"{name}.weight") for name in fold.linears]
    rows = slice(fold.start, fold.start + readers[0].shape[1] // fold.sharing)
    previous.weight[rows] = bases.heads(previous.weight[rows].T).T.to(previous.weight.dtype)
    if previous.bias is not None:
        previous.bias[rows] = bases.heads(previous.bias[rows]).to(previous.bias.dtype)
    for weight in readers:
        weight.copy_(bases.heads(weight))
