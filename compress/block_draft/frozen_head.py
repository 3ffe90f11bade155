"""Losses of rows through a head that is not trained, a few rows at a time, without their logits ever lying in memory.

The gradient of a cross entropy is known with its value: softmax minus what is wanted, times the head (as fused linear
cross entropies do it, Liger Kernel, 2410.10989). A step's logits would be read and written a dozen times.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Rows whose logits are looked at together: they stay in the processor's cache.
_ROWS = 256


class Judged(NamedTuple):
    """Of n rows: `loss` (n,) nats, with its graph, and without one what it is made of and what the rows say.

    cross       (n,) nats: cross entropy of the wanted token.
    divergence  (n,) nats: from the teacher's distribution; 0 without a teacher.
    wanted      (n,) int64: the token that was wanted.
    choice      (n,) int64: the most probable token that a draft can say, and `best` (n,) the logarithm of its
                probability among these.
    """

    loss: Tensor
    cross: Tensor
    divergence: Tensor
    wanted: Tensor
    choice: Tensor
    best: Tensor


def judge(
    rows: Tensor,
    head: Tensor,
    tokens: Tensor,
    teacher: Tensor | None,
    distill: float,
    frequent: Tensor | None = None,
) -> Judged:
    """(1 - distill) · cross entropy of the wanted token + distill · divergence from the teacher's distribution.

    rows     (n, hidden) that become logits by the head, (V, hidden), which is not trained.
    teacher  (n, hidden): rows that the same head makes the teacher's logits of. Its most probable token is wanted.
             None: the text's, `tokens` (n,) int64, and distill counts as 0.
    frequent (m,) int64: the tokens that a draft can say, of a head that is short when it runs; None: all.
    """
    return Judged(*_Judge.apply(rows, head, tokens, teacher, distill if teacher is not None else 0.0, frequent))


class _Judge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        head: Tensor,
        tokens: Tensor,
        teacher: Tensor | None,
        distill: float,
        frequent: Tensor | None,
    ) -> tuple[Tensor, ...]:
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else rows.dtype
        table, turned = head.to(kind), head.to(kind).t().contiguous()
        parts, gradients = [], []
        for first in range(0, len(rows), _ROWS):
            part = slice(first, first + _ROWS)
            known = None if teacher is None else functional.linear(teacher[part].to(kind), table).float()
            logits = functional.linear(rows[part].to(kind), table).float()
            said = _said(logits, frequent)
            found, gradient = _part(logits, tokens[part], known, distill)
            parts.append((*found, *said))
            gradients.append(functional.linear(gradient.to(kind), turned).to(rows.dtype))
        ctx.save_for_backward(torch.cat(gradients))
        loss, *others = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*others)
        return loss, *others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return grads[0].unsqueeze(1) * gradient, None, None, None, None, None


def _said(logits: Tensor, frequent: Tensor | None) -> tuple[Tensor, Tensor]:
    """The most probable of these tokens, of logits (n, V), and the logarithm of its probability among them."""
    among = logits if frequent is None else logits[:, frequent]
    best, choice = among.max(-1)
    return choice if frequent is None else frequent[choice], best - among.logsumexp(-1)


def _part(logits: Tensor, tokens: Tensor, known: Tensor | None, distill: float) -> tuple[tuple[Tensor, ...], Tensor]:
    """Judged of logits (n, V), which are overwritten, and the loss's gradient by them; `known`: the teacher's."""
    wanted = tokens if known is None else known.argmax(-1)
    top = logits.amax(-1)
    at = logits.gather(1, wanted.unsqueeze(1)).squeeze(1)
    if known is None:
        expected = entropy = at.new_zeros(len(at))
    else:
        known -= known.logsumexp(-1, keepdim=True)
        probable = known.exp()
        entropy, expected = -(probable * known).sum(-1), (probable * logits).sum(-1)
    shares = logits.sub_(top.unsqueeze(1)).exp_()
    sums = shares.sum(-1)
    total = top + sums.log()
    cross = total - at
    divergence = total - expected - entropy if known is not None else expected
    gradient = shares.div_(sums.unsqueeze(1))
    if known is not None and distill:
        gradient.add_(probable, alpha=-distill)
    gradient.scatter_add_(1, wanted.unsqueeze(1), torch.full_like(at, distill - 1).unsqueeze(1))
    loss = (1 - distill) * cross + distill * divergence
    return (loss, cross, divergence, wanted), gradient
