"""Export "gptq": GPTQ's layout, for GPTQModel, transformers (with optimum), vLLM, SGLang and others."""

import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compress.errors import UserError
from compress.export import Exported, Progress, directory
from compress.export.directory import Form
from compress.export.layers import NOTHING_PACKED, Facts, Model, common_bits, common_group, survey
from compress.export.rounding import with_scale_in, with_whole_zeros
from runtime.formats import gptq, int8
from runtime.formats.packed import PackedWeight

# Groups below this make scales and zero points larger than the codes, and no engine takes them.
_LEAST_GROUP = 8
_USUAL_GROUPS = (-1, 16, 32, 64, 128)


def refusal(kinds: frozenset[str]) -> str | None:
    """Why models with layers of these kinds cannot be exported; None where they can."""
    if not kinds:
        return NOTHING_PACKED
    if "nf4" in kinds:
        return (
            "GPTQ's layout holds evenly spaced codes, found nf4, whose codes are not: compress with an int4 recipe, or"
            " export to bitsandbytes"
        )
    return None


def write(model: Path, out: Path, progress: Progress) -> Exported:
    """See compress.export."""
    found = survey(model)
    if found.method == "gptq":
        return directory.copy("gptq", found, out, progress)
    if (why := refusal(frozenset(layer.scheme.kind for layer in found.packed))) is not None:
        raise UserError(f"export gptq: {why}")
    return directory.write("gptq", found, _form(found), out, progress)


def _form(model: Model) -> Form:
    held = [layer for layer in model.packed if _fills_words(layer)]
    plain = [layer for layer in model.packed if not _fills_words(layer)]
    if not held:
        raise UserError("export gptq: no layer's rows and columns fill words of 32 bits: export compressed-tensors")
    bits, size = common_bits(held), common_group(held)
    if size != -1 and size < _LEAST_GROUP:
        raise UserError(
            f"export gptq: the layers' groups of {', '.join(map(str, sorted({h.group for h in held})))} inputs have"
            f" only parts of {size} in common: export compressed-tensors, which takes one size per layer"
        )
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


def _fills_words(layer: Facts) -> bool:
    return all(size * layer.scheme.bits % 32 == 0 for size in layer.shape)


def _notes(held: list[Facts], plain: list[Facts], others: list[Facts], size: int, layout: str) -> list[str]:
    notes = []
    if len({layer.group for layer in held}) > 1 and size != -1:
        notes.append(f"Layers had groups of several sizes: all are cut into groups of {size}, which changes no weight.")
    if size not in _USUAL_GROUPS:
        notes.append(f"Groups of {size} inputs are read by GPTQModel's plain kernels; fast ones take 32, 64 and 128.")
    if layout == "gptq_v2":
        notes.append("Some zero points are 0, which layout gptq cannot say safely: written as gptq_v2.")
    if others:
        notes.append("Layers of other bits stand under `dynamic`, which GPTQModel and vLLM read and transformers not.")
    if plain:
        notes.append(f"{len(plain)} layers do not fill words of 32 bits and are stored plain.")
    if any(layer.static for layer in held):
        notes.append("The static steps of the inputs are left out: this layout rounds weights only.")
    if any(int8.is_expert(layer.prefix) for layer in held):
        notes.append("transformers does not load experts in this layout; vLLM and GPTQModel do.")
    return notes
