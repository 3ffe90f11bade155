"""Rotary position tables of a transformers configuration, grown on demand in blocks of one size."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoints.record import Architecture, HeadShape
from runtime.errors import UserError, fault_of
from runtime.kernels.exact import cos_sin, powers

# Positions by which a table grows.
_BLOCK = 2048
# Types whose frequencies are fixed: those of "dynamic" up to the configuration's last position, beyond which no text
# goes here, those of "longrope" once it is settled how long texts may be (for_context).
STATIC_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope")


def rope_types(config: Any) -> set[str]:
    """The configuration's rotary types, of each set of parameters ("default" where it says none)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    return {"default" if _stretched(part) else part.get("rope_type", "default") for part in sets}


def for_context(config: Any, context: int | None) -> tuple[Any, int | None]:
    """The configuration as texts of up to `context` tokens want it, and how many positions they have then.

    LongRoPE (2402.13753) has two sets of factors. transformers takes the short ones for texts of as many tokens as the
    model was first trained with, and the long ones for longer ones; here all of a decoder's texts take the same. None:
    the short ones. The second is None where it makes no difference.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = {kind: part for kind, part in parameters.items() if isinstance(part, dict)}
    both = [part for part in (sets.values() if sets else [parameters]) if part.get("rope_type") == "longrope"]
    if not both:
        return config, None
    first = [
        part.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for part in both
    ]
    if not all(isinstance(one, int) and one > 0 for one in first):
        raise UserError("config.json: longrope needs original_max_position_embeddings, a positive integer")
    original = min(one for one in first if one is not None)
    if context is None or context <= original:
        return config, original
    config = copy.copy(config)
    longer = {kind: _long(part) for kind, part in sets.items()} if sets else _long(parameters)
    config.rope_parameters = longer
    return config, None


def _long(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the long factors for all texts."""
    if parameters.get("rope_type") != "longrope":
        return dict(parameters)
    return {**parameters, "short_factor": parameters.get("long_factor")}


def _stretched(parameters: Mapping[str, Any]) -> bool:
    """Whether "dynamic" only means another base, as HunYuan's."""
    return parameters.get("rope_type") == "dynamic" and bool(parameters.get("alpha"))


class _Base(float):
    """A base whose powers are rounded exactly: torch's have other last bits on other processors.

    The rest of what transformers computes from it are operations that IEEE 754 rounds, and logarithms of few numbers in
    float64, of which libraries' last bits would have to differ and then decide a rounding to half as many bits.
    """

    def __pow__(self, exponents: Any, modulo: None = None) -> Any:
        return powers(float(self), exponents) if isinstance(exponents, Tensor) else float(self) ** exponents


def frequencies(config: Any, layers: str | float = "", head_dim: int = 0) -> tuple[Tensor, float]:
    """Inverse frequencies (r/2,) float32 and the factor on cos and sin, as transformers computes them.

    layers    the kind of layers whose parameters are meant, where rope_parameters has several sets; or their base.
    head_dim  dimensions of these layers' heads; 0: the configuration's.

    The same bits on every machine. RoFormer (2104.09864); partial rotary dimensions as in Phi; linear, llama3 and yarn
    scaling by transformers.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if isinstance(layers, float):
        parameters = {**parameters, "rope_theta": layers}
    elif layers and layers not in parameters:
        raise UserError(f"config.json: rope_parameters must have {layers}, which some layers are")
    elif layers:
        parameters = parameters[layers]
    kind = parameters.get("rope_type", "default")
    base = _Base(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0)
    if not head_dim:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind == "proportional":
        return _proportional(base, head_dim, parameters), 1.0
    if _stretched(parameters):
        base, kind = _Base(base * float(parameters["alpha"]) ** (head_dim / (head_dim - 2))), "default"
    if kind != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = copy.copy(config)
        with fault_of("config.json", f"rope_parameters of type {kind!r} cannot be used"):
            config.rope_parameters = {**parameters, "rope_theta": base}
            inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return inverse.float(), float(factor)
    share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    # GPT-J's configuration has the number itself.
    rotated = int(head_dim * share) if share else getattr(config, "rotary_dim", None) or head_dim
    return 1.0 / (base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)), 1.0


def _proportional(base: _Base, head_dim: int, parameters: Mapping[str, Any]) -> Tensor:
    """The first frequencies of a whole head: the rest of its pairs do not turn."""
    turning = int((parameters.get("partial_rotary_factor") or 1.0) * head_dim // 2)
    inverse = 1.0 / (base ** (torch.arange(0, 2 * turning, 2, dtype=torch.float32) / head_dim))
    still = torch.zeros(head_dim // 2 - turning)
    return torch.cat((inverse, still)) / (parameters.get("factor") or 1.0)


class RotaryTable:
    """cos and sin (positions, r/2) float32."""

    def __init__(self, config: Any, device: torch.device, layers: str | float = "", head_dim: int = 0):
        self._inverse, self._factor = frequencies(config, layers, head_dim)
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


class RotaryTables:
    """The tables of a model: one for each set of parameters that its layers have, and how its queries grow.

    of  for each layer the number of its table; None: not rotated.
    """

    def __init__(self, config: Any, a: Architecture, device: torch.device):
        """Raises UserError where layers of one shape rotate so many dimensions, and others another number."""
        # Layers of one kind have heads of one size, or each size has a table of its own.
        wanted = [None if kind is None else (kind, a.shape(n).head_dim) for n, kind in enumerate(a.rotations)]
        kinds = sorted({one for one in wanted if one is not None})
        self.of = tuple(None if one is None else kinds.index(one) for one in wanted)
        self._tables = [RotaryTable(config, device, kind, dim if a.head_shapes else 0) for kind, dim in kinds]
        self._widths: dict[HeadShape, int] = {}
        for layer in a.attending:
            if (table := self.of[layer]) is None:
                continue
            width = 2 * self._tables[table].upto(0)[0].shape[1]
            if (other := self._widths.setdefault(a.shape(layer), width)) != width:
                found = sorted((width, other))
                raise UserError(f"config.json: all layers must rotate as many dimensions of a head, found {found}")
        self._shapes = tuple(a.shape(n) for n in range(a.layers))
        self._growth, self._device = a.query_growth, device
        self._grown = torch.empty(0, device=device)
        self._found: tuple[int, tuple[tuple[Tensor, Tensor], ...]] = (0, ())  # for so many positions

    @property
    def count(self) -> int:
        """Tables."""
        return len(self._tables)

    def width(self, layer: int) -> int:
        """Dimensions of a head that rotate, in this layer and those of its shape; 0: none."""
        return self._widths.get(self._shapes[layer], 0)

    def upto(self, position: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Of each table cos and sin of all positions up to this one and maybe more, (P, r/2) contiguous.

        The same object as before where nothing had to grow.
        """
        reach, found = self._found
        if position >= reach:
            found = tuple(table.upto(position) for table in self._tables)
            reach = min((cos.shape[0] for cos, _ in found), default=position + 1)
            self._found = reach, found
        return found

    def at(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Of each table cos and sin of each position, (T, r/2)."""
        return tuple(table.at(positions) for table in self._tables)

    def growth(self, position: int) -> Tensor | None:
        """What queries of all positions up to this one and maybe more are multiplied by, (P,); None: by nothing."""
        if self._growth is None:
            return None
        factor, stretch, offset = self._growth
        while len(self._grown) <= position:
            first = len(self._grown)
            # Logarithms of few numbers, in float64: see _Base.
            new = [1.0 + factor * math.log1p((at + offset) // stretch) for at in range(first, first + _BLOCK)]
            self._grown = torch.cat((self._grown, torch.tensor(new, dtype=torch.float32, device=self._device)))
        return self._grown
