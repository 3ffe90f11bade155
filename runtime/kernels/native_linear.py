"""A weight in the kernels' blocks: checked here, repacked once, and kept alive as long as anything points to it."""

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runtime.formats import dequantize, schemes
from runtime.formats.codes import with_whole_codes
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import in_first
from runtime.kernels.joined import OfWeight
from runtime.native.binding import BLOCK, KINDS, PATHS, STEPS, Pool, require
from runtime.native.structs import ModelStruct, ProjectionStruct, WeightsStruct

# How rows of codes are stored (pack.h, Rows).
NIBBLES = {"low": 1, "high": 2}
_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Sums of products of int8 codes stay below 2^31 up to this many inputs (127 · 128 each).
MAX_INPUTS = 1 << 17


@dataclass(frozen=True, eq=False)
class NativeWeight:
    """The struct that the kernels read, the tensors it points into, and the bytes that one product reads."""

    struct: WeightsStruct
    tensors: tuple[Tensor, ...]
    nbytes: int

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.struct.outputs, self.struct.inputs

    @property
    def is_float(self) -> bool:
        """Whether the codes are float32 or bfloat16 values."""
        return self.struct.kind in (KINDS["f32"], KINDS["bf16"])

    @property
    def has_planes(self) -> bool:
        """Whether `upper_weight` takes it."""
        return bool(self.struct.kind == KINDS["nested"])


def native_weight(weight: PackedWeight | Tensor, bias: Tensor | None, pool: Pool) -> NativeWeight:
    """Lays out a packed or float (N, K) weight; `bias` (N,) is for float ones (packed ones carry theirs).

    float32 stays so, bfloat16 stays so, float16 becomes float32 (every value exactly). So does fp8, at four times its
    bytes: code times scale has more bits than bfloat16 holds.
    Raises ValueError naming what does not fit: dtypes, shapes, codes out of range, sizes whose sums could overflow.
    """
    if not isinstance(weight, PackedWeight):
        return _float(weight, bias, pool)
    kind = schemes.KINDS.get(weight.scheme.kind)
    if kind is not None and kind.is_float:
        return _float(dequantize(weight), weight.bias, pool)
    return _packed(weight, pool)


def upper_weight(weight: NativeWeight) -> NativeWeight:
    """A weight in two planes, of which the products read the upper one alone (reference.upper_codes): the same memory.

    Raises ValueError for other weights.
    """
    if not weight.has_planes:
        raise ValueError("only int8 weights packed as planes have an upper half of their own")
    struct = WeightsStruct.from_buffer_copy(weight.struct)
    struct.kind = KINDS["upper"]
    codes = weight.tensors[0]
    return NativeWeight(struct, weight.tensors, weight.nbytes - codes.nbytes // 2)


def _float(weight: Tensor, bias: Tensor | None, pool: Pool) -> NativeWeight:
    if weight.ndim != 2 or not weight.is_floating_point() or weight.device.type != "cpu":
        raise ValueError(f"a float weight must be (N, K) on the CPU, found {weight.dtype} {list(weight.shape)}")
    kind = "bf16" if weight.dtype == torch.bfloat16 else "f32"
    rows = weight.contiguous() if kind == "bf16" else weight.float().contiguous()
    n, k = rows.shape
    struct = _struct(kind, n, k, group=k, groups=1)
    added = None if bias is None else _vector("bias", bias, n)
    tensors = [_lay_out(struct, rows, None, pool)[0]]
    struct.codes = tensors[0].data_ptr()
    if added is not None:
        tensors.append(added)
        struct.bias = added.data_ptr()
    return NativeWeight(struct, tuple(tensors), sum(t.nbytes for t in tensors))


def _packed(weight: PackedWeight, pool: Pool) -> NativeWeight:
    kind = weight.scheme.kind
    row = schemes.KINDS.get(kind)
    product = "" if row is None else row.product or kind
    # Of a trellis whose rows were put in another order the levels alone are left: those of an int8 layer.
    own = kind in KINDS and row is not None and (weight.tiles is not None or not row.has_tiles)
    product = kind if own else product
    if row is None or product not in STEPS:
        raise ValueError(f"no native kernel for {kind} weights")
    if weight.planes and not row.has_planes:
        raise ValueError(f"only int8 weights have planes, found {kind}")
    # Codes are read two a byte where groups are whole 64-byte vectors.
    k = weight.shape[1]
    if k % 8 or (weight.scheme.group_size or k) % 8:
        weight = with_whole_codes(weight)
    codes, n, k = weight.codes, *weight.shape
    dtype = torch.int8 if weight.nibbles is None else torch.uint8
    if codes.ndim != 2 or codes.dtype != dtype or codes.device.type != "cpu":
        shown = str(dtype).removeprefix("torch.")
        raise ValueError(f"codes must be (N, K) {shown} on the CPU, found {codes.dtype} {list(codes.shape)}")
    if k > MAX_INPUTS:
        raise ValueError(f"{k} inputs of {kind} weights could overflow a 32-bit sum (at most {MAX_INPUTS} do not)")
    group = weight.scheme.group_size or k
    groups = -(-k // group)
    struct = _struct("nested" if weight.planes else product, n, k, group, groups)
    struct.bits = weight.scheme.bits
    scale = _per_group("scale", weight.scale, n, groups)
    # Levels are held as integers, in so many parts.
    scale = scale / row.levels if row.levels else scale
    # In 16 bits where those hold them: scales are read with every product.
    scale = scale if (narrow := in_first(scale, torch.bfloat16, torch.float16)) is None else narrow
    offset = None if weight.offset is None else _per_group("offset", weight.offset, n, groups)
    bias = None if weight.bias is None else _vector("bias", weight.bias, n)
    perm, static = weight.order(), weight.static_step()
    for name, tensor in (("perm", perm), ("input_scale", static)):
        if tensor is not None and tensor.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, found it on {tensor.device}")
    # Everything fits. Only from here on pointers are taken.
    sums = torch.empty((-(-n // BLOCK), groups, BLOCK), dtype=torch.int32) if struct.kind == KINDS["int8"] else None
    packed = _lay_out_codes(weight, struct, sums, pool)
    struct.codes, struct.scale, struct.scale_type = packed.data_ptr(), scale.data_ptr(), _SCALE_TYPES[scale.dtype]
    # The table is the format's own, and stays; or it is the layer's.
    levels = row.format.INT8_LEVELS if row.levels else None
    levels = levels if weight.tiles is None else weight.tiles.levels.contiguous()
    struct.levels = None if levels is None else levels.data_ptr()
    tensors = [packed, scale, *([] if weight.tiles is None or levels is None else [levels])]
    for name, values in (("sums", sums), ("offset", offset), ("bias", bias), ("perm", perm), ("input_scale", static)):
        if values is not None:
            tensors.append(values)
            setattr(struct, name, values.data_ptr())
    nbytes = sum(t.nbytes for t in tensors if t is not perm and t is not static)
    return NativeWeight(struct, tuple(tensors), nbytes)


def _struct(kind: str, n: int, k: int, group: int, groups: int) -> WeightsStruct:
    if n < 1 or k < 1 or group < 1:
        raise ValueError(f"a layer needs at least one output and one input, found {n} and {k} in groups of {group}")
    step = STEPS[kind]
    return WeightsStruct(
        kind=KINDS[kind], outputs=n, inputs=k, group=-(-group // step) * step, group_inputs=group, groups=groups
    )


def _lay_out(
    struct: WeightsStruct, rows: Tensor, sums: Tensor | None, pool: Pool, nibbles: int = 0
) -> tuple[Tensor, bool]:
    """The blocks, (bytes,) uint8 on a 64-byte boundary, and whether all codes were the scheme's."""
    library = require()
    size = int(library.specpress_packed_bytes(ctypes.byref(struct)))
    out = pool.arena.allocate(size)
    sums_at = None if sums is None else sums.data_ptr()
    sound = library.specpress_pack(pool.handle, ctypes.byref(struct), rows.data_ptr(), nibbles, out.data_ptr(), sums_at)
    return out, bool(sound)


def _lay_out_codes(weight: PackedWeight, struct: WeightsStruct, sums: Tensor | None, pool: Pool) -> Tensor:
    """The blocks of codes. Raises ValueError for codes out of their range, which are looked at as they are read."""
    if weight.tiles is not None:
        return _lay_out(struct, weight.tiles.sequences.contiguous(), None, pool)[0]
    kind, codes = schemes.KINDS[weight.scheme.kind], weight.codes.contiguous()
    if weight.nibbles is not None:
        struct.zero = -kind.ranges[0][0]
        return _lay_out(struct, codes, None, pool, NIBBLES[weight.nibbles])[0]
    for first, _ in kind.ranges:
        struct.zero = -first if kind.nibbles else 0
        packed, sound = _lay_out(struct, codes, sums, pool)
        if sound:
            return packed
    low, high = (int(v) for v in torch.aminmax(codes))
    if kind.has_fours and low >= -1 and high <= 1:
        raise ValueError(f"of every four {weight.scheme.kind} codes of a row exactly one must be 0, found others")
    shown = " or ".join(f"{first}..{last}" for first, last in kind.ranges)
    raise ValueError(f"{weight.scheme.kind} codes must lie in {shown}, found {low}..{high}")


def _per_group(name: str, values: Tensor, n: int, groups: int) -> Tensor:
    """(N, G) float32 as (blocks, G, 32), outputs that do not exist 0."""
    _check(name, values, (n, groups))
    padded = torch.nn.functional.pad(values.float(), (0, 0, 0, -n % BLOCK))
    return padded.view(-1, BLOCK, groups).transpose(1, 2).contiguous()


def _vector(name: str, values: Tensor, n: int) -> Tensor:
    _check(name, values, (n,))
    return torch.nn.functional.pad(values.float(), (0, -n % BLOCK)).contiguous()


def _check(name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(values.shape) != shape or not values.is_floating_point() or values.device.type != "cpu":
        raise ValueError(
            f"{name} must be float {shape} on the CPU, found {values.dtype} {list(values.shape)} on {values.device}"
        )


WeightPointer = ctypes.POINTER(WeightsStruct)


def project(weights: list[NativeWeight]) -> ProjectionStruct:
    """Layers of one input as one projection. The struct keeps its array of pointers alive, not the weights."""
    pointers = (WeightPointer * len(weights))(*[ctypes.pointer(w.struct) for w in weights])
    return ProjectionStruct(len(weights), pointers)


class Runner:
    """A native decoder without layers: the workspace in which a single projection runs."""

    def __init__(self, weight: NativeWeight, path: str, pool: Pool):
        self._weight, self._pool = weight, pool
        model = ModelStruct(
            hidden=weight.struct.inputs,
            head=ctypes.pointer(weight.struct),
            embedding_scale=1.0,
        )
        self.handle = require().specpress_decoder_new(ctypes.byref(model), PATHS[path], pool.handle)
        weakref.finalize(self, require().specpress_decoder_free, self.handle)


@dataclass(frozen=True, eq=False)
class NativeLinear(OfWeight):
    """y (T, N) = x (T, K) Wᵀ (+ b), float32, in the kernels of one instruction path."""

    weight: NativeWeight
    path: str
    pool: Pool
    _runner: dict[str, Any] = field(default_factory=dict)

    def __call__(self, x: Tensor) -> Tensor:
        """Raises ValueError unless x is (T, K) float32 on the CPU."""
        return self.on(x)()

    def on(self, x: Tensor) -> Callable[[], Tensor]:
        """The product with x as a call that allocates nothing, for whoever makes it again and again on the same memory.

        Each call reads x as it is then, and returns the same y. Raises ValueError as calling the layer does, and what x
        holds is copied where it is not contiguous.
        """
        n, k = self.weight.shape
        if x.ndim != 2 or x.shape[1] != k or x.dtype != torch.float32 or x.device.type != "cpu":
            raise ValueError(f"this layer takes (T, {k}) float32 on the CPU, found {x.dtype} {list(x.shape)}")
        x = x.contiguous()
        y = torch.empty((x.shape[0], n))
        if not self._runner:
            self._runner["it"] = Runner(self.weight, self.path, self.pool)
            self._runner["projection"] = project([self.weight])
        handle, projection = self._runner["it"].handle, ctypes.byref(self._runner["projection"])
        call, read, rows, written = require().specpress_project, x.data_ptr(), x.shape[0], y.data_ptr()

        def product(layer: "NativeLinear" = self, x: Tensor = x) -> Tensor:
            # The defaults keep alive what the pointers point to.
            call(handle, projection, read, rows, written)
            return y

        return product
