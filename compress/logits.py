"""What is computed of logits wherever models are compared: log-probabilities, losses of tokens, KL divergence."""

import torch
from torch import Tensor


def log_probabilities(logits: Tensor) -> Tensor:
    """Natural log-probabilities, float64, of logits (n, vocabulary) of any float dtype."""
    return torch.log_softmax(logits.double(), dim=-1)


def token_nll(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Negative log likelihood (n,), nats, of targets (n,) int64 under log-probabilities (n, vocabulary)."""
    return -log_probs.gather(1, targets[:, None])[:, 0]


def kl_rows(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) (n,), nats, of log-probabilities (n, vocabulary). What p gives no probability counts nothing.

    Never negative: rounding could make it so, by about 1e-16.
    """
    terms = log_p.exp() * (log_p - log_q)
    return torch.where(log_p == -torch.inf, 0.0, terms).sum(1).clamp_min(0.0)
