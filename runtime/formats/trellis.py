"""trellis: 2, 3 or 4 bits a weight, levels that circular sequences of bits give; docs/trellis.md specifies it.

    weight_tiles   uint8 [ceil(N / 16), ceil(K / 16), 32 · bits]: the sequences, each byte's lowest bit first
    weight_levels  int8 [128]: of the states 0..127; state 128 + s is the negative of s
    weight_scale   [N, 1], 16 or 32 bit
    weight_shape   int64 [2] = [N, K]

A tile is 16 outputs by 16 inputs. Its weight t is output t % 64 // 4, input 4 (t // 64) + t % 4, which is the order in
which processors multiply bytes, and has as its state the eight bits of the sequence from bit `bits` · t on; after the
last bit comes the first. The weight is the level of its state times the row's scale. This is a bit-shift trellis as in
QTIP (2406.11235), small enough for its levels to be looked up by byte shuffles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.configuration import WHERE, check_version, our_own
from runtime.formats.packed import PackedWeight, Scheme, Tiles
from runtime.formats.schemes import SCHEMES
from runtime.formats.tensors import (
    SCALES,
    Tensors,
    as_stored,
    expect_shape,
    fetch,
    read_bias,
    round_scale,
    stored_scale_dtype,
    with_bias,
)
from runtime.formats.trellis_levels import LEVELS
from runtime.native.trellis import encode_tiles

BITS = (2, 3, 4)
TILE = 16
STATES = 256
METHOD = "specpress-trellis"
# The least scale, for rows of zeros: no level is 0, and every type of a scale has this number.
LEAST = 2.0**-24


def scheme(bits: int = 3) -> Scheme:
    """Sequences of `bits` a weight, a scale per output row; activations per token. Raises ValueError for other bits."""
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, found {bits}")
    return SCHEMES[f"trellis-{bits}"].scheme()


def states(tiles: Tensor, bits: int) -> Tensor:
    """(…, 256) uint8: the states of sequences (…, 32 · bits) uint8, in the order of the sequence."""
    low = tiles.to(torch.int32)
    pairs = (low | low.roll(-1, dims=-1) << 8).unflatten(-1, (-1, bits))
    # Eight states begin in so many bytes, and each ends where it begins or in the next one.
    eight = [pairs[..., bits * t // 8] >> bits * t % 8 for t in range(8)]
    return torch.stack(eight, dim=-1).to(torch.uint8).flatten(-2)


def signed_levels(levels: Tensor) -> Tensor:
    """(256,): the levels of all states, from those (128,) that files have, in their dtype."""
    return torch.cat([levels, -levels])


def decode(tiles: Tensor, levels: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """Levels (N, K) int8 of tiles (ceil(N / 16), ceil(K / 16), 32 · bits): the weight, but for its row's scale."""
    return signed_levels(levels)[state_grid(tiles, bits, shape).long()]


def state_grid(tiles: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """(N, K) uint8: the state of each weight, of tiles as `decode` takes them."""
    n, k = shape
    down, across = tiles.shape[:2]
    # A tile's weights lie as (4 quads of inputs, 16 outputs, 4 inputs).
    ordered = states(tiles, bits).view(down, across, 4, TILE, 4).permute(0, 3, 1, 2, 4)
    return ordered.reshape(down * TILE, across * TILE)[:n, :k].contiguous()


def pack(
    weight: Tensor,
    group_size: int = 0,
    *,
    bits: int = 3,
    bias: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> PackedWeight:
    """The sequences nearest to (N, K) of any float dtype, all weights counted alike, with the levels of `LEVELS`.

    `scale_dtype` is what scales will be stored in (None: `stored_scale_dtype` of the weight's). Raises ValueError for a
    `group_size` other than 0 and for other bits, UserError where the native library is missing.
    """
    if group_size:
        raise ValueError(f"trellis has one scale per output row (group_size 0), found {group_size}")
    chosen, (n, k), levels = scheme(bits), weight.shape, LEVELS[bits].clone()
    columns = weight.float().T.contiguous()
    scale = row_scale(columns, levels, scale_dtype or stored_scale_dtype(weight.dtype))
    tiles, found = empty_tiles(n, k, bits), torch.empty(k, n, dtype=torch.int8)
    for number, first in enumerate(range(0, k, TILE)):
        some = columns[first : first + TILE]
        encode_tiles(
            bits,
            levels,
            some,
            torch.zeros_like(some),
            scale,
            torch.eye(len(some)),
            torch.ones(len(some)),
            tiles[:, number],
            found[first : first + TILE],
        )
    return PackedWeight(
        chosen,
        found.T.contiguous(),
        scale.unsqueeze(1),
        bias=None if bias is None else bias.float(),
        tiles=Tiles(tiles, levels),
    )


def random_weight(shape: tuple[int, int], bits: int, generator: torch.Generator) -> PackedWeight:
    """Random sequences for a layer (N, K), of variance 1 / K; scales lie within a quarter of one another."""
    tiles = torch.randint(0, 256, empty_tiles(*shape, bits).shape, dtype=torch.uint8, generator=generator)
    levels = LEVELS[bits].clone()
    size = float(levels.float().square().mean().sqrt()) * shape[1] ** 0.5
    scale = round_scale(torch.empty(shape[0], 1).uniform_(0.75, 1.25, generator=generator) / size, torch.bfloat16)
    return PackedWeight(scheme(bits), decode(tiles, levels, bits, shape), scale, tiles=Tiles(tiles, levels))


def row_scale(columns: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """(N,) float32 of `dtype`: the scale that gives levels the size of a row's weights; `columns` is (K, N) float32."""
    return stored_scale(columns.square().mean(dim=0).sqrt() / levels.float().square().mean().sqrt(), dtype)


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales (float32) as a file of `dtype` has them, LEAST or more. Raises ValueError where one overflows it."""
    return round_scale(scale.clamp(min=LEAST), dtype)


def empty_tiles(outputs: int, inputs: int, bits: int) -> Tensor:
    """Room for the sequences of a layer."""
    return torch.empty(-(-outputs // TILE), -(-inputs // TILE), 32 * bits, dtype=torch.uint8)


def to_tensors(
    packed: PackedWeight, prefix: str, dtype: torch.dtype = torch.bfloat16, scale_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The layer's tensors for a file; `dtype` is the model's, which the bias has; scales have `scale_dtype`.

    Raises ValueError for a weight that has no sequences, or other codes than they say, and for a scale or bias that its
    dtype would round.
    """
    tiles = packed.tiles
    if packed.scheme.kind != "trellis" or tiles is None or packed.offset is not None or packed.perm is not None:
        raise ValueError(f"{prefix}: a trellis is written of sequences in input order, found {packed.scheme}")
    if not torch.equal(decode(tiles.sequences, tiles.levels, packed.scheme.bits, packed.shape), packed.codes):
        raise ValueError(f"{prefix}: the codes are others than the sequences say")
    tensors = {
        f"{prefix}.weight_tiles": tiles.sequences.contiguous(),
        f"{prefix}.weight_levels": tiles.levels.contiguous(),
        f"{prefix}.weight_scale": as_stored(
            f"{prefix}.weight_scale", packed.scale, scale_dtype or stored_scale_dtype(dtype)
        ),
        f"{prefix}.weight_shape": torch.tensor(packed.shape, dtype=torch.int64),
    }
    return with_bias(tensors, packed, prefix, dtype)


def holds(tensors: Tensors, prefix: str) -> bool:
    """Whether the layer is stored so."""
    return f"{prefix}.weight_tiles" in tensors


def from_tensors(tensors: Tensors, prefix: str) -> PackedWeight:
    """Reads a layer. Raises UserError naming the tensor that is missing, misshapen or not finite."""
    name = f"{prefix}.weight_shape"
    n, k = (int(size) for size in fetch(tensors, name, torch.int64, shape=(2,)))
    name = f"{prefix}.weight_tiles"
    tiles = fetch(tensors, name, torch.uint8)
    bits = tiles.shape[-1] // 32 if tiles.ndim == 3 else 0
    if bits not in BITS or n < 1 or k < 1:
        raise UserError(
            f"tensor {name} must be (outputs / 16, inputs / 16, 64, 96 or 128) and weight_shape positive, found"
            f" {list(tiles.shape)} and {[n, k]}; fetch the file again"
        )
    expect_shape(name, tiles, (-(-n // TILE), -(-k // TILE), 32 * bits))
    name = f"{prefix}.weight_levels"
    levels = fetch(tensors, name, torch.int8, shape=(STATES // 2,))
    if int(levels.min()) < -127:
        raise UserError(f"tensor {name} must lie in -127..127, found -128, whose negative is no int8; fetch it again")
    scale = fetch(tensors, f"{prefix}.weight_scale", *SCALES, shape=(n, 1)).float()
    return PackedWeight(
        scheme(bits),
        decode(tiles, levels, bits, (n, k)),
        scale,
        bias=read_bias(tensors, prefix, n),
        tiles=Tiles(tiles, levels),
    )


def read(config: Mapping[str, Any], tensors: Tensors, prefix: str, unpack: bool = True) -> PackedWeight | None:
    """A layer under a configuration that has passed `check`; None where it is stored otherwise."""
    return from_tensors(tensors, prefix) if holds(tensors, prefix) else None


def check(config: Mapping[str, Any]) -> None:
    """Raises UserError for a configuration of a later version, or one that is malformed."""
    check_version(config)
    bits = config.get("bits")
    if not isinstance(bits, dict) or not all(isinstance(k, str) and v in BITS for k, v in bits.items()):
        raise UserError(
            f"{WHERE}.bits must give each layer 2, 3 or 4 bits by its module's name, found {str(bits)[:80]}"
        )


def hf_config(layers: Mapping[str, Scheme], skip: Sequence[str] = ()) -> dict[str, Any]:
    """`quantization_config` of config.json: the bits of each layer by module, and the linear modules that stay."""
    return our_own(METHOD, skip, bits={module: one.bits for module, one in sorted(layers.items())})


def as_int8(packed: PackedWeight) -> PackedWeight:
    """Exactly the same weight as int8 rows: levels are int8, and so their rows' scales are int8's.

    Raises ValueError for another kind.
    """
    if packed.scheme.kind != "trellis":
        raise ValueError(f"only a trellis has levels of int8, found {packed.scheme.kind}")
    return replace(packed, scheme=SCHEMES["int8-dynamic"].scheme(), tiles=None)
