"""Two 4-bit codes a byte, as files have them, to one code a byte."""

import torch
from torch import Tensor

from runtime.kernels.native import binding
from runtime.kernels.native.memory import large


def unpack_nibbles(packed: Tensor, minus: int = 0, high_first: bool = False) -> Tensor:
    """(…, n) uint8 to (…, 2n) int8 codes, `minus` taken off each; the first is in the low half, or in the high one.

    The native library does it where there is one: this is most of what loading a 4-bit model costs.
    """
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    library, _ = binding.library()
    if library is not None and packed.device.type == "cpu":
        packed = packed.contiguous()
        codes = large(2 * packed.numel()).view(torch.int8).view(shape)
        pool = binding.pool(binding.default_threads())
        library.specpress_unpack_nibbles(
            pool.handle, packed.data_ptr(), packed.numel(), high_first, minus, codes.data_ptr()
        )
        return codes
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return torch.stack(halves, dim=-1).view(shape).to(torch.int8) - minus
