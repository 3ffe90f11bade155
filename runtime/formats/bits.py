"""Codes of 2, 3, 4 or 8 bits as one unbroken stream, the first in the lowest bits: what int32 words are filled with."""

import torch
from torch import Tensor

from runtime.formats.nibbles import unpack_nibbles

WIDTHS = (2, 3, 4, 8)


def pack_bits(raw: Tensor, bits: int) -> Tensor:
    """(N, K) uint8 values below 2^bits, K a multiple of 8, to (N, K · bits / 8) uint8 bytes."""
    if bits == 8:
        return raw
    if bits == 4:
        return raw[:, 0::2] | raw[:, 1::2] << 4
    # Eight codes are `bits` whole bytes.
    stream = torch.zeros(raw.shape[0], raw.shape[1] // 8, dtype=torch.int32, device=raw.device)
    for place in range(8):
        stream |= raw[:, place::8].to(torch.int32) << bits * place
    return torch.stack([(stream >> 8 * byte & 255).to(torch.uint8) for byte in range(bits)], dim=-1).flatten(1)


def unpack_bits(octets: Tensor, inputs: int, bits: int) -> Tensor:
    """(N, at least K · bits / 8) uint8 bytes to (N, K) int8 codes, 2^(bits − 1) taken off each; K = `inputs`."""
    if bits == 4:
        return unpack_nibbles(octets, minus=8)[:, :inputs].contiguous()
    if bits == 8:
        # Turning the top bit takes 128 off, modulo 256.
        return (octets[:, :inputs] ^ 128).contiguous().view(torch.int8)
    fours = -(-inputs // 4)
    index = _fours(octets, fours, bits)
    codes = _table(bits, octets.device).index_select(0, index.flatten()).view(torch.int8)
    return codes.view(octets.shape[0], 4 * fours)[:, :inputs].contiguous()


def _fours(octets: Tensor, count: int, bits: int) -> Tensor:
    """(N, count) int32: each time four codes of 2 or 3 bits, the first in the lowest bits."""
    if bits == 2:
        return octets[:, :count].to(torch.int32)
    # Three bytes are twice four codes.
    octets = torch.nn.functional.pad(octets, (0, max(0, -(-count // 2) * 3 - octets.shape[1])))
    first, middle, last = (octets[:, byte : -(-count // 2) * 3 : 3].to(torch.int32) for byte in range(3))
    return torch.stack((first | (middle & 15) << 8, middle >> 4 | last << 4), dim=-1).flatten(1)[:, :count]


def _table(bits: int, device: torch.device) -> Tensor:
    """(2^(4 · bits),) int32: the four bytes of codes that such a number stands for. A look-up beats shifts by far."""
    numbers = torch.arange(1 << 4 * bits, dtype=torch.int32, device=device).unsqueeze(1)
    places = bits * torch.arange(4, dtype=torch.int32, device=device)
    codes = (numbers >> places & (1 << bits) - 1) - (1 << bits - 1)
    return codes.to(torch.int8).view(torch.int32).squeeze(1)
