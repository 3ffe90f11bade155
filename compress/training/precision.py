"""Whether training is quicker in bfloat16 on a device."""

import torch


def has_bfloat16(device: str) -> bool:
    """Whether the device has instructions that multiply bfloat16.

    Without them torch multiplies one number after the other: a step of training took 34 s on an AVX2 processor that
    takes 1.4 s for it in float32.

    device  as torch names it.
    """
    if torch.device(device).type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
