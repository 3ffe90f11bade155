"""Streaming statistics of a linear layer's inputs: second moments, sizes by channel, and a few rows as they were.

Batches come and go; what stays is a function of the layer's width only (`Moments.nbytes`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.observers import BINS, OBSERVERS

# Rows that are widened to float32 at once, and the width of the blocks in which the Hessian is updated: wide enough for
# a matrix product to be fast, narrow enough that the half below the diagonal is skipped in fact.
_ROWS = 4096
_BLOCK = 512


@dataclass(frozen=True)
class Wants:
    """What somebody needs to know of one linear layer's inputs, K channels.

    hessian  the mean of x xᵀ, (K, K).
    norms    the root of the sum of x², by channel.
    absmax   the largest and the mean |x|, by channel.
    rows     how many input rows to keep, drawn evenly from all (0: none).
    drift    the mean of (x̃ − x) xᵀ, (K, K), x̃ being what the original has where x is: x is then added with it.
    observer the range of all values together, as the observer of that name (`calib.observers.OBSERVERS`) has it.
    """

    hessian: bool = False
    norms: bool = False
    absmax: bool = False
    rows: int = 0
    observer: str | None = None
    drift: bool = False

    def __or__(self, other: "Wants") -> "Wants":
        """What serves both: one pass feeds every stage of a block."""
        return Wants(
            self.hessian or other.hessian,
            self.norms or other.norms,
            self.absmax or other.absmax,
            max(self.rows, other.rows),
            self.observer or other.observer,
            self.drift or other.drift,
        )


class Moments:
    """Statistics of one linear layer's inputs, batch after batch; layers that read one tensor can share one.

    Memory: `nbytes` (4 K² for the Hessian and for the drift, 16 K for sums, 4 K a kept row), and while `add` runs a
    float32 copy of 4096 rows at most. Sums by channel are float64; the Hessian is a float32 running mean whose products
    are float32.
    """

    def __init__(self, inputs: int, wants: Wants, seed: int = 0):
        """`inputs` is K; `seed` draws the kept rows. Raises ValueError for no inputs or a negative number of rows."""
        if inputs < 1 or wants.rows < 0:
            raise ValueError(f"expected at least 1 input and 0 rows, found {inputs} and {wants.rows}")
        self.inputs, self.wants, self.tokens = inputs, wants, 0
        self._hessian = torch.zeros(inputs, inputs) if wants.hessian else None
        self._drift = torch.zeros(inputs, inputs) if wants.drift else None
        self._mirrored = True  # whether the half below the diagonal is filled
        self._squares = torch.zeros(inputs, dtype=torch.float64) if wants.norms else None
        self._sizes = torch.zeros(inputs, dtype=torch.float64) if wants.absmax else None
        self._absmax = torch.zeros(inputs) if wants.absmax else None
        self._rows = torch.empty(0, inputs) if wants.rows else None
        self._keys = torch.empty(0, dtype=torch.float64)
        self._chooser = torch.Generator().manual_seed(seed)
        self._observer = OBSERVERS[wants.observer]() if wants.observer else None

    def add(self, x: Tensor, exact: Tensor | None = None) -> None:
        """Takes in x (..., K) of any float dtype; `exact`, of its shape: what the original has there, for the drift.

        Raises ValueError, having taken in nothing, for another width or where a value is NaN or infinite: the caller
        knows the layer's name.
        """
        if x.shape[-1] != self.inputs:
            raise ValueError(f"expected rows of {self.inputs} inputs, found {list(x.shape)}")
        x = x.detach().reshape(-1, self.inputs)
        if x.numel() == 0:
            return
        low, high = torch.aminmax(x)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise ValueError(f"{int((~torch.isfinite(x)).sum())} of {x.numel()} inputs are NaN or infinite")
        if self._observer is not None:
            self._observer.add(x)
        if (exact is None) == self.wants.drift or (exact is not None and exact.numel() != x.numel()):
            raise ValueError("expected what the original has where a drift is wanted, row by row, and there only")
        before = self.tokens
        for rows in x.split(_ROWS):
            self._add_rows(rows.float())
        if self._drift is not None and exact is not None:
            both = zip(x.split(_ROWS), exact.detach().reshape(-1, self.inputs).split(_ROWS), strict=True)
            for rows, wanted in both:
                share = len(rows) / (before + len(rows))
                self._drift.addmm_(
                    (wanted.float() - rows.float()).T, rows.float(), beta=1 - share, alpha=share / len(rows)
                )
                before += len(rows)

    def _add_rows(self, x: Tensor) -> None:
        before, self.tokens = self.tokens, self.tokens + len(x)
        if self._hessian is not None:
            self._mirrored = False
            for start in range(0, self.inputs, _BLOCK):
                # From the diagonal to the right: x xᵀ is symmetric, and half the products are enough.
                corner = self._hessian[start : start + _BLOCK, start:]
                corner.addmm_(
                    x[:, start : start + _BLOCK].T, x[:, start:], beta=before / self.tokens, alpha=1 / self.tokens
                )
        if self._squares is not None:
            self._squares += torch.linalg.vector_norm(x, dim=0).double().square()
        if self._sizes is not None and self._absmax is not None:
            sizes = x.abs()
            self._sizes += sizes.sum(dim=0)
            self._absmax = torch.maximum(self._absmax, sizes.amax(dim=0))
        if self._rows is not None:
            self._draw(x)

    def _draw(self, x: Tensor) -> None:
        """Keeps the rows whose random keys are the lowest so far: an even draw, whatever the batches were."""
        assert self._rows is not None
        keys = torch.rand(len(x), dtype=torch.float64, generator=self._chooser)
        if len(self._keys) == self.wants.rows:
            low = keys < self._keys.max()
            x, keys = x[low], keys[low]
        rows, keys = torch.cat([self._rows, x]), torch.cat([self._keys, keys])
        if len(keys) > self.wants.rows:
            # In the order in which they came, so that the result does not depend on how a sort breaks ties.
            kept = keys.argsort()[: self.wants.rows].sort().values
            rows, keys = rows[kept], keys[kept]
        self._rows, self._keys = rows, keys

    @property
    def hessian(self) -> Tensor:
        """(K, K) float32, the mean of x xᵀ over the tokens, exactly symmetric. Read only: it is what `add` adds to.

        Raises ValueError, as all statistics do, where nobody wanted it.
        """
        hessian = _wanted(self._hessian)
        if not self._mirrored:
            for start in range(0, self.inputs, _BLOCK):
                stop = min(start + _BLOCK, self.inputs)
                corner = hessian[start:stop, start:stop]
                corner.copy_(corner.triu() + corner.triu(1).T)
                hessian[stop:, start:stop] = hessian[start:stop, stop:].T
            self._mirrored = True
        return hessian

    @property
    def drift(self) -> Tensor:
        """(K, K) float32, the mean of (x̃ − x) xᵀ over the tokens. Read only."""
        return _wanted(self._drift)

    @property
    def norms(self) -> Tensor:
        """(K,) float32, the root of the sum of x² over the tokens."""
        return _wanted(self._squares).sqrt().float()

    @property
    def absmax(self) -> Tensor:
        """(K,) float32, the largest |x|; 0 before the first token."""
        return _wanted(self._absmax)

    @property
    def absmean(self) -> Tensor:
        """(K,) float32, the mean |x|; 0 before the first token."""
        return (_wanted(self._sizes) / max(self.tokens, 1)).float()

    @property
    def rows(self) -> Tensor:
        """(min(tokens, wanted), K) float32: input rows in the order in which they came."""
        return _wanted(self._rows)

    @property
    def observed(self) -> float | None:
        """The observer's range: the |x| that the last code is to stand for. Raises ValueError before the first token.

        None without an observer, and once channels were scaled: a range of all values cannot be scaled with them.
        """
        return None if self._observer is None else self._observer.absmax()

    @property
    def nbytes(self) -> int:
        """Bytes that it holds once all rows are there: a forecast can ask before the first token."""
        each = 4 * self.inputs
        return (
            each * self.inputs * (self.wants.hessian + self.wants.drift)
            + 2 * each * self.wants.norms
            + 3 * each * self.wants.absmax
            + (each + 8) * self.wants.rows
            + 8 * BINS * (self.wants.observer is not None)
        )

    def scaled(self, factor: Tensor) -> "Moments":
        """What it would be had every x been divided by `factor` (K,), as after smoothing; a copy, to read only.

        Raises ValueError for factors that are not positive and finite.
        """
        if factor.shape != (self.inputs,) or not bool((torch.isfinite(factor) & (factor > 0)).all()):
            raise ValueError(f"expected {self.inputs} positive finite factors")
        other = Moments(self.inputs, Wants())
        other.wants, other.tokens = self.wants, self.tokens
        inverse = 1 / factor.double()
        if self._hessian is not None:
            # Row, then column, in float32: the product of both factors could leave its range.
            other._hessian = self.hessian * inverse.float().unsqueeze(1)
            other._hessian *= inverse.float()
            # The two sides of the diagonal were rounded in different orders.
            other._mirrored = False
        if self._drift is not None:
            other._drift = self._drift * inverse.float().unsqueeze(1)
            other._drift *= inverse.float()
        if self._squares is not None:
            other._squares = self._squares * inverse.square()
        if self._sizes is not None and self._absmax is not None:
            other._sizes, other._absmax = self._sizes * inverse, self._absmax * inverse.float()
        if self._rows is not None:
            other._rows, other._keys = self._rows * inverse.float(), self._keys
        return other


def _wanted(statistic: Tensor | None) -> Tensor:
    if statistic is None:
        raise ValueError("a statistic was not collected that no stage has asked for")
    return statistic
