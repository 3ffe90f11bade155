"""Export "awq": AWQ's layout "gemm" of 4 bits, for transformers (with GPTQModel), vLLM, SGLang and others."""

import torch
from torch import Tensor

from compress.errors import UserError
from compress.export import told
from compress.export.directory import Form, Layout, evenly_spaced
from compress.export.layers import (
    LEAST_GROUP,
    Facts,
    Model,
    check_group,
    common_group,
    group_notes,
    to_int4,
    with_scale_in,
    with_whole_zeros,
)
from runtime.formats import awq, int8
from runtime.formats.packed import PackedWeight

# For layers that are rounded again where no other layer says a size: the largest that divides all of their rows.
_GROUPS = (128, 64, 32, 16)


def _form(model: Model) -> Form:
    fitting = [layer for layer in model.packed if layer.shape[0] % 8 == 0 and not layer.is_head]
    exact = [layer for layer in fitting if _is_held(layer)]
    rounded = [layer for layer in fitting if not _is_held(layer)]
    # Where nothing is held exactly: the largest usual size that divides the rows of all layers, or else of most.
    most = max(_GROUPS, key=lambda size: (sum(layer.shape[1] % size == 0 for layer in rounded), size))
    size = common_group(exact) if exact else most
    check_group("awq", exact, size)
    if size != -1:
        rounded = [layer for layer in rounded if layer.shape[1] % size == 0]
    plain = [layer for layer in model.packed if layer not in exact and layer not in rounded]
    if not exact and not rounded:
        raise UserError(f"export awq: no layer has outputs in eights and groups of {size}: export compressed-tensors")

    def store(layer: Facts, weight: PackedWeight) -> dict[str, Tensor]:
        if layer in rounded:
            weight = to_int4(weight, max(size, 0), torch.float16)
        ready = with_scale_in(with_whole_zeros(weight), torch.float16)
        return awq.to_tensors(ready, layer.prefix, model.dtype, group_size=size)

    notes = told(
        *group_notes(exact, size),
        any(layer.scheme.bits < 4 for layer in exact)
        and "Codes of fewer bits are stored in 4, the only width of this layout: same weights, larger file.",
        rounded
        and f"{len(rounded)} layers have more than 4 bits, inputs in activation order or small groups, which this"
        " layout cannot hold: they are rounded again.",
        plain and f"{len(plain)} layers have shapes or groups that do not fit, or are the head, and are stored plain.",
        any(int8.is_expert(layer.prefix) for layer in (*exact, *rounded))
        and "transformers does not load experts in this layout; vLLM does.",
    )
    skip = [*model.skipped, *(layer.prefix for layer in plain)]
    return Form(awq.hf_config(size, skip), store, notes, plain)


def _is_held(layer: Facts) -> bool:
    """Whether the codes can be repacked: at most 4 bits, in input order, in groups that are not tiny."""
    return layer.group >= LEAST_GROUP and layer.scheme.bits <= 4 and not layer.reordered


LAYOUT = Layout("awq", evenly_spaced("AWQ's layout"), _form)
refusal, write = LAYOUT.refusal, LAYOUT.write
