"""Which experts a row goes to, and what its shares of them are, in plain torch: the meaning of native/routing.cpp."""

import torch
from torch import Tensor

from runtime.checkpoints.record import Experts
from runtime.kernels.exact import exp, sigmoid, tree_sum

_NEVER = float("-inf")


def route(
    scores: Tensor, how: Experts, correction: Tensor | None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The shares (T, k) float32 of each row's experts and their numbers, of a router's scores (T, E).

    correction (E,): what is added to choose by, and only to choose. Of equal experts the first is chosen.
    expert_scale (E,): what the share of each expert is multiplied by in the end.
    """
    if how.scoring == "sparse mixer":
        share, chosen = _sparse_mixer(scores, how)
    else:
        odds = sigmoid(scores) if how.scoring == "sigmoid" else _softmax(scores)
        # Far scores have the same sigmoid, and are not the same.
        rank = scores if how.scoring == "sigmoid" else odds
        rank = rank if correction is None else odds + correction
        chosen = _best(_in_groups(rank, how.groups), how.per_token)
        share = odds.gather(-1, chosen)
    if how.renormalize:
        share = share / tree_sum(share).unsqueeze(-1)
    share = share if how.scale == 1.0 else share * how.scale
    return share if expert_scale is None else share * expert_scale[chosen], chosen


def _softmax(scores: Tensor) -> Tensor:
    odds = exp(scores - scores.amax(dim=-1, keepdim=True))
    return odds / tree_sum(odds).unsqueeze(-1)


def _best(rank: Tensor, count: int) -> Tensor:
    """Where the largest of (…, E) are, of equal ones the first, which torch's topk does not promise."""
    return rank.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _in_groups(rank: Tensor, groups: tuple[int, int, int]) -> Tensor:
    """The ranks (T, E) with -inf for experts of groups that are not chosen from."""
    count, chosen, best = groups
    if count == 1:
        return rank
    parts = rank.view(len(rank), count, -1)
    of_group = tree_sum(parts.sort(dim=-1, descending=True).values[..., :best])
    kept = torch.zeros_like(of_group).scatter(-1, _best(of_group, chosen), 1.0) > 0
    return parts.masked_fill(~kept.unsqueeze(-1), _NEVER).view_as(rank)


def _sparse_mixer(scores: Tensor, how: Experts) -> tuple[Tensor, Tensor]:
    """SparseMixer (2310.00811) as PhiMoE decodes: the best expert's share of a softmax over those that come near to it,
    then that of the best of the others among those near to that one."""
    left, shares, chosen = scores, [], []
    for _ in range(how.per_token):
        best = _best(left, 1)
        top = left.gather(-1, best)
        near = torch.where((top - left) / torch.maximum(scores.abs(), top) > how.tolerance, _NEVER, left)
        weights = exp(near - top)
        shares.append(weights.gather(-1, best) / tree_sum(weights).unsqueeze(-1))
        chosen.append(best)
        left = left.scatter(-1, best, _NEVER)
    return torch.cat(shares, dim=-1), torch.cat(chosen, dim=-1)
