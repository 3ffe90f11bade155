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
    eights = -(-inputs // 8)
    octets = torch.nn.functional.pad(octets, (0, max(0, eights * bits - octets.shape[1])))
    stream = torch.zeros(octets.shape[0], eights, dtype=torch.int32, device=octets.device)
    for byte in range(bits):
        stream |= octets[:, byte : eights * bits : bits].to(torch.int32) << 8 * byte
    half, mask = 1 << bits - 1, (1 << bits) - 1
    codes = torch.empty(octets.shape[0], 8 * eights, dtype=torch.int8, device=octets.device)
    for place in range(8):
        codes[:, place::8] = (stream >> bits * place & mask) - half
    return codes[:, :inputs].contiguous()
