"""The children that a node of a token tree may get, in the order in which it gets them: pure functions of a row."""

from dataclasses import dataclass

import numpy as np

from runtime.sampling.processors import Row


@dataclass(frozen=True)
class Candidates:
    """Up to `branch` children of one node.

    tokens    in order: a node with k children has the first k.
    shares    how probable each is as the target's choice at this node, judged by the draft alone.
    promises  the same, as far as it is known before the token is: what may decide whether there is such a child.
    row       (V,) the distribution that the tokens were drawn from, without replacement; None: they are no draws.
    """

    tokens: list[int]
    shares: list[float]
    promises: list[float]
    row: Row | None = None

    def proposal(self, rank: int) -> Row:
        """(V,) what the token of this rank was really drawn from: the row without the earlier ones, normalised."""
        if self.row is None:
            raise ValueError("these candidates are no draws")
        left = self.row.copy()
        left[self.tokens[:rank]] = 0
        left /= left.sum()
        return left


def ranked(weights: Row, branch: int) -> Candidates:
    """The `branch` tokens of largest weight (V,), none of weight 0; shares are the weights, normalised.

    Greedy: weights are the draft's probabilities. `coupled`: they are q / exponential noise, whose largest entry is the
    draft's sample; their shares are the target's probabilities of choosing each token with this noise, if its logits
    differ from the draft's by independent standard Gumbel errors.
    """
    tokens = largest(weights, branch, above=0)
    shares = (weights[tokens] / weights.sum()).tolist()
    return Candidates(tokens, shares, shares)


def drawn(row: Row, noise: Row, branch: int) -> Candidates:
    """Up to `branch` tokens drawn without replacement from row (V,), a distribution, with exponential noise (V,).

    The largest entries of q / noise in descending order are such draws (Gumbel top-k: Kool et al. 2019, 1903.06059).
    A promise is the expected share: the sum of q² over the tokens not drawn before, divided by the sum of q over them.
    """
    tokens = largest(row / noise, branch, above=0)
    shares = row[tokens]
    before = np.concatenate([[0.0], shares[:-1]])
    # Rounding may leave less than nothing; a promise only ranks.
    mass = np.maximum(row.sum() - np.cumsum(before), 0.0)
    squares = np.maximum((row * row).sum() - np.cumsum(before * before), 0.0)
    promises = np.divide(squares, mass, out=np.zeros_like(mass), where=mass > 0)
    return Candidates(tokens, shares.tolist(), np.minimum(promises, 1.0).tolist(), row)


def largest(weights: Row, count: int, above: float = -np.inf) -> list[int]:
    """Up to `count` indices of the largest weights (n,) in descending order, the lower index of equals first.

    above  those of this weight or less are left out.
    """
    found = weights > above
    if count < len(weights):
        # All that are as large as the last one: of equals the lower indices are meant.
        found &= weights >= np.partition(weights, len(weights) - count)[len(weights) - count]
    at = np.flatnonzero(found)
    out: list[int] = at[np.argsort(-weights[at], kind="stable")][:count].tolist()
    return out
