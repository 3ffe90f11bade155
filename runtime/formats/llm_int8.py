"""bitsandbytes' LLM.int8: one absmax per output row (Dettmers et al. 2022); and which of that library's two layouts a
file has.

    weight         int8 [N, K]
    SCB            float32 [N]: the rows' absmax; weights are code · SCB / 127
    weight_format  uint8 scalar, 0: row by row

The library multiplies by SCB first and by 1 / 127 then; here both are one factor, so that a weight can differ by two
units in float32's last place. Its kernels also keep inputs above a threshold in float16: ours round all to int8.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats import int8, nf4
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import Tensors, divided, fetch, read_bias, with_bias


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a configuration of bitsandbytes that is neither nf4's nor LLM.int8's."""
    kind = config.get("bnb_4bit_quant_type")
    four = config.get("load_in_4bit") or config.get("_load_in_4bit")
    eight = config.get("load_in_8bit") or config.get("_load_in_8bit")
    if bool(four) == bool(eight) or (four and kind != "nf4"):
        found = f"bnb_4bit_quant_type {kind!r}" if four else f"load_in_4bit {four!r} and load_in_8bit {eight!r}"
        raise UserError(
            f"config.json: quantization_config: of bitsandbytes' formats nf4 and LLM.int8 are read, found {found}"
        )


def read(config: Mapping[str, Any], tensors: Tensors, prefix: str, unpack: bool = True) -> PackedWeight | None:
    """A layer in either of bitsandbytes' layouts, as its tensors say; None where it is in neither."""
    if nf4.holds(tensors, prefix):
        return nf4.from_tensors(tensors, prefix, unpack).plain()
    return from_tensors(tensors, prefix) if holds(tensors, prefix) else None


def holds(tensors: Tensors, prefix: str) -> bool:
    """Whether the layer is stored in this layout."""
    return f"{prefix}.SCB" in tensors


def from_tensors(tensors: Tensors, prefix: str) -> PackedWeight:
    """Reads a layer. Raises UserError naming the tensor that is missing, misshapen, not finite or in another layout."""
    codes = fetch(tensors, f"{prefix}.weight", torch.int8, matrix=True)
    n = codes.shape[0]
    name = f"{prefix}.weight_format"
    if name in tensors and bool(tensors[name].any()):
        raise UserError(f"tensor {name}: codes row by row (0) are read, found another layout; save the model again")
    scale = divided(fetch(tensors, f"{prefix}.SCB", torch.float32, shape=(n,)), 127.0).unsqueeze(1)
    return PackedWeight(int8.scheme(), codes, scale, bias=read_bias(tensors, prefix, n))


def to_tensors(packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is the bias's.

    Raises ValueError where the layout cannot hold the weight exactly: anything but symmetric int8 rows, and scales
    whose absmax does not give them back.
    """
    kind, size = packed.scheme.kind, packed.scheme.group_size
    if kind != "int8" or size or packed.offset is not None or packed.perm is not None:
        raise ValueError(f"{prefix}: LLM.int8 holds symmetric int8 rows in input order, found {packed.scheme}")
    scale = packed.scale.flatten()
    absmax = (scale.double() * 127).float()
    if not torch.equal(absmax / 127.0, scale):
        raise ValueError(f"{prefix}.SCB: float32 cannot hold 127 times these scales exactly")
    tensors = {
        f"{prefix}.weight": packed.codes.contiguous(),
        f"{prefix}.SCB": absmax,
        f"{prefix}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return with_bias(tensors, packed, prefix, dtype)


def hf_config(skip: Sequence[str] = ()) -> dict[str, Any]:
    """`quantization_config` of config.json; `skip` are the linear modules that stay as they are."""
    return nf4.library_config(8, {}, skip)
