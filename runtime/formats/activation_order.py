"""Activation order on disk: `weight_g_idx` says of each input which group it is of, and codes stay in input order.

In memory codes lie group by group (PackedWeight.perm), so that kernels read whole groups and gather x once.
"""

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.tensors import expect_dtype, expect_shape


def group_index(perm: Tensor, width: int) -> Tensor:
    """(K,) int32: the group of each input, where column j belongs to input perm[j] and groups are `width` columns."""
    index = torch.empty(perm.numel(), dtype=torch.int32)
    index[perm] = torch.arange(perm.numel(), dtype=torch.int32) // width
    return index


def read_order(name: str, index: Tensor, inputs: int, groups: int) -> Tensor | None:
    """(K,) int64 that brings the columns group by group, within a group in input order; None where they lie so.

    `index` is the tensor called `name`. All −1 is compressed-tensors' way of saying that there is no order. Raises
    UserError for another shape or dtype, and where the groups are not inputs / groups columns each.
    """
    expect_dtype(name, expect_shape(name, index, (inputs,)), torch.int32, torch.int64)
    index = index.long()
    if bool((index == -1).all()):
        return None
    width = inputs // groups
    # Looked at first: counts are as many as the largest index says.
    inside = int(index.min()) >= 0 and int(index.max()) < groups
    if not inside or not torch.equal(torch.bincount(index, minlength=groups), torch.full((groups,), width)):
        raise UserError(
            f"tensor {name} must put {width} of the {inputs} inputs into each of {groups} groups, and does not; the"
            " weights are damaged, so fetch them again"
        )
    order = index.argsort(stable=True)
    return None if torch.equal(order, torch.arange(inputs)) else order
