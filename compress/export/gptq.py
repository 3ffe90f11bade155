"""Export "gptq": GPTQ's layout, for GPTQModel, transformers (with optimum), vLLM, SGLang and others."""

import re
from typing import Any, Literal

import torch
from torch import Tensor

from compress.errors import UserError
from compress.export import directory
from compress.export.directory import Form, Layout
from compress.export.layers import (
    LEAST_GROUP,
    Facts,
    Model,
    check_group,
    common_bits,
    common_group,
    group_notes,
    with_scale_in,
    with_whole_zeros,
)
from runtime.formats import gptq, int8
from runtime.formats.packed import PackedWeight

_REFUSED = {
    "nf4": (
        "GPTQ's layout holds evenly spaced codes, found nf4, whose codes are not: compress with an int4 recipe, or"
        " export to bitsandbytes"
    )
}


def _form(model: Model) -> Form:
    held = [layer for layer in model.packed if _is_held(layer)]
    plain = [layer for layer in model.packed if not _is_held(layer)]
    if not held:
        raise UserError(
            f"export gptq: no layer's rows and columns fill words of 32 bits in groups of {LEAST_GROUP} and more:"
            " export compressed-tensors"
        )
    bits, size = common_bits(held), common_group(held)
    check_group("gptq", held, size)
    # Zero points that are not whole are made so, anywhere in the range.
    lowest = min(0 if h.zeros is None else h.zeros[0] + (1 << h.scheme.bits - 1) for h in held)
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
    others = [layer for layer in held if layer.scheme.bits != bits]
    if others:
        over = {f"+:^{re.escape(layer.prefix)}$": {"bits": layer.scheme.bits} for layer in others}
        config["dynamic"] = config.get("dynamic", {}) | over

    def store(layer: Facts, weight: PackedWeight) -> dict[str, Tensor]:
        if layer in plain:
            return directory.dense(layer, weight, model)
        ready = with_scale_in(with_whole_zeros(weight), torch.float16, torch.bfloat16, torch.float16)
        weightless = PackedWeight(ready.scheme, ready.codes, ready.scale, ready.offset, ready.perm, ready.bias)
        return gptq.to_tensors(weightless, layer.prefix, model.dtype, layout=layout, group_size=size)

    return Form(config, store, tuple(_notes(held, plain, others, size, layout)))


def _is_held(layer: Facts) -> bool:
    return layer.group >= LEAST_GROUP and all(size * layer.scheme.bits % 32 == 0 for size in layer.shape)


def _notes(held: list[Facts], plain: list[Facts], others: list[Facts], size: int, layout: str) -> list[str]:
    notes = group_notes(held, size)
    if layout == "gptq_v2":
        notes.append("Some zero points are 0, which layout gptq cannot say safely: written as gptq_v2.")
    if others:
        notes.append("Layers of other bits stand under `dynamic`, which GPTQModel and vLLM read and transformers not.")
    if any(layer.is_head for layer in held):
        notes.append("The head is packed too, which GPTQModel and vLLM read and transformers not.")
    if plain:
        notes.append(f"{len(plain)} layers do not fill words of 32 bits, or have small groups, and are stored plain.")
    if any(layer.static for layer in held):
        notes.append("The static steps of the inputs are left out: this layout rounds weights only.")
    if any(int8.is_expert(layer.prefix) for layer in held):
        notes.append("transformers does not load experts in this layout; vLLM and GPTQModel do.")
    return notes


LAYOUT = Layout("gptq", _REFUSED, _form)
refusal, write = LAYOUT.refusal, LAYOUT.write
