"""The encoder of the trellis format (trellis_encode.cpp), by ctypes."""

from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.native import binding


class _Task(Structure):
    """trellis.h, TrellisTask."""

    _fields_ = [
        *((name, c_int64) for name in ("bits", "outputs", "inputs", "again", "stride")),
        *(
            (name, c_void_p)
            for name in ("levels", "weights", "carried", "scale", "corner", "spreads", "tiles", "found")
        ),
    ]


def encode_tiles(
    bits: int,
    levels: Tensor,
    weights: Tensor,
    carried: Tensor,
    scale: Tensor,
    corner: Tensor,
    spreads: Tensor,
    tiles: Tensor,
    found: Tensor,
    again: bool = False,
    path: str | None = None,
    threads: int | None = None,
) -> None:
    """The sequences of one column of tiles, by Viterbi's algorithm with GPTQ's feedback inside each tile.

    They minimise Σ spreads_j · (target_j − ŵ_j)² with target_j = weights_j + carried_j + Σ_{i<j} (weights_i − ŵ_i) ·
    corner_ij over the inputs j of every output, ŵ being levels times scale.

    levels            (128,) int8.
    weights, carried  (C, N) float32, C at most 16 inputs.
    scale             (N,) float32.
    corner, spreads   (C, C) and (C,) float32.
    tiles             (ceil(N / 16), 32 · bits) uint8, written; rows may lie apart, bytes of a row may not.
    found             (C, N) int8, written: the levels.

    again    `tiles` and `found` hold sequences already: a new one, which starts and ends in the state's bits in which
             theirs does, takes the place of one that costs more. That takes half the time.
    path     the instructions that are used; None: the fastest that this machine has.
    threads  None: as many as torch computes on.

    The result does not depend on the path, nor on the number of threads. Raises ValueError for tensors that are not so,
    and UserError where the native library is missing.
    """
    count, n = weights.shape
    library, why = binding.library()
    if library is None:
        raise UserError(f"a trellis is encoded by the native library: {why}")
    wanted = {
        "levels": (levels, (128,), torch.int8),
        "weights": (weights, (count, n), torch.float32),
        "carried": (carried, (count, n), torch.float32),
        "scale": (scale, (n,), torch.float32),
        "corner": (corner, (count, count), torch.float32),
        "spreads": (spreads, (count,), torch.float32),
        "tiles": (tiles, (-(-n // 16), 32 * bits), torch.uint8),
        "found": (found, (count, n), torch.int8),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} must be {dtype} {list(shape)} on the CPU, found {tensor.dtype} {list(tensor.shape)}"
            )
    if not 1 <= count <= 16 or bits not in (2, 3, 4) or tiles.stride(1) != 1 or not found.is_contiguous():
        raise ValueError(f"a column of tiles has 1 to 16 inputs and 2 to 4 bits, found {count} and {bits}")
    padded = torch.zeros(16, 16)
    padded[:count, :count] = corner
    counted = torch.zeros(16)
    counted[:count] = spreads
    held = [levels.contiguous(), weights.contiguous(), carried.contiguous(), scale.contiguous(), padded, counted]
    stride = tiles.stride(0) if len(tiles) > 1 else tiles.shape[1]
    task = _Task(bits, n, count, again, stride, *(tensor.data_ptr() for tensor in (*held, tiles, found)))
    pool = binding.pool(threads or torch.get_num_threads())
    path = path or next(name for name in binding.PATHS if binding.usable(name)[0])
    library.specpress_encode_tiles(binding.PATHS[path], pool.handle, byref(task))
