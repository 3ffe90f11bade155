"""The schemes, in two tables: what a recipe may name, and the kinds of codes that files hold and kernels multiply.

A new scheme is a format file, a row here, a kernel where it wants one of its own (kernels/reference.py runs every kind
by what its row says) and a recipe. Nothing here imports torch: recipes are checked against these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

Kind = str
Activation = Literal["float", "int8-token", "int8-tensor", "int8-group"]


@dataclass(frozen=True)
class Scheme:
    """How a weight is represented. int3 and int2 are kind "int4" with 3 and 2 bits: the same container, fewer codes.
    int5 is kind "int6" with 5 bits.

    kind        a key of KINDS.
    group_size  inputs that share a scale; 0: one scale per output row.
    activation  how inputs are rounded before the integer product: not at all, per token, per tensor (static), or per
                token and group.
    """

    kind: Kind
    bits: int
    group_size: int
    symmetric: bool
    activation: Activation


@dataclass(frozen=True)
class CodeKind:
    """A kind of codes: how files store them, and what kernels have to know of them.

    module       its format file, with `pack`, `to_tensors` and `from_tensors`.
    library      whose `quantization_config` names it ("compressed-tensors", "bitsandbytes", "bitnet", or our own).
    ranges       lowest and highest code. Of several the first is what our files hold, the others what readers meet.
    layout       compressed-tensors' name for how it is stored; `expert_layout` in experts ("": experts cannot be).
    no_experts   why fused experts stay as they are, where they do.
    nibbles      files have two codes in a byte, counted from `ranges[0][0]`.
    levels       codes are places in the format file's LEVELS, and in its INT8_LEVELS, which are in so many parts of
                 them; 0: codes are numbers themselves.
    is_float     codes are floating-point numbers: kernels multiply by the dequantised weight.
    has_tiles    codes are levels of int8 that sequences of bits give, of as many bits as the scheme says.
    has_fours    of every four codes of a row exactly one is 0, and the four are stored together, in five bits.
    has_planes   codes of 8 bits can be laid out as two planes of nibbles, of which a draft reads the upper one.
    outputs      the library takes multiples of so many outputs (bitsandbytes on processors with AVX-512).
    product      the kind whose integer products multiply these codes, where there are none of their own; "": its own.
    exported_as  the kind that the same weights have where libraries know them; "": its own.
    scale_bytes  what a stored scale takes; `one_scale`: the tensor has a single one.
    more_bytes   tables and descriptions beside codes and scales.
    """

    module: str
    library: str
    ranges: tuple[tuple[int, int], ...]
    layout: str = ""
    expert_layout: str = ""
    no_experts: str = ""
    nibbles: bool = False
    levels: int = 0
    is_float: bool = False
    has_tiles: bool = False
    has_fours: bool = False
    has_planes: bool = False
    outputs: int = 1
    product: Kind = ""
    exported_as: Kind = ""
    scale_bytes: float = 2
    one_scale: bool = False
    more_bytes: int = 0

    @property
    def format(self) -> Any:
        """The format file, imported when it is needed."""
        return import_module(self.module)

    @property
    def largest(self) -> int:
        """The largest magnitude of the integers that kernels multiply."""
        return 127 if self.levels else max(abs(code) for pair in self.ranges for code in pair)


KINDS: Mapping[Kind, CodeKind] = {
    "int8": CodeKind(
        "runtime.formats.int8",
        "compressed-tensors",
        ((-128, 127),),
        layout="int-quantized",
        expert_layout="pack-quantized",
        has_planes=True,
    ),
    "int4": CodeKind(
        "runtime.formats.int4",
        "compressed-tensors",
        ((-8, 7), (0, 15)),
        layout="pack-quantized",
        expert_layout="pack-quantized",
        nibbles=True,
        more_bytes=16,
    ),
    "int6": CodeKind(
        "runtime.formats.int4",
        "compressed-tensors",
        ((-32, 31),),
        layout="pack-quantized",
        expert_layout="pack-quantized",
        product="int8",
        more_bytes=16,
    ),
    "fp8": CodeKind(
        "runtime.formats.fp8",
        "compressed-tensors",
        ((-448, 448),),
        layout="float-quantized",
        no_experts="transformers fuses integers only",
        is_float=True,
    ),
    "nf4": CodeKind(
        "runtime.formats.nf4",
        "bitsandbytes",
        ((0, 15),),
        no_experts="bitsandbytes leaves fused experts alone",
        nibbles=True,
        levels=127,
        outputs=32,
        scale_bytes=1 + 4 / 256,
        more_bytes=4 * (16 + 256),
    ),
    "mxfp4": CodeKind(
        "runtime.formats.mxfp4",
        "mxfp4",
        ((0, 15),),
        nibbles=True,
        levels=2,
        product="nf4",
        scale_bytes=1,
    ),
    "ternary": CodeKind(
        "runtime.formats.ternary",
        "bitnet",
        ((-1, 1),),
        no_experts="bitnet leaves fused experts alone",
        outputs=4,
        one_scale=True,
    ),
    "ternary-1.25": CodeKind(
        "runtime.formats.three_of_four",
        "specpress-ternary",
        ((-1, 1),),
        no_experts="ternary-1.25 has no layout for experts that transformers fuses",
        has_fours=True,
        product="ternary",
        exported_as="ternary",
        more_bytes=16,
    ),
    "trellis": CodeKind(
        "runtime.formats.trellis",
        "specpress-trellis",
        ((-127, 127),),
        no_experts="a trellis has no layout for experts that transformers fuses",
        has_tiles=True,
        product="int8",
        exported_as="int8",
        more_bytes=128 + 16,
    ),
}

# Who checks and reads what a `quant_method` of config.json stands for.
READERS: Mapping[str, str] = {
    "bitsandbytes": "runtime.formats.llm_int8",
    "compressed-tensors": "runtime.formats.compressed_tensors",
    "bitnet": "runtime.formats.ternary",
    "gptq": "runtime.formats.gptq",
    "awq": "runtime.formats.awq",
    "mxfp4": "runtime.formats.mxfp4",
    "specpress-ternary": "runtime.formats.three_of_four",
    "specpress-trellis": "runtime.formats.trellis",
}


@dataclass(frozen=True)
class NamedScheme:
    """A scheme as recipes name it.

    group_sizes  inputs that may share a scale, the default first; (): one scale per output row (ternary: per tensor).
    is_grid      codes are integers of a grid, which GPTQ, AWQ and HQQ know how to choose, and which may have zero
                 points.
    """

    name: str
    kind: Kind
    bits: int
    activation: Activation
    group_sizes: tuple[int, ...] = ()
    is_grid: bool = False

    @property
    def is_static(self) -> bool:
        """Whether inputs are rounded by one step that calibration has found."""
        return self.activation == "int8-tensor"

    @property
    def codes(self) -> CodeKind:
        """What it is stored as."""
        return KINDS[self.kind]

    def scheme(self, group_size: int | None = None, symmetric: bool = True) -> Scheme:
        """With so many inputs to a scale (None: the default; without meaning where it has no groups).

        Raises ValueError for zero points where it has none.
        """
        if not symmetric and not self.is_grid:
            raise ValueError(f"scheme {self.name!r} has no zero points: {', '.join(GRIDS)} have")
        size = self.group_sizes[0] if self.group_sizes and group_size is None else group_size or 0
        return Scheme(self.kind, self.bits, size if self.group_sizes else 0, symmetric, self.activation)


_GROUPS = (128, 64, 32)
SCHEMES: Mapping[str, NamedScheme] = {
    row.name: row
    for row in (
        NamedScheme("int8-dynamic", "int8", 8, "int8-token"),
        NamedScheme("int8-static", "int8", 8, "int8-tensor"),
        NamedScheme("int6", "int6", 6, "int8-group", _GROUPS, is_grid=True),
        NamedScheme("int5", "int6", 5, "int8-group", _GROUPS, is_grid=True),
        NamedScheme("int4", "int4", 4, "int8-group", _GROUPS, is_grid=True),
        NamedScheme("int3", "int4", 3, "int8-group", _GROUPS, is_grid=True),
        NamedScheme("int2", "int4", 2, "int8-group", _GROUPS, is_grid=True),
        NamedScheme("nf4", "nf4", 4, "int8-group", (64,)),
        NamedScheme("ternary", "ternary", 2, "int8-token"),
        NamedScheme("ternary-1.25", "ternary-1.25", 2, "int8-token"),
        NamedScheme("fp8", "fp8", 8, "float"),
        NamedScheme("trellis-2", "trellis", 2, "int8-token"),
        NamedScheme("trellis-3", "trellis", 3, "int8-token"),
        NamedScheme("trellis-4", "trellis", 4, "int8-token"),
    )
}
# What GPTQ can choose codes of.
FITTED = tuple(row.name for row in SCHEMES.values() if row.is_grid or row.codes.has_tiles)
GRIDS = tuple(row.name for row in SCHEMES.values() if row.is_grid)
# What codes of a grid in groups are held as, by their bits.
GRID_KINDS: Mapping[int, Kind] = {row.bits: row.kind for row in SCHEMES.values() if row.is_grid}


def named(name: str) -> NamedScheme:
    """The row of a recipe's scheme. Raises ValueError for an unknown one."""
    if name not in SCHEMES:
        raise ValueError(f"scheme {name!r} is unknown: expected one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def stored_bytes(scheme: Scheme, outputs: int, inputs: int) -> int:
    """Bytes that a layer takes in a file, all but its bias, with scales of 16 bits and inputs in their own order.

    nf4's absmax is counted as doubly quantised, and the JSON that describes it (some 200 bytes) is not.
    """
    kind = KINDS[scheme.kind]
    groups = -(-inputs // (scheme.group_size or inputs))
    in_words = kind.layout == "pack-quantized"
    if kind.has_tiles:
        outputs_stored, inputs_stored = -(-outputs // 16) * 16, -(-inputs // 16) * 16
        return outputs_stored * inputs_stored * scheme.bits // 8 + int(kind.scale_bytes * outputs) + kind.more_bytes
    if kind.has_fours:
        return outputs * -(-5 * -(-inputs // 4) // 8) + int(kind.scale_bytes * outputs) + kind.more_bytes
    codes = 4 * outputs * -(-inputs * scheme.bits // 32) if in_words else outputs * inputs * scheme.bits // 8
    zeros = 0 if scheme.symmetric else 4 * groups * -(-outputs * scheme.bits // 32)
    scales = int(kind.scale_bytes * (1 if kind.one_scale else outputs * groups))
    return codes + zeros + scales + kind.more_bytes
