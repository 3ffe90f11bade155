"""A head's transformer blocks, and the keys and values that they remember of each text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention, silu

from runtime.checkpoints.heads.record import HeadLayers
from runtime.kernels.joined import Joined, Linear
from runtime.kernels.reference import rotate
from runtime.model.rotary import RotaryTable

# By the names of record.ACTIVATIONS.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}
# Rows that a memory has room for at first; it doubles.
_ROOM = 256


class TextMemory(Protocol):
    """What a head remembers of one text: rows of consecutive positions from `start` on, but for those skipped.

    Rows behind `kept` belong to a draft, and are forgotten by `forget`.
    """

    start: int
    kept: int

    @property
    def end(self) -> int:
        """The position behind the last one that stays."""

    def rows(self) -> int:
        """How many are held."""

    def keep(self, count: int) -> None:
        """So many rows behind those that stay do, too."""

    def skip(self, count: int) -> None:
        """So many positions behind the end have no row: the next one stands behind them."""

    def forget(self) -> None:
        """Forgets the rows of a draft."""

    def close(self) -> None:
        """Forgets the text."""


class Memory:
    """Keys and values of one text in a head's blocks; see TextMemory."""

    def __init__(self, layers: HeadLayers, start: int, device: torch.device) -> None:
        self.start, self.kept = start, 0
        shape = (layers.count, 2, layers.kv_heads, _ROOM, layers.head_dim)
        self._held, self._ends = torch.empty(shape, device=device), [0] * layers.count

    @property
    def end(self) -> int:
        """The position behind the last one that stays."""
        return self.start + self.kept

    def add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Remembers (n, kv_heads, head_dim) each, and returns all of the layer's, (kv_heads, rows, head_dim)."""
        begin, end = self._ends[layer], self._ends[layer] + len(keys)
        while end > self._held.shape[3]:
            self._held = torch.cat((self._held, torch.empty_like(self._held)), dim=3)
        self._held[layer, 0, :, begin:end] = keys.transpose(0, 1)
        self._held[layer, 1, :, begin:end] = values.transpose(0, 1)
        self._ends[layer] = end
        return self._held[layer, 0, :, :end], self._held[layer, 1, :, :end]

    def keep(self, count: int) -> None:
        """So many rows behind those that stay do, too."""
        self.kept += count

    def skip(self, count: int) -> None:
        """See TextMemory; a window counts rows, so that it reaches further back then."""
        # Keys are turned when they come: those that are there keep their places.
        self.start += count

    def rows(self, layer: int = 0) -> int:
        """How many a layer holds."""
        return self._ends[layer]

    def close(self) -> None:
        """Nothing: its tensors go with it."""

    def forget(self) -> None:
        """Forgets the rows of a draft."""
        self._ends = [self.kept] * len(self._ends)


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one text in a pass: rows first … first + count − 1, behind what its memory holds."""

    memory: TextMemory
    first: int
    count: int


def positions(spans: Sequence[Span]) -> Tensor:
    """(T,) int64: where the rows of a pass stand in their texts."""
    begun = [span.memory.start + span.memory.rows() for span in spans]
    return torch.cat([torch.arange(at, at + span.count) for at, span in zip(begun, spans, strict=True)])


@dataclass(frozen=True)
class HeadBlock:
    """The weights of a block: norms (hidden,) float32, layers on the target's kernels.

    hidden_norm      of the hidden state, where the block reads a token's embedding beside it.
    normed_residual  whether such a block adds to the normed hidden state.
    """

    qkv: tuple[Linear, Linear, Linear]
    out: Linear
    gate_up: Joined
    down: Linear
    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    hidden_norm: Tensor | None = None
    normed_residual: bool = False


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    return rms_norm(x, weight.shape, weight, eps)


@dataclass(frozen=True)
class Pass:
    """What the blocks of a pass have in common.

    spans   of its T rows.
    angles  cos and sin (T, rotated / 2).
    together   whether rows of a span see each other in both directions (a block that is drafted at once), and windows
            count from its first row; else each sees those before it.
    """

    spans: Sequence[Span]
    angles: tuple[Tensor, Tensor]
    together: bool = False


def begin_pass(rotary: RotaryTable | None, spans: Sequence[Span], together: bool = False) -> Pass:
    """A pass of these rows, behind what is remembered now."""
    assert rotary is not None
    return Pass(spans, rotary.at(positions(spans)), together)


def run_block(
    x: Tensor, embedded: Tensor | None, number: int, block: HeadBlock, a: HeadLayers, step: Pass, causal: bool = True
) -> Tensor:
    """The residual stream (T, hidden) behind a block, whose keys and values are remembered.

    embedded  (T, hidden) the tokens' embeddings beside it, for blocks with a hidden_norm.
    causal    of a pass `together`: whether a row sees only those before it after all.
    """
    if block.hidden_norm is None or embedded is None:
        read = normed(x, block.input_norm, a.eps)
    else:
        beside = normed(x, block.hidden_norm, a.eps)
        read = torch.cat((normed(embedded, block.input_norm, a.eps), beside), dim=-1)
        x = beside if block.normed_residual else x
    q, gate = _queries(block.qkv[0](read), block, a)
    q = rotate(q, *step.angles)
    k, v = _keys_values(read, block, a, step.angles)
    mixed = []
    for span in step.spans:
        rows = slice(span.first, span.first + span.count)
        memory = own_memory(span)
        begun = memory.rows(number)
        keys, values = memory.add(number, k[rows], v[rows])
        seen = _seen(begun, span.count, a.windows[number], step.together, causal, x.device)
        mixed.append(attend(q[rows], keys, values, seen, a.head_dim**-0.5))
    whole = torch.cat(mixed)
    x = x + block.out(whole if gate is None else whole * torch.sigmoid(gate))
    up = block.gate_up.split(normed(x, block.mlp_norm, a.eps))
    return x + block.down(_ACTIVATIONS[a.activation](up[0]) * up[1])


def remember(fused: Tensor, number: int, block: HeadBlock, a: HeadLayers, step: Pass) -> None:
    """Remembers keys and values of what a block reads of the target itself, (T, hidden) (dflash, dspark)."""
    k, v = _keys_values(fused, block, a, step.angles)
    for span in step.spans:
        rows = slice(span.first, span.first + span.count)
        own_memory(span).add(number, k[rows], v[rows])


def own_memory(span: Span) -> Memory:
    """The memory of a span, of blocks that are the head's own."""
    assert isinstance(span.memory, Memory)
    return span.memory


def _queries(read: Tensor, block: HeadBlock, a: HeadLayers) -> tuple[Tensor, Tensor | None]:
    """Queries (T, heads, head_dim), and (T, heads · head_dim) what gates attention's output."""
    if not a.gated:
        q, gate = read.view(len(read), a.heads, a.head_dim), None
    else:
        q, beside = read.view(len(read), a.heads, 2 * a.head_dim).chunk(2, dim=-1)
        gate = beside.reshape(len(read), -1)
    return (q if block.q_norm is None else normed(q, block.q_norm, a.eps)), gate


def _keys_values(read: Tensor, block: HeadBlock, a: HeadLayers, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    k, v = (layer(read).view(len(read), a.kv_heads, a.head_dim) for layer in block.qkv[1:])
    return rotate(k if block.k_norm is None else normed(k, block.k_norm, a.eps), *angles), v


def _seen(
    begun: int, count: int, window: int | None, together: bool, causal: bool, device: torch.device
) -> Tensor | None:
    """(count, begun + count) bool: which rows see which; None: all of them."""
    if window is None and (count == 1 or (together and not causal)):
        return None
    at = torch.arange(begun + count, device=device)
    rows = torch.arange(begun, begun + count, device=device).unsqueeze(1)
    seen = (at <= rows) if causal or not together else (at >= 0).expand(count, -1)
    if window is None:
        return seen
    # A block that is drafted at once sees all of itself, and a window before its first row.
    return seen & (at >= begun - window) if together else seen & (at > rows - window)


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """(n, heads · head_dim) of queries (n, heads, head_dim) over keys and values (kv_heads, m, head_dim).

    seen  (n, m) bool: which; None: all.
    """
    grouped = q.transpose(0, 1).unsqueeze(0)
    found = scaled_dot_product_attention(
        grouped, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=seen, scale=scale, enable_gqa=True
    )
    return found.squeeze(0).transpose(0, 1).reshape(len(q), -1)
