"""GPTQ's `quantization_config`: what of it is read, and what is written."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from runtime.errors import UserError

BITS = (2, 3, 4, 8)
Layout = Literal["gptq", "gptq_v2"]
_LAYOUTS = ("gptq", "gptq_v2")
_WHERE = "config.json: quantization_config"


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a configuration that is malformed, or whose layout is not read."""
    found = layout(config)
    if found not in _LAYOUTS:
        raise UserError(
            f"{_WHERE}: of GPTQ's layouts 'gptq' and 'gptq_v2' are read, found {found!r}; convert the model"
        )
    if (words := config.get("pack_dtype", "int32")) not in ("int32", "torch.int32"):
        raise UserError(f"{_WHERE}.pack_dtype must be 'int32', found {words!r}; pack the model into 32-bit words")
    if config.get("is_marlin_format"):
        raise UserError(f"{_WHERE}.is_marlin_format: Marlin's own layout is not read; save the model as 'gptq'")
    options(config)


def options(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(bits, group size) of the model and of its `dynamic` overrides. Raises UserError for what is not read."""
    base = {key: config.get(key, default) for key, default in (("bits", None), ("group_size", 128))}
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(v, dict) for v in dynamic.values()):
        raise UserError(f"{_WHERE}.dynamic must map expressions to mappings, found {str(dynamic)[:80]}")
    found: dict[tuple[int, int], None] = {}
    for where, over in [("", {}), *((f".dynamic[{key!r}]", value) for key, value in dynamic.items())]:
        bits, size = (over.get(key, value) for key, value in base.items())
        if type(bits) is not int or bits not in BITS or type(size) is not int or (size != -1 and size < 1):
            raise UserError(
                f"{_WHERE}{where}: GPTQ is read with 2, 3, 4 or 8 bits in groups of 1 and more inputs or -1, found bits"
                f" {bits!r}, group_size {size!r}"
            )
        found[bits, size] = None
    return list(found)


def layout(config: Mapping[str, Any]) -> Any:
    """Which layout the tensors are in, as the file says it."""
    # AutoGPTQ and GPTQModel before 6 say checkpoint_format, the others format; the first files say neither.
    return config.get("checkpoint_format") or config.get("format") or "gptq"


def hf_config(
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    reordered: bool,
    layout: Layout = "gptq",
    layers: Sequence[str] | None = None,
    plain: Sequence[str] = (),
) -> dict[str, Any]:
    """`quantization_config` of config.json.

    layers  all packed linear modules of the blocks, where some of the blocks' are left as they are (`plain`): the first
            list is for transformers, the second for GPTQModel. The head is outside the blocks and needs no mention.
    """
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": reordered,
        "sym": symmetric,
        "lm_head": False,
        "true_sequential": True,
        "static_groups": False,
        # transformers wants one, whatever the calibration was.
        "damp_percent": 0.01,
        "checkpoint_format": layout,
        "pack_dtype": "int32",
    }
    if plain:
        config["modules_in_block_to_quantize"] = [list(layers or ())]
        config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in plain}
    return config
