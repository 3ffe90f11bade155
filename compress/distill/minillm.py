"""MiniLLM: the gradient of the reverse KL of whole texts, by sampling (Gu et al. 2023, 2306.08543).

The student q minimises E_{y~q} Σ_t log q(y_t) / p(y_t), each factor given the prompt and the tokens before. What a
token costs is known for the token itself (its own reverse KL, exactly: the single-step part), and has to be sampled for
all that follows it (the long part: a policy gradient). Texts may be drawn from a mixture with the teacher, which keeps
them from degenerating; importance weights then put the expectation right.

The paper's clipping of old policies is left out: each text is used once, with the weights that wrote it.
"""

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from compress.distill.divergences import reverse_kl
from compress.distill.on_policy import gumbel_sample

if TYPE_CHECKING:
    from compress.distill.on_policy import Writer
    from runtime.contract import Decoder

Importance = Literal["exact", "token"]
"""exact: products over all tokens so far, unbiased. token: the last factor alone, as the paper has it; biased, calm."""


def policy_gradient(
    student: Tensor,
    teacher: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    teacher_mix: float = 0.0,
    importance: Importance = "token",
    single_step: bool = True,
    length_normalized: bool = True,
) -> Tensor:
    """A scalar whose gradient by `student` estimates that of the reverse KL of a text, summed over its tokens.

    student, teacher   (B, N, V) logits of the N sampled tokens, given what is before each; the teacher is a constant.
    tokens             (B, N) int64, drawn from teacher_mix · p + (1 − teacher_mix) · q at temperature 1.
    mask               (B, N) bool: tokens up to each text's end, that one included; the first is always in it.
    single_step        the exact part is separated; otherwise plain REINFORCE, with the same expectation.
    length_normalized  the long part is a mean over the tokens that follow, not their sum, so that short texts are not
                       favoured. This changes the objective; without it, and with importance "exact", the estimator is
                       unbiased.

    The mean over the B texts. Its value is for people: with single_step the mean sum of the tokens' reverse KL, under
    importance weights, plus terms of expectation 0. Raises ValueError for shapes that do not fit, a mixture outside of
    [0, 1), and a text without tokens.
    """
    if student.shape != teacher.shape or student.shape[:2] != tokens.shape or mask.shape != tokens.shape:
        shapes = [tuple(one.shape) for one in (student, teacher, tokens, mask)]
        raise ValueError(f"expected (B, N, V), (B, N, V), (B, N) and (B, N), found {shapes}")
    if not 0 <= teacher_mix < 1:
        raise ValueError(f"teacher_mix must be from 0 to below 1, found {teacher_mix}")
    if not bool(mask[:, 0].all()):
        raise ValueError("expected a sampled token in every text, found a text without")
    texts = len(tokens)
    log_q, log_p = _log_probability(student, tokens), _log_probability(teacher.detach(), tokens)
    fixed = log_q.detach()
    inside = mask.to(fixed.dtype)
    reward = (log_p - fixed) * inside
    weights, before = _weights(fixed, log_p, inside, teacher_mix, importance)
    if importance == "exact":
        later = _following(weights * reward, inside, length_normalized)
    else:
        later = weights * _following(reward, inside, length_normalized)
    if not single_step:
        # The token's own reward stands with those that follow. −1 has expectation 0 and is left out.
        later = later + weights * reward
        return -(later * log_q * inside).sum() / texts
    rows = (before * inside).flatten()
    exact = reverse_kl(student.flatten(0, 1), teacher.flatten(0, 1), weights=rows) * (float(rows.sum()) / texts)
    return exact - (later * log_q * inside).sum() / texts


def mixed_writer(student: "Decoder", teacher: "Decoder", teacher_mix: float) -> "Writer":
    """Continues prompts by tokens drawn from teacher_mix · p + (1 − teacher_mix) · q, as `policy_gradient` wants them.

    Both decoders read every text; the vocabulary is the smaller one's.
    """
    from runtime.contract import Rows

    def write(prompts: Tensor, new: int, generator: torch.Generator) -> Tensor:
        rows, length = prompts.shape
        caches = [(decoder, decoder.new_cache()) for decoder in (student, teacher)]
        handles = [[cache.open(length + new) for _ in range(rows)] for _, cache in caches]
        out = [prompts]
        try:
            fed, start, at = prompts, 0, torch.arange(1, rows + 1) * length - 1
            for _ in range(new):
                count = fed.shape[1]
                found = []
                for (decoder, cache), mine in zip(caches, handles, strict=True):
                    spans = Rows.chains([(handle, start, count) for handle in mine])
                    with torch.autocast(decoder.device.type, enabled=False):
                        logits = decoder.forward(fed.flatten().to(decoder.device), spans, cache, at).logits
                    found.append(logits[:, : min(student.vocab_size, teacher.vocab_size)].softmax(dim=-1).cpu())
                mixed = teacher_mix * found[1] + (1 - teacher_mix) * found[0]
                start, fed = start + count, gumbel_sample(mixed.log(), generator).unsqueeze(1)
                at = torch.arange(rows)
                out.append(fed)
        finally:
            for (_, cache), mine in zip(caches, handles, strict=True):
                for handle in mine:
                    cache.close(handle)
        return torch.cat(out, dim=1)

    return write


def _log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, N): of each token, in float32 (float64 stays)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(wide, dim=-1)


def _weights(
    log_q: Tensor, log_p: Tensor, inside: Tensor, teacher_mix: float, importance: Importance
) -> tuple[Tensor, Tensor]:
    """(B, N) each: the importance weight of a token together with those before it, and of those before it alone.

    With "token" only a token's own factor counts, and the paper gives it to the token's exact part as well.
    """
    if teacher_mix == 0:
        return torch.ones_like(log_q), torch.ones_like(log_q)
    drawn = torch.logaddexp(log_p + math.log(teacher_mix), log_q + math.log(1 - teacher_mix))
    ratio = (log_q - drawn) * inside
    if importance == "token":
        return ratio.exp(), ratio.exp()
    through = ratio.cumsum(dim=1)
    return through.exp(), (through - ratio).exp()


def _following(reward: Tensor, inside: Tensor, normalized: bool) -> Tensor:
    """(B, N): the sum, or the mean, of the rewards after each token."""
    after = reward.flip(1).cumsum(dim=1).flip(1) - reward
    if not normalized:
        return after
    count = inside.flip(1).cumsum(dim=1).flip(1) - inside
    return after / count.clamp(min=1)
