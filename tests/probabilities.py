"""All rows of a distribution at once, which the product reads one by one."""

from typing import Any

import torch
from torch import Tensor

from runtime.sampling.distribution import Distributions
from runtime.sampling.params import Sampling


def probabilities(logits: Tensor, sampling: Sampling, *context: Any, **named: Any) -> Tensor:
    """(n, V) logits to (n, V) float64, (V,) to (V,); the other arguments as in `Distributions`."""
    rows = Distributions(logits, sampling, *context, **named)
    if logits.dim() == 1:
        return rows[0]
    return torch.stack([rows[i] for i in range(len(rows))])
