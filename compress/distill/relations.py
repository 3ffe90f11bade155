"""Losses on relations: not what a state is, but how states stand to each other. Widths may differ freely.

Teachers are constants: no gradient flows into them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def distance_relations(student: Tensor, teacher: Tensor) -> Tensor:
    """Huber loss between all pairwise distances, each set divided by its mean (RKD-D, Park et al. 2019, 1904.05068).

    student (n, S), teacher (n, H): the same n samples, at least 2. Raises ValueError for other shapes.
    """
    _require_samples(student, teacher, 2)
    return F.smooth_l1_loss(_scaled_distances(student), _scaled_distances(teacher).detach())


def angle_relations(student: Tensor, teacher: Tensor) -> Tensor:
    """Huber loss between the cosines of all angles i-j-k of three different samples (RKD-A, 1904.05068).

    student (n, S), teacher (n, H): the same n samples, at least 3. Memory: n³ numbers. Raises ValueError otherwise.
    """
    _require_samples(student, teacher, 3)
    n = len(student)
    apart = ~torch.eye(n, dtype=torch.bool, device=student.device)
    # (vertex j, i, k): neither end is the vertex, and the two ends differ.
    triples = apart.unsqueeze(2) & apart.unsqueeze(1) & apart.unsqueeze(0)
    return F.smooth_l1_loss(_cosines(student)[triples], _cosines(teacher).detach()[triples])


def layer_similarity(states: Sequence[Tensor]) -> Tensor:
    """(L, L): the linear CKA between the states of every two layers (Kornblith et al. 2019, 1905.00414).

    states  L tensors (n, width), the same n tokens, at least 2; widths may differ. 1 where one layer's states are the
            other's turned and scaled; a layer whose states are all equal is similar to none, itself included.
    """
    if not states or any(one.ndim != 2 or len(one) != len(states[0]) for one in states) or len(states[0]) < 2:
        raise ValueError(f"states {[tuple(one.shape) for one in states]} are not layers of the same tokens")
    grams = []
    for one in states:
        centred = _wide(one) - _wide(one).mean(dim=0)
        gram = (centred @ centred.T).flatten()
        grams.append(F.normalize(gram, dim=0))
    stacked = torch.stack(grams)
    return stacked @ stacked.T


def layer_relations(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Mean squared difference of the `layer_similarity` of L student layers and of the L teacher layers they stand for.

    How a model's layers build on each other: the flow of Yim et al. (CVPR 2017), without equal widths.
    """
    if len(student) != len(teacher):
        raise ValueError(f"{len(student)} student layers stand for {len(teacher)} teacher layers: choose as many")
    return F.mse_loss(layer_similarity(student), layer_similarity(teacher).detach())


def _require_samples(student: Tensor, teacher: Tensor, least: int) -> None:
    if student.ndim != 2 or teacher.ndim != 2 or len(student) != len(teacher) or len(student) < least:
        raise ValueError(
            f"expected the same samples, at least {least}, found {tuple(student.shape)} and {tuple(teacher.shape)}"
        )


def _scaled_distances(points: Tensor) -> Tensor:
    """(n (n − 1) / 2,): distances over their mean; all 0 where all points are one."""
    distances = torch.pdist(_wide(points))
    mean = distances.mean()
    return distances / mean.clamp(min=torch.finfo(distances.dtype).tiny)


def _cosines(points: Tensor) -> Tensor:
    """(n, n, n): at [j, i, k] the cosine of the angle at j between i and k."""
    wide = _wide(points)
    directions = F.normalize(wide.unsqueeze(0) - wide.unsqueeze(1), dim=-1)
    return directions @ directions.transpose(1, 2)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
