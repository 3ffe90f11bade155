"""A published head on the target's kernels: what it reads, its passes, and its logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.checkpoints.heads.record import HeadDescription
from runtime.kernels.joined import Linear
from runtime.model.rotary import RotaryTable
from runtime.speculative.heads.blocks import (
    HeadBlock,
    Memory,
    Span,
    TextMemory,
    begin_pass,
    normed,
    remember,
    run_block,
)
from runtime.speculative.heads.markov import Confidence, Markov
from runtime.speculative.heads.own_layer import CachedMemory, OwnLayer


@dataclass(frozen=True)
class Head:
    """A head that runs.

    table       (vocabulary, hidden): embeddings, by `scale` too small; its own or the target's.
    lm_head     to the draft vocabulary; its own or the target's.
    norm        (hidden,) before it.
    fc          of hidden states side by side; None of mtp, which reads one.
    fuse_norms  one for all of them, one for each, or none; `fused_norm` behind.
    join        of an embedding and a hidden state, with a norm for each (mtp).
    final_norm  the target's last norm and its epsilon (mtp).
    tokens      (draft vocabulary,) int64 of the target's; None: the same.
    unknown     (1, fused) what stands for hidden states that are not known (peagle).
    own_layer   the model's own layer in place of blocks, whose positions it knows (mtp).
    """

    about: HeadDescription
    blocks: tuple[HeadBlock, ...]
    rotary: RotaryTable | None
    table: Tensor
    scale: float
    lm_head: Linear
    norm: Tensor
    fc: Linear | None = None
    fuse_norms: tuple[Tensor, ...] = ()
    fused_norm: Tensor | None = None
    join: Linear | None = None
    join_norms: tuple[Tensor, ...] = ()
    final_norm: tuple[Tensor, float] | None = None
    tokens: Tensor | None = None
    unknown: Tensor | None = None
    markov: Markov | None = None
    confidence: Confidence | None = None
    own_layer: OwnLayer | None = None


def new_memory(head: Head, start: int, capacity: int) -> TextMemory:
    """For a text of at most `capacity` tokens whose hidden states are known from position `start` on."""
    if head.own_layer is not None:
        return CachedMemory(head.own_layer.cache, capacity, start)
    return Memory(head.about.layers, start, head.norm.device)


def fuse(head: Head, taken: Tensor) -> Tensor:
    """(T, hidden) of the target's hidden states (T, taps · its hidden), side by side."""
    eps = head.about.layers.eps
    if head.fc is None:
        assert head.final_norm is not None
        return normed(taken, *head.final_norm)
    parts = taken.chunk(len(head.fuse_norms), dim=-1) if head.fuse_norms else ()
    pairs = zip(parts, head.fuse_norms, strict=True)
    read = torch.cat([normed(part, weight, eps) for part, weight in pairs], dim=-1) if parts else taken
    fused = head.fc(read.contiguous())
    return fused if head.fused_norm is None else normed(fused, head.fused_norm, eps)


def embed(head: Head, tokens: Sequence[int]) -> Tensor:
    """(T, hidden) float32."""
    rows = head.table[torch.tensor(tokens, device=head.table.device)].float()
    return rows if head.scale == 1.0 else rows * head.scale


def run_rows(head: Head, tokens: Sequence[int], hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    """The residual stream (T, hidden) of rows of a token and the state (T, hidden) before it (eagle3, peagle, mtp)."""
    a, embedded = head.about.layers, embed(head, tokens)
    if head.join is None:
        x = hidden
    else:
        pair = (normed(part, norm, a.eps) for part, norm in zip((embedded, hidden), head.join_norms, strict=True))
        x = head.join(torch.cat(tuple(pair), dim=-1))
    if head.own_layer is not None:
        return head.own_layer.run(x, spans)
    step = begin_pass(head.rotary, spans)
    for number, block in enumerate(head.blocks):
        x = run_block(x, embedded, number, block, a, step)
    return x


def remember_context(head: Head, fused: Tensor, spans: Sequence[Span]) -> None:
    """Takes the fused hidden states (T, hidden) of a text into every block's keys and values (dflash, dspark)."""
    step = begin_pass(head.rotary, spans)
    for number, block in enumerate(head.blocks):
        remember(fused, number, block, head.about.layers, step)


def run_together(head: Head, tokens: Sequence[int], spans: Sequence[Span]) -> Tensor:
    """The normed hidden states (T, hidden) of blocks of tokens that are drafted at once (dflash, dspark)."""
    a, x = head.about.layers, embed(head, tokens)
    step = begin_pass(head.rotary, spans, together=True)
    for number, (block, causal) in enumerate(zip(head.blocks, head.about.causal, strict=True)):
        x = run_block(x, None, number, block, a, step, causal)
    return normed(x, head.norm, a.eps)


def logits_and_next(head: Head, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, draft vocabulary) of rows of the residual stream (B, hidden), and the hidden states that follow."""
    out = normed(x, head.norm, head.about.layers.eps)
    return head.lm_head(out), out if head.about.normed_output else x
