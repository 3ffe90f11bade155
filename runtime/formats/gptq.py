"""GPTQ's layout, as AutoGPTQ began it and GPTQModel and transformers write it: codes and zero points count from 0.

    qweight  int32 [K · bits / 32, N]: codes along K, the first in the lowest bits
    qzeros   int32 [G, N · bits / 32]: zero points along N; "gptq" stores them less one, "gptq_v2" as they are
    scales   float16 (or bfloat16, float32) [G, N]
    g_idx    int32 [K]: the group of each input; k // group_size, or in activation order any
    bias     [N]

Weights are (code − zero) · scale, of 2, 3, 4 or 8 bits; codes of 3 bits run across the borders of words. In memory
codes are signed, 2^(bits − 1) less than here, and so are zero points: a layer whose zero points are all 2^(bits − 1)
is symmetric, whatever config.json says.

"gptq" stores a zero point of 0 as the highest code, for it wraps around. Readers that add one to a whole word instead
of to each field carry into the neighbour there, so such weights are written as "gptq_v2".
"""

import re
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.codes import group_index, pack_words, read_order, unpack_words, whole_zeros
from runtime.formats.configuration import WHERE
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import SCALES, Tensors, check_codes, expect_shape, fetch, in_first, read_bias, with_bias

BITS = (2, 3, 4, 8)
Layout = Literal["gptq", "gptq_v2"]
_LAYOUTS = ("gptq", "gptq_v2")
# Where the last group is short, all are cut into equal parts, and parts below this are a damaged file.
_SMALLEST = 4


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a configuration that is malformed, or whose layout is not read."""
    found = layout(config)
    if found not in _LAYOUTS:
        raise UserError(f"{WHERE}: of GPTQ's layouts 'gptq' and 'gptq_v2' are read, found {found!r}; convert the model")
    if (words := config.get("pack_dtype", "int32")) not in ("int32", "torch.int32"):
        raise UserError(f"{WHERE}.pack_dtype must be 'int32', found {words!r}; pack the model into 32-bit words")
    if config.get("is_marlin_format"):
        raise UserError(f"{WHERE}.is_marlin_format: Marlin's own layout is not read; save the model as 'gptq'")
    options(config)


def options(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(bits, group size) of the model and of its `dynamic` overrides. Raises UserError for what is not read."""
    base = {key: config.get(key, default) for key, default in (("bits", None), ("group_size", 128))}
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(v, dict) for v in dynamic.values()):
        raise UserError(f"{WHERE}.dynamic must map expressions to mappings, found {str(dynamic)[:80]}")
    found: dict[tuple[int, int], None] = {}
    for where, over in [("", {}), *((f".dynamic[{key!r}]", value) for key, value in dynamic.items())]:
        bits, size = (over.get(key, value) for key, value in base.items())
        if type(bits) is not int or bits not in BITS or type(size) is not int or (size != -1 and size < 1):
            raise UserError(
                f"{WHERE}{where}: GPTQ is read with 2, 3, 4 or 8 bits in groups of 1 and more inputs or -1, found bits"
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


def scheme(bits: int, group_size: int, symmetric: bool) -> Scheme:
    """2 to 4 bits run as int4 does, inputs rounded per token and group; 8 bits as int8, inputs per token."""
    if bits == 8:
        return Scheme("int8", 8, group_size, symmetric, "float")
    return Scheme("int4", bits, group_size, symmetric, "int8-group")


def read(config: Mapping[str, Any], tensors: Tensors, prefix: str, unpack: bool = True) -> PackedWeight | None:
    """A layer under a configuration that has passed `check`; None where it is stored plain.

    Which of the `dynamic` overrides a layer is of, its shapes tell: no regular expression out of a file is ever run. A
    short last group cuts all groups into equal parts, which changes no weight. Raises UserError naming the tensor for
    a missing, misshapen, non-finite or contradictory one.
    """
    if f"{prefix}.qweight" not in tensors:
        return None
    words, zeros = (fetch(tensors, f"{prefix}.{part}", torch.int32, matrix=True) for part in ("qweight", "qzeros"))
    scale = fetch(tensors, f"{prefix}.scales", *SCALES, matrix=True)
    expect_shape(f"{prefix}.scales", scale, (scale.shape[0], words.shape[1]))
    n, groups = words.shape[1], scale.shape[0]
    bits, size, inputs = _fit(config, tensors, prefix, words.shape[0], groups)
    name = f"{prefix}.qzeros"
    stored = unpack_words(expect_shape(name, zeros, (groups, -(-n * bits // 32))), n, bits)
    # Signed and with v1's one added back, modulo 2^bits: field by field.
    half = 1 << bits - 1
    raw = stored.to(torch.int16) + half + (1 if layout(config) == "gptq" else 0)
    zero = ((raw & (2 * half - 1)) - half).float().t()
    steps = scale.float().t()
    codes = unpack_words(words.t(), inputs, bits)
    order = read_order(f"{prefix}.g_idx", tensors, inputs, size)
    if inputs % size:
        part = gcd(inputs, size)
        if part < _SMALLEST:
            raise UserError(
                f"tensor {prefix}.scales has groups of {size} for {inputs} inputs, a short last one among them, which"
                f" would have to be cut into groups of {part}; quantise the model with a size that divides its rows"
            )
        index = torch.arange(inputs // part) * part // size
        steps, zero, size = steps[:, index], zero[:, index], part
    steps = steps.contiguous()
    symmetric = not bool(zero.any())
    return PackedWeight(
        scheme(bits, 0 if size >= inputs else size, symmetric),
        codes if order is None else codes[:, order],
        steps,
        offset=None if symmetric else steps * zero,
        perm=order,
        bias=read_bias(tensors, prefix, n),
    )


def _fit(config: Mapping[str, Any], tensors: Tensors, prefix: str, rows: int, groups: int) -> tuple[int, int, int]:
    """(bits, group size, inputs K) of the option of config.json that fits the layer's shapes."""
    name = f"{prefix}.g_idx"
    known = tensors[name].numel() if name in tensors else None
    known_options, fitting = options(config), []
    for bits, wanted in known_options:
        inputs = known if known is not None else rows * 32 // bits
        size = inputs if wanted == -1 else wanted
        if inputs and -(-inputs * bits // 32) == rows and -(-inputs // size) == groups:
            fitting.append((bits, size, inputs))
    if len(fitting) > 1 and name in tensors:
        # Two sizes that give as many groups: the first group, which is never a short one, has the size.
        first = int((tensors[name] == 0).sum())
        fitting = [option for option in fitting if min(option[1], option[2]) == first] or fitting
    if fitting:
        return fitting[0]
    shown = " or ".join(f"{bits} bits in groups of {size}" for bits, size in known_options)
    raise UserError(
        f"tensor {prefix}.qweight has {rows} rows of words and {prefix}.scales {groups} groups"
        f"{'' if known is None else f' for {known} inputs'}, which is not {shown} as config.json has it; the two do"
        " not belong together"
    )


def to_tensors(
    packed: PackedWeight,
    prefix: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    layout: Layout = "gptq",
    group_size: int | None = None,
) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is the bias's. Scales are float16 where that holds them exactly.

    group_size  of the file, where it divides the weight's own: each scale is then repeated. -1: one per row.

    Raises ValueError where the layout cannot hold the weight exactly: another kind, offsets that no whole zero points
    give, zero points of 0 in layout "gptq", shapes that do not fill words, scales that neither 16-bit type holds.
    """
    n, k = packed.shape
    width, zeros = packed.scheme.bits, whole_zeros(packed)
    if packed.scheme.kind not in ("int4", "int8", "ternary") or packed.input_scale is not None or zeros is None:
        raise ValueError(f"{prefix}: GPTQ's layout holds integers with whole zero points, found {packed.scheme}")
    if n * width % 32 or k * width % 32:
        raise ValueError(f"{prefix}: {n} x {k} codes of {width} bits do not fill words of 32 bits")
    own = packed.scheme.group_size or k
    size = own if group_size is None else k if group_size == -1 else group_size
    if own % size or k % size:
        raise ValueError(f"{prefix}: groups of {own} cannot be cut into groups of {size}")
    # float16, which every reader takes, or else bfloat16.
    stored = in_first(packed.scale, torch.float16, torch.bfloat16)
    if stored is None:
        raise ValueError(f"{prefix}.scales: neither float16 nor bfloat16 holds these scales exactly")
    scale = stored.repeat_interleave(own // size, dim=1)
    zeros = zeros.repeat_interleave(own // size, dim=1)
    lowest = 0 if layout == "gptq_v2" else 1
    most = (1 << width) - 1
    raw = zeros + (1 << width - 1)
    if bool((raw < lowest).any()) or bool((raw > most).any()):
        raise ValueError(f"{prefix}: {layout} holds zero points of {lowest} to {most}, found others; write gptq_v2")
    perm = torch.arange(k) if packed.perm is None else packed.perm.long()
    half = 1 << width - 1
    codes = check_codes(prefix, packed.codes, -half, half - 1)[:, perm.argsort()]
    tensors = {
        f"{prefix}.qweight": pack_words(codes, width).t().contiguous(),
        f"{prefix}.qzeros": pack_words((zeros - (1 - (layout == "gptq_v2"))).to(torch.int8).t(), width),
        f"{prefix}.scales": scale.t().contiguous(),
        f"{prefix}.g_idx": group_index(perm, size),
    }
    return with_bias(tensors, packed, prefix, dtype)
