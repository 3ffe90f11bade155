"""What the network of the drafter `block` learns: the target's next tokens, place by place, and when it is right."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compress.block_draft.network import Blocks, Drafted


def blocks_of(tokens: Tensor, states: Tensor, anchors: Tensor, length: int) -> tuple[Blocks, Tensor]:
    """The blocks at these places of windows, and the places in the window that they are to say, (B, n, length) int64;
    those behind its end are T.

    tokens (B, T) int64; states (B, T, taps · hidden); anchors (B, n) int64.
    """
    batch, span = tokens.shape
    places = anchors.unsqueeze(2) + torch.arange(length + 1)
    padded = functional.pad(tokens, (0, 1))
    at = places.clamp(max=span)
    fed = padded.gather(1, at[..., :length].flatten(1)).view(batch, -1, length)
    return Blocks(states, anchors, fed), at[..., 1:]


@dataclass(frozen=True)
class Teacher:
    """The target on windows: what it says after each place, logits (B, T, V), and the texts, tokens (B, T)."""

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Learned:
    """Losses in nats and what drafts are worth: `value` with its graph, of cross entropy, distillation and confidence;
    `right` (n, length) bool, whether each place's largest logit is the text's token; `there`, whether the text has one.
    """

    value: Tensor
    cross_entropy: float
    distillation: float
    confidence: float
    right: Tensor
    there: Tensor

    @property
    def tokens_per_round(self) -> float:
        """One more than the tokens that are right up to the first that is not, of blocks that lie whole in the text."""
        whole = self.there.all(1)
        return 1.0 + float(self.right[whole].double().cumprod(1).sum(1).mean())


def learn(drafted: Drafted, places: Tensor, teacher: Teacher, decay: float, distill: float) -> Learned:
    """Mean over the drafts' places, each place weighted by decay to the power of its number.

    places   (B, n, length) int64 as `blocks_of` gives them.
    distill  share of the divergence from the target's distribution, beside the cross entropy of its text.
    """
    batch, span = teacher.tokens.shape
    there = (places < span).flatten(0, 1)
    at = places.clamp(max=span - 1)
    wanted = teacher.tokens.gather(1, at.flatten(1)).view(-1, places.shape[-1])
    said = drafted.logits.log_softmax(-1)
    cross = -said.gather(2, wanted.unsqueeze(2)).squeeze(2)
    rows = (at - 1 + span * torch.arange(batch).view(-1, 1, 1)).flatten(0, 1)
    known = teacher.logits.flatten(0, 1)[rows].log_softmax(-1)
    divergence = (known.exp() * (known - said)).sum(-1)
    right = drafted.logits.argmax(-1) == wanted
    sure = functional.binary_cross_entropy_with_logits(drafted.confidence, right.float(), reduction="none")
    weights = there * decay ** torch.arange(places.shape[-1])
    weights = weights / weights.sum()
    parts = [(each * weights).sum() for each in (cross, divergence, sure)]
    value = (1 - distill) * parts[0] + distill * parts[1] + parts[2]
    cross_entropy, distillation, confidence = (float(part.detach()) for part in parts)
    return Learned(value, cross_entropy, distillation, confidence, right & there, there)
