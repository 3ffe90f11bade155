"""Losses between what a student and a teacher hold inside: hidden states, weights, gradients.

Teachers are constants: no gradient flows into them. Where both have other widths a `Projection`, learned with the
student and thrown away with the teacher, takes the student's to the teacher's (FitNets, Romero et al. 2014, 1412.6550).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Linear):
    """A learned linear map (no bias) from the student's width to the teacher's; the identity at first where equal."""

    def __init__(self, student: int, teacher: int):
        super().__init__(student, teacher, bias=False)
        with torch.no_grad():
            if student == teacher:
                nn.init.eye_(self.weight)
            else:
                # Keeps the size of states: a row's entries have variance 1 / student.
                nn.init.normal_(self.weight, std=student**-0.5)


def hidden_mse(
    student: Tensor, teacher: Tensor, projection: nn.Module | None = None, weights: Tensor | None = None
) -> Tensor:
    """Mean squared difference of hidden states, over rows and channels.

    student (rows, S), teacher (rows, H), any float dtype; `projection` maps S to H. `weights` (rows,): the mean over
    rows is Σ w·loss / Σ w. Raises ValueError for shapes that do not fit and weights that are all 0.
    """
    mapped, wanted = _paired(student, teacher, projection)
    return _mean((mapped - wanted).square().mean(dim=-1), weights)


def hidden_cosine(
    student: Tensor, teacher: Tensor, projection: nn.Module | None = None, weights: Tensor | None = None
) -> Tensor:
    """Mean of 1 − cosine of hidden states (DistilBERT, Sanh et al. 2019, 1910.01108); arguments as for `hidden_mse`."""
    mapped, wanted = _paired(student, teacher, projection)
    return _mean(1 - F.cosine_similarity(mapped, wanted, dim=-1), weights)


def median_bandwidth(x: Tensor, y: Tensor) -> float:
    """The median distance between two different points of x (n, D) and y (m, D) together; 1 where that is 0."""
    points = torch.cat([x.detach(), y.detach()])
    median = float(torch.pdist(points.double()).median())
    return median if median > 0 else 1.0


def maximum_mean_discrepancy(
    student: Tensor, teacher: Tensor, projection: nn.Module | None = None, bandwidth: float | None = None
) -> Tensor:
    """Squared MMD of two sets of features under an RBF kernel exp(−‖x − y‖² / 2σ²) (Gretton et al. 2012).

    student (n, S), teacher (m, H), n and m at least 2, and not in pairs: it compares distributions, not rows.
    σ is `bandwidth`, else `median_bandwidth`, taken as a constant. This is the unbiased estimator (a point is not
    compared with itself), so it is around 0, and may be below, where both are drawn from one distribution.
    Memory: (n + m)² / 2 numbers. Raises ValueError for fewer points, other widths or a bandwidth that is not positive.
    """
    x, y = _wide(student if projection is None else projection(student)), _wide(teacher).detach()
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(f"features {tuple(x.shape)} and {tuple(y.shape)} cannot be compared")
    sigma = median_bandwidth(x, y) if bandwidth is None else bandwidth
    if not sigma > 0:
        raise ValueError(f"the bandwidth must be positive, found {sigma}")
    xx, yy = _kernel(x, x, sigma), _kernel(y, y, sigma)
    within_x = (xx.sum() - xx.diagonal().sum()) / (len(x) * (len(x) - 1))
    within_y = (yy.sum() - yy.diagonal().sum()) / (len(y) * (len(y) - 1))
    return within_x + within_y - 2 * _kernel(x, y, sigma).mean()


def weight_l2(
    student: Tensor, teacher: Tensor, outputs: nn.Module | None = None, inputs: nn.Module | None = None
) -> Tensor:
    """Mean squared difference of two layers' weights, the student's (n, k) mapped to the teacher's (N, K).

    inputs   maps k to K, row by row; outputs maps n to N, column by column. None: the widths are the same.
    Raises ValueError where the mapped weight has another shape than the teacher's.
    """
    mapped = _wide(student)
    mapped = mapped if inputs is None else inputs(mapped)
    mapped = mapped if outputs is None else outputs(mapped.T).T
    if mapped.shape != teacher.shape:
        raise ValueError(f"a weight {tuple(mapped.shape)} does not fit the teacher's {tuple(teacher.shape)}")
    return (mapped - _wide(teacher).detach()).square().mean()


def output_gradient(outputs: Tensor, inputs: Tensor, *, learn: bool) -> Tensor:
    """The gradient of Σ outputs by `inputs`, of the inputs' shape: how a model's answer depends on what it reads.

    outputs  a scalar or one number for each row (the label's log-probability, say), made of `inputs`.
    learn    the gradient is part of the graph, so that a loss on it trains the student; False: a constant, for the
             teacher. The divergences of divergences.py have no second derivative: take outputs in plain torch.
    """
    [found] = torch.autograd.grad(outputs.sum(), inputs, create_graph=learn)
    return found if learn else found.detach()


def gradient_l2(
    student: Tensor, teacher: Tensor, projection: nn.Module | None = None, weights: Tensor | None = None
) -> Tensor:
    """Mean squared difference of two models' `output_gradient`s (Sobolev training, Czarnecki et al. 2017, 1706.04859).

    Arguments as for `hidden_mse`.
    """
    return hidden_mse(student, teacher, projection, weights)


def _paired(student: Tensor, teacher: Tensor, projection: nn.Module | None) -> tuple[Tensor, Tensor]:
    mapped = _wide(student if projection is None else projection(student))
    if mapped.shape != teacher.shape or mapped.ndim != 2:
        raise ValueError(
            f"expected (rows, width) of one shape after the projection, found {tuple(mapped.shape)} and "
            f"{tuple(teacher.shape)}"
        )
    return mapped, _wide(teacher).detach()


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _mean(rows: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return rows.mean()
    if weights.shape != rows.shape:
        raise ValueError(f"weights must be {tuple(rows.shape)}, found {tuple(weights.shape)}")
    shares = weights.detach().to(rows.dtype)
    total = shares.sum()
    if not float(total) > 0 or float(shares.min()) < 0:
        raise ValueError(f"weights must not be negative, and not all 0; their sum is {float(total)}")
    return (rows * shares).sum() / total


def _kernel(x: Tensor, y: Tensor, sigma: float) -> Tensor:
    # Differences, not |x|² + |y|² − 2xy: that loses all digits where points are close beside their norms.
    squares = (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1)
    return torch.exp(squares / (-2 * sigma**2))
