"""Export "gptq": GPTQ's layout, for GPTQModel, transformers (with optimum), vLLM, SGLang and others."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

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
    with_scale_in,
    with_whole_zeros,
)
from runtime.formats import gptq, int8
from runtime.formats.packed import PackedWeight, Scheme


def _form(model: Model) -> Form:
    held = [layer for layer in model.packed if _is_held(layer)]
    plain = [layer for layer in model.packed if not _is_held(layer)]
    if not held:
        raise UserError(
            f"export gptq: no layer's rows and columns fill words of 32 bits in groups of {LEAST_GROUP} and more:"
            " export compressed-tensors"
        )
    bits, size = Counter(_bits(layer.scheme) for layer in held).most_common(1)[0][0], common_group(held)
    check_group("gptq", held, size)
    # Zero points that are not whole are made so, anywhere in the range.
    lowest = min(0 if h.zeros is None else h.zeros[0] + (1 << _bits(h.scheme) - 1) for h in held)
    layout: Literal["gptq", "gptq_v2"] = "gptq" if lowest >= 1 else "gptq_v2"
    config: dict[str, Any] = gptq.hf_config(
        bits,
        size,
        symmetric=all(layer.zeros == (0, 0) for layer in held),
        reordered=any(layer.reordered for layer in held),
        layout=layout,
        layers=[layer.prefix for layer in held],
        plain=[layer.prefix for layer in plain],
    )
    config["lm_head"] = any(layer.is_head for layer in held)
    others = {layer.prefix: _bits(layer.scheme) for layer in held if _bits(layer.scheme) != bits}
    if others:
        over = {f"+:^{re.escape(prefix)}$": {"bits": width} for prefix, width in others.items()}
        config["dynamic"] = config.get("dynamic", {}) | over

    def store(layer: Facts, weight: PackedWeight) -> dict[str, Tensor]:
        ready = with_scale_in(with_whole_zeros(weight), torch.float16, torch.bfloat16, torch.float16)
        scheme = ready.scheme
        if scheme.bits != _bits(scheme):
            scheme = replace(scheme, kind="int8", bits=8)
        stepless = replace(ready, input_scale=None, scheme=scheme)
        return gptq.to_tensors(stepless, layer.prefix, model.dtype, layout=layout, group_size=size)

    notes = told(
        *group_notes(held, size),
        layout == "gptq_v2" and "Some zero points are 0, which layout gptq cannot say safely: written as gptq_v2.",
        others and "Layers of other bits stand under `dynamic`, which GPTQModel and vLLM read and transformers not.",
        config["lm_head"] and "The head is packed too, which GPTQModel and vLLM read and transformers not.",
        any(layer.scheme.bits != _bits(layer.scheme) for layer in held)
        and "Codes of 5 and 6 bits are stored in 8, a width that this layout has: same weights, larger file.",
        plain and f"{len(plain)} layers do not fill words of 32 bits, or have small groups, and are stored plain.",
        any(layer.static for layer in held)
        and "The static steps of the inputs are left out: this layout rounds weights only.",
        any(int8.is_expert(layer.prefix) for layer in held)
        and "transformers does not load experts in this layout; vLLM and GPTQModel do.",
    )
    return Form(config, store, notes, plain)


def _bits(scheme: Scheme) -> int:
    """The width that codes are stored in."""
    return scheme.bits if scheme.bits in gptq.BITS else 8


def _is_held(layer: Facts) -> bool:
    return layer.group >= LEAST_GROUP and all(size * _bits(layer.scheme) % 32 == 0 for size in layer.shape)


LAYOUT = Layout("gptq", evenly_spaced("GPTQ's layout"), _form)
refusal, write = LAYOUT.refusal, LAYOUT.write
