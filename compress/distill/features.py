"""Losses between what a student and its teacher hold inside: hidden states, attention, relations, gradients.

Teachers are constants: no gradient flows into them. Each loss says what of two models it can compare.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens between which relations are taken: angles are between each three of them.
_RELATED = 64


def hidden_distance(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Mean over blocks of the squared distance of states (B, T, H) over the teacher's mean square (1910.01108).

    The first state of both is the embedding's, which is not compared. Where the two have different numbers of blocks
    only their last outputs stand for the same thing.
    """
    same = len(student) == len(teacher)
    pairs = zip(student[1:], teacher[1:], strict=True) if same else [(student[-1], teacher[-1])]
    return torch.stack([relative_distance(mine, theirs) for mine, theirs in pairs]).mean()


def relative_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of tensors (…, H) over the teacher's mean square."""
    wanted = _wide(teacher).detach().flatten(0, -2)
    distance = (_wide(student).flatten(0, -2) - wanted).square().mean(dim=-1).mean()
    return distance / wanted.square().mean().clamp(min=1e-12)


def attention_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean KL(teacher ‖ student) of attention (B, heads, T, T), each row a distribution (MiniLM, 2002.10957).

    Head by head; of the mean over heads where the two have different numbers of them, as after width pruning.
    """
    q, p = _wide(student), _wide(teacher).detach()
    if p.shape[1] != q.shape[1]:
        q, p = q.mean(dim=1), p.mean(dim=1)
    return (torch.xlogy(p, p) - p * q.clamp(min=torch.finfo(q.dtype).tiny).log()).sum(dim=-1).mean()


def relations(student: Tensor, teacher: Tensor) -> Tensor:
    """Distances and, counted twice, angles between the states of some tokens (RKD, Park et al. 2019, 1904.05068).

    student (B, T, S), teacher (B, T, H): widths may differ freely. Evenly spaced tokens, 64 at the most.
    """
    rows = student.shape[0] * student.shape[1]
    chosen = torch.arange(min(rows, _RELATED), device=student.device) * rows // min(rows, _RELATED)
    mine, theirs = (states.flatten(0, 1)[chosen] for states in (student, teacher))
    return distance_relations(mine, theirs) + 2 * angle_relations(mine, theirs)


def distance_relations(student: Tensor, teacher: Tensor) -> Tensor:
    """Huber loss between all pairwise distances, each set divided by its mean (RKD-D).

    student (n, S), teacher (n, H): the same n samples, at least 2.
    """
    return F.smooth_l1_loss(_scaled_distances(student), _scaled_distances(teacher).detach())


def angle_relations(student: Tensor, teacher: Tensor) -> Tensor:
    """Huber loss between the cosines of all angles i-j-k of three different samples (RKD-A).

    student (n, S), teacher (n, H): the same n samples, at least 3. Memory: n³ numbers.
    """
    apart = ~torch.eye(len(student), dtype=torch.bool, device=student.device)
    # (vertex j, i, k): neither end is the vertex, and the two ends differ.
    triples = apart.unsqueeze(2) & apart.unsqueeze(1) & apart.unsqueeze(0)
    return F.smooth_l1_loss(_cosines(student)[triples], _cosines(teacher).detach()[triples])


def label_gradient(logits: Tensor, labels: Tensor, embedded: Tensor, *, learn: bool) -> Tensor:
    """(B, T, H): the gradient of the text's log-probability by the embeddings that a model read.

    How its answer depends on what it reads (Sobolev training, Czarnecki et al. 2017, 1706.04859).
    logits (B, T, V), labels (B, T) int64, embedded (B, T, H), of which the logits were made.
    learn  the gradient is part of the graph, so that a loss on it trains the student; False: a constant.
    """
    found = _wide(logits).log_softmax(dim=-1).gather(-1, labels.unsqueeze(-1)).sum()
    [gradient] = torch.autograd.grad(found, embedded, create_graph=learn)
    return gradient


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
