"""What the network of the drafter `block` learns: the target's next tokens, place by place, and when it is right."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compress.block_draft.frozen_head import judge
from compress.block_draft.network import BlockNetwork, Blocks


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
    """The target on windows: their tokens (B, T), its head (V, hidden), and the rows (B, T, hidden) of which that makes
    what it says after each place; None: they are not known, and the text's own tokens are what is wanted."""

    tokens: Tensor
    head: Tensor
    rows: Tensor | None


@dataclass(frozen=True)
class Learned:
    """Losses in nats and what drafts are worth: `value` with its graph, of cross entropy, distillation and confidence;
    `right` (n, length) bool, whether each place's largest logit is the token that was wanted; `there`, whether the text
    has one.
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


def learn(
    network: BlockNetwork, blocks: Blocks, places: Tensor, teacher: Teacher, decay: float, distill: float
) -> Learned:
    """Mean over the drafts' places, each place weighted by decay to the power of its number.

    places   (B, n, length) int64 as `blocks_of` gives them.
    distill  share of the divergence from the target's distribution, beside the cross entropy of the token that it
             finds most probable, which is what a greedy text goes on with.
    """
    drafted, (batch, span), length = network(blocks), teacher.tokens.shape, places.shape[-1]
    there = (places < span).flatten(0, 1)
    at = places.clamp(max=span - 1)
    of_text = teacher.tokens.gather(1, at.flatten(1)).flatten()
    before = (at - 1 + span * torch.arange(batch).view(-1, 1, 1)).flatten()
    known = None if teacher.rows is None else teacher.rows.flatten(0, 1)[before]
    judged = judge(drafted.rows.flatten(0, 1), teacher.head, of_text, known, distill, network.frequent)
    right = (judged.choice == judged.wanted).view(-1, length)
    told = network.confidence(drafted.told, judged.best.view(-1, length))
    sure = functional.binary_cross_entropy_with_logits(told, right.float(), reduction="none")
    weights = there * decay ** torch.arange(length)
    weights = weights / weights.sum()
    flat = weights.flatten()
    value = (judged.loss * flat).sum() + (sure * weights).sum()
    cross, divergence, unsure = (
        float((part.detach() * flat).sum()) for part in (judged.cross, judged.divergence, sure.flatten())
    )
    return Learned(value, cross, divergence, unsure, right & there, there)
