"""Rotary position tables of a transformers configuration, grown on demand in blocks of one size."""

import copy
from typing import Any

import torch
from torch import Tensor

from runtime.errors import fault_of
from runtime.kernels.exact import cos_sin, powers

# Positions by which a table grows.
_BLOCK = 2048
# Types whose frequencies are fixed. "dynamic" and "longrope" change with the text's length: the adapter runs those.
STATIC_TYPES = ("default", "linear", "llama3", "yarn")


def rope_type(config: Any) -> str:
    """The configuration's rotary type ("default" where it says none)."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


class _Base(float):
    """A base whose powers are rounded exactly: torch's have other last bits on other processors.

    The rest of what transformers computes from it are operations that IEEE 754 rounds, and logarithms of few numbers in
    float64, of which libraries' last bits would have to differ and then decide a rounding to half as many bits.
    """

    def __pow__(self, exponents: Any, modulo: None = None) -> Any:
        return powers(float(self), exponents) if isinstance(exponents, Tensor) else float(self) ** exponents


def frequencies(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies (r/2,) float32 and the factor on cos and sin, as transformers computes them.

    The same bits on every machine. RoFormer (2104.09864); partial rotary dimensions as in Phi; linear, llama3 and yarn
    scaling by transformers.
    """
    kind = rope_type(config)
    parameters = getattr(config, "rope_parameters", None) or {}
    base = _Base(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0)
    if kind != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = copy.copy(config)
        with fault_of("config.json", f"rope_parameters of type {kind!r} cannot be used"):
            config.rope_parameters = {**parameters, "rope_theta": base}
            inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return inverse.float(), float(factor)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    return 1.0 / (base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)), 1.0


class RotaryTable:
    """cos and sin (positions, r/2) float32."""

    def __init__(self, config: Any, device: torch.device):
        self._inverse, self._factor = frequencies(config)
        self._device = device
        self._count = 0
        empty = torch.empty((0, len(self._inverse)), device=device)
        self._angles = empty, empty

    def upto(self, position: int) -> tuple[Tensor, Tensor]:
        """cos and sin of all positions up to this one and maybe more, (P, r/2) contiguous."""
        while self._count <= position:
            angle = torch.arange(self._count, self._count + _BLOCK, dtype=torch.float32)[:, None] * self._inverse
            cos, sin = ((part * self._factor).to(self._device) for part in cos_sin(angle))
            self._angles = torch.cat((self._angles[0], cos)), torch.cat((self._angles[1], sin))
            self._count += _BLOCK
        return self._angles

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each position, (T, r/2)."""
        cos, sin = self.upto(int(positions.max()) if len(positions) else 0)
        index = positions.to(self._device)
        return cos[index], sin[index]
