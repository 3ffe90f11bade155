"""Divergences between a teacher's and a student's next-token distributions, over rows of logits.

Values and gradients are worked out together, a block of rows at a time, so that blocks stay in a core's cache: of a
(B·T, V) tensor of logits no float32 copy is ever made, and the one thing kept for the backward pass is the gradient
itself, in the student's dtype. The teacher is a constant: no gradient flows into it. Everything is in nats.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "total_variation"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)

# Elements of one block: float32 copies of it are a megabyte each.
_BLOCK = 1 << 18

# (log p, log q) of a block → the loss of each row (rows,), and the gradient by the student's logits at temperature 1.
_Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def divergence(
    student: Tensor,
    teacher: Tensor,
    kind: Divergence,
    beta: float = 0.5,
    temperature: float = 1.0,
    weights: Tensor | None = None,
) -> Tensor:
    """The mean divergence of the teacher's distributions p and the student's q.

    forward_kl        KL(p ‖ q): the student covers all that the teacher may say.
    reverse_kl        KL(q ‖ p): the student says nothing that the teacher would not (MiniLLM, Gu et al. 2023,
                      2306.08543).
    jsd               β KL(p ‖ m) + (1 − β) KL(q ‖ m) with m = β p + (1 − β) q, β in (0, 1) (GKD, Agarwal et al. 2023,
                      2306.13649). Divided by β it tends to KL(p ‖ q) as β → 0, divided by 1 − β to KL(q ‖ p) as β → 1.
    total_variation   ½ Σ |p − q|: 1 − it is the chance that a drafted token is accepted (DistillSpec, 2310.08461).

    student, teacher  (rows, V) logits of any float dtype; -inf is a probability of 0.
    temperature       both are softmax(logits / T), and the result is T² times the divergence, so that gradients keep
                      their size as T grows (Hinton et al. 2015, 1503.02531).
    weights           (rows,) non-negative, or bool: the mean is Σ w·loss / Σ w.

    Returns a scalar of the dtype of the arithmetic (float32, or float64 for a float64 student). Raises ValueError for
    shapes that do not fit, a temperature that is not positive, and weights that are all 0.
    """
    if kind not in _RULES:
        raise ValueError(f"kind must be one of {', '.join(DIVERGENCES)}, found {kind!r}")
    if not 0 < beta < 1:
        raise ValueError(f"beta must be between 0 and 1, found {beta}")
    rule = partial(_jsd, beta=beta) if kind == "jsd" else _RULES[kind]
    return _mean(student, teacher, rule, temperature, weights)


def cross_entropy(student: Tensor, labels: Tensor) -> Tensor:
    """Mean −log q(label) with q = softmax(logits), labels (rows,) int64. Errors as for `divergence`.

    Beside soft labels, hard ones are taken at T = 1 (1503.02531).
    """
    if labels.dtype != torch.int64 or labels.shape != student.shape[:1]:
        raise ValueError(
            f"labels must be int64 of shape {tuple(student.shape[:1])}, found {labels.dtype} {tuple(labels.shape)}"
        )
    return _mean(student, labels, None, 1.0, None)


def collapse(logits: Tensor, kept: Tensor) -> Tensor:
    """(rows, k + 1) log-probabilities of the `kept` tokens (rows, k) int64, and last of all others together.

    For a teacher of which only k tokens were kept: with the student's distribution collapsed in the same way, every
    loss here (at T = 1) is a proper divergence over k + 1 classes, and a lower bound of the
    one over the whole vocabulary. Gradients flow into `logits` (rows, V). k is less than V.
    """
    if kept.ndim != 2 or len(kept) != len(logits) or not 0 < kept.shape[1] < logits.shape[1]:
        raise ValueError(f"kept {tuple(kept.shape)} does not fit logits {tuple(logits.shape)}")
    scaled = logits.float() if logits.dtype != torch.float64 else logits
    whole = torch.logsumexp(scaled, dim=-1, keepdim=True)
    # Not log(1 − Σ): where the kept ones have nearly all of it, that difference is rounding noise.
    others = torch.logsumexp(scaled.scatter(1, kept, -math.inf), dim=-1, keepdim=True)
    return torch.cat([scaled.gather(1, kept), others], dim=1) - whole


def _mean(student: Tensor, teacher: Tensor, rule: _Rule | None, temperature: float, weights: Tensor | None) -> Tensor:
    if student.ndim != 2 or (rule is not None and teacher.shape != student.shape):
        raise ValueError(f"logits of the student {tuple(student.shape)} and teacher {tuple(teacher.shape)} do not fit")
    if not temperature > 0:
        raise ValueError(f"the temperature must be positive, found {temperature}")
    shares = torch.ones(len(student), device=student.device) if weights is None else weights.detach()
    if shares.shape != student.shape[:1]:
        raise ValueError(f"weights must be {tuple(student.shape[:1])}, found {tuple(shares.shape)}")
    shares = shares.to(torch.float64)
    total = float(shares.sum())
    if not total > 0 or not math.isfinite(total) or float(shares.min()) < 0:
        raise ValueError(f"weights must not be negative, and not all 0; their sum is {total}")
    out: Tensor = _Fused.apply(student, teacher.detach(), rule, temperature, shares / total)
    return out


class _Fused(torch.autograd.Function):
    """Σ weight · loss of the rows, with its gradient by the student's logits worked out on the way."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, rule: _Rule | None, temperature: float, weights: Tensor
    ) -> Tensor:
        factor = temperature**2
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(student) if wanted else None
        step = max(1, _BLOCK // student.shape[1])
        for first in range(0, len(student), step):
            block = slice(first, first + step)
            log_q = _log_softmax(student[block], temperature)
            if rule is None:
                loss, slope = _hard(teacher[block], log_q)
            else:
                loss, slope = rule(_log_softmax(teacher[block].to(log_q.dtype), temperature), log_q)
            total += (loss.double() * weights[block]).sum()
            if gradient is not None:
                gradient[block] = slope.mul_((weights[block] * (factor / temperature)).to(slope.dtype).unsqueeze(1))
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return (total * factor).to(torch.float64 if student.dtype == torch.float64 else torch.float32)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = ctx.saved_tensors
        return gradient * above.to(gradient.dtype), None, None, None, None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """A new tensor: float64 stays, everything else becomes float32."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scaled = logits if temperature == 1 else logits.to(dtype) / temperature
    return torch.log_softmax(scaled, dim=-1, dtype=dtype)


def _hard(labels: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    at = labels.unsqueeze(1)
    loss = -log_q.gather(1, at).squeeze(1)
    slope = log_q.exp_()
    slope.scatter_add_(1, at, torch.full_like(at, -1, dtype=slope.dtype))
    return loss, slope


def _forward_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    loss = _expected(p, log_p.sub_(log_q)).sum(-1)
    return loss, log_q.exp_().sub_(p)


def _reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    q = log_q.exp()
    terms = _expected(q, log_q.sub_(log_p))
    loss = terms.sum(-1)
    return loss, terms.sub_(q.mul_(loss.unsqueeze(1)))


def _jsd(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    p, q = log_p.exp(), log_q.exp()
    log_m = p.mul(beta).add_(q, alpha=1 - beta).log_()
    against_p = _expected(p, log_p.sub_(log_m)).sum(-1)
    terms = _expected(q, log_q.sub_(log_m))
    against_q = terms.sum(-1)
    # d/dq_i of the whole is (1 − β) log(q_i / m_i): what m's own change adds cancels out.
    slope = terms.sub_(q.mul_(against_q.unsqueeze(1))).mul_(1 - beta)
    return beta * against_p + (1 - beta) * against_q, slope


def _total_variation(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    q = log_q.exp_()
    difference = q - log_p.exp_()
    loss = difference.abs().sum(-1).mul_(0.5)
    terms = difference.sign_().mul_(0.5).mul_(q)
    return loss, terms.sub_(q.mul_(terms.sum(-1, keepdim=True)))


_RULES: dict[Divergence, Callable[..., tuple[Tensor, Tensor]]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "total_variation": _total_variation,
}


def _expected(probability: Tensor, values: Tensor) -> Tensor:
    """probability · values, in place of `values`; an impossible token counts for nothing, whatever its value."""
    return values.mul_(probability).masked_fill_(probability == 0, 0.0)
