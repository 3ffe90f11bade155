"""DSpark's second half (2607.05147): how a drafted token bends the logits behind it, and how sure the head is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.checkpoints.heads.record import MarkovKind
from runtime.kernels.joined import Linear


@dataclass(frozen=True)
class Markov:
    """A low-rank bias on the logits of a row from the token before it.

    table  (vocabulary, rank) float32; `out` its products with the draft vocabulary.
    bend   what `gated` and `rnn` make of the token and the row; None for `vanilla`.
    """

    kind: MarkovKind
    table: Tensor
    out: Linear
    bend: Linear | None = None


def bias(markov: Markov, tokens: Sequence[int], hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The bias (B, draft vocabulary) on rows with hidden states (B, hidden) behind B tokens, and the next state.

    state  (B, rank): zeros at a block's beginning; only `rnn` changes it.
    """
    before = markov.table[torch.tensor(tokens, device=hidden.device)]
    if markov.bend is None:
        return markov.out(before), state
    if markov.kind == "gated":
        gate = torch.sigmoid(markov.bend(torch.cat((hidden, before), dim=-1)))
        return markov.out(gate * before), state
    keep, fresh, shown = markov.bend(torch.cat((state, before, hidden), dim=-1)).chunk(3, dim=-1)
    keep = torch.sigmoid(keep)
    return markov.out(torch.tanh(shown)), keep * state + (1 - keep) * torch.tanh(fresh)


@dataclass(frozen=True)
class Confidence:
    """How probable it is that the target accepts a row's token, as a logit: weight (1, hidden or hidden + rank)."""

    weight: Tensor
    bias: Tensor


def acceptance(confidence: Confidence, hidden: Tensor, tokens: Sequence[int], markov: Markov | None) -> Tensor:
    """(B,) probabilities, of rows with hidden states (B, hidden) behind B tokens."""
    features = hidden
    if markov is not None and confidence.weight.shape[1] > hidden.shape[1]:
        features = torch.cat((hidden, markov.table[torch.tensor(tokens, device=hidden.device)]), dim=-1)
    return torch.sigmoid(features @ confidence.weight[0] + confidence.bias[0])
