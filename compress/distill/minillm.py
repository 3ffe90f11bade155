"""MiniLLM: the gradient of the reverse KL of whole texts, by sampling (Gu et al. 2023, 2306.08543).

The student q minimises E_{y~q} Σ_t log q(y_t) / p(y_t), each factor given the prompt and the tokens before. What a
token costs is known for the token itself (its own reverse KL, exactly: the single-step part), and has to be sampled for
all that follows it (the long part: a policy gradient, of the mean over what follows, so that short texts are not
favoured). Texts may be drawn from a mixture with the teacher, which keeps them from degenerating; importance weights
then put the expectation right, as the paper has them: of each token's own factor alone, which is biased and calm.

The paper's clipping of old policies is left out: each text is used once, with the weights that wrote it.
"""

import math

import torch
from torch import Tensor

from compress.distill.divergences import divergence
from compress.distill.on_policy import Writer, gumbel_sample, writer_of
from runtime.contract import Decoder


def policy_gradient(student: Tensor, teacher: Tensor, tokens: Tensor, teacher_mix: float = 0.0) -> Tensor:
    """A scalar whose gradient by `student` estimates that of the reverse KL of a text, summed over its tokens.

    student, teacher   (B, N, V) logits of the N sampled tokens, given what is before each; the teacher is a constant.
    tokens             (B, N) int64, drawn from teacher_mix · p + (1 − teacher_mix) · q at temperature 1.

    The mean over the B texts. Its value is for people: the mean sum of the tokens' reverse KL, under importance
    weights, plus terms of expectation 0. Raises ValueError for shapes that do not fit.
    """
    if student.shape != teacher.shape or student.shape[:2] != tokens.shape:
        shapes = [tuple(one.shape) for one in (student, teacher, tokens)]
        raise ValueError(f"expected (B, N, V), (B, N, V) and (B, N), found {shapes}")
    texts, length = tokens.shape
    log_q, log_p = _log_probability(student, tokens), _log_probability(teacher.detach(), tokens)
    fixed = log_q.detach()
    weights = torch.ones_like(fixed)
    if teacher_mix:
        drawn = torch.logaddexp(log_p + math.log(teacher_mix), fixed + math.log(1 - teacher_mix))
        weights = (fixed - drawn).exp()
    reward = log_p - fixed
    following = reward.flip(1).cumsum(dim=1).flip(1) - reward
    later = weights * (following / torch.arange(length - 1, -1, -1, device=reward.device).clamp(min=1))
    rows = weights.flatten()
    exact = divergence(student.flatten(0, 1), teacher.flatten(0, 1), "reverse_kl", weights=rows)
    return exact * (float(rows.sum()) / texts) - (later * log_q).sum() / texts


def mixed_writer(student: Decoder, teacher: Decoder, teacher_mix: float) -> Writer:
    """Continues prompts by tokens drawn from teacher_mix · p + (1 − teacher_mix) · q, as `policy_gradient` wants them.

    Both decoders read every text; the vocabulary is the smaller one's.
    """
    width = min(student.vocab_size, teacher.vocab_size)

    def choose(logits: list[Tensor], generator: torch.Generator) -> Tensor:
        q, p = (found[:, :width].softmax(dim=-1).cpu() for found in logits)
        return gumbel_sample((teacher_mix * p + (1 - teacher_mix) * q).log(), generator)

    return writer_of([student, teacher], choose)


def _log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, N): of each token, in float32 (float64 stays)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(wide, dim=-1)
