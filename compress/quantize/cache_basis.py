"""The basis that a head's keys or values are rounded in, from what they are and what their errors do.

With C = E[x xᵀ] of a head's rows and G so that an error e costs eᵀ G e, rounding all dimensions alike costs the
arithmetic mean of the eigenvalues of √G C √G. Here it costs their geometric mean, which is what a code can reach that
gives every dimension as many bits: a rotation makes the Cholesky factor R of √G C √G equal along its diagonal (the
geometric mean decomposition: Jiang, Hager and Li, "The geometric mean decomposition", 2005), so that what is left of a
dimension once those behind it are known is equally large for all; and what is rounded is that, by feedback (as in
Tomlinson's and Harashima's precoder). Dimensions whose codes have halves are made twice as large as the others (the
same authors' "The generalized triangular decomposition", 2008). Scores and outputs stay what they are but for rounding.

All in float64; the results are float32.
"""

import math

import torch
from torch import Tensor

from runtime.kernels.basis import BACK, round_in_basis, rounded_back
from runtime.kv_store import HALVES, Levels

# Share of the mean that is added to what an error costs in every direction: calibration text is not all text.
_COST = 1e-2
# Shares of the mean that are added to every eigenvalue, of which a head takes the one that loses least: below that
# rounding's own error leads, and what makes up for it would outgrow the codes.
SHARES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
# Rows that tell which one does.
_TRIED = 2048
# Eigenvalues below this share of the mean count as that.
_LEAST = 1e-9


def triangular(values: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Rotation q (n, n) and upper triangular r whose diagonal is in proportion to `shares`: diag(values) = q · r · zᵀ.

    values  (n,) positive float64; shares (n,) likewise. z, a rotation too, is of no use here. Each step turns two rows
            and two columns so that the first of the two diagonal entries becomes what it is to be: the nearest ones
            that lie on either side of it. Where `values` are too equal for such shares the diagonal is as near as two
            entries come.
    """
    count, r, q = len(values), torch.diag(values).double(), torch.eye(len(values), dtype=torch.float64)
    wanted = shares.double() * math.exp(float(values.double().log().mean() - shares.double().log().mean()))
    for k in range(count - 1):
        want, diagonal = float(wanted[k]), r.diagonal()[k:]
        above, below = ((diagonal >= want).nonzero()[:, 0], (diagonal < want).nonzero()[:, 0])
        if len(above) and len(below):
            pair = [int(above[diagonal[above].argmin()]), int(below[diagonal[below].argmax()])]
        else:
            pair = diagonal.topk(2, largest=not len(above)).indices.tolist()
        rest = [n for n in range(count - k) if n not in pair]
        order = torch.tensor([*range(k), *(k + n for n in pair + rest)])
        r, q = r[order][:, order], q[:, order]
        a, b = float(r[k, k]), float(r[k + 1, k + 1])
        share = (want * want - b * b) / (a * a - b * b) if abs(a - b) > 1e-12 * want else 1.0
        c = math.sqrt(min(1.0, max(0.0, share)))
        s = math.sqrt(1.0 - c * c)
        found = math.hypot(c * a, s * b)
        columns = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
        rows = torch.tensor([[c * a, -s * b], [s * b, c * a]], dtype=torch.float64) / found
        r[:, k : k + 2] = r[:, k : k + 2] @ columns
        r[k : k + 2] = rows.T @ r[k : k + 2]
        q[:, k : k + 2] = q[:, k : k + 2] @ rows
    return q, r.triu()


def best_basis(rows: Tensor, cost: Tensor, levels: Levels, queries: bool) -> Tensor:
    """The basis of a head's rows (n, d) float32 whose rounding costs least of those by SHARES; the rest as `basis_of`.

    levels  how rows are rounded (kv_store.IN_BASIS).
    """
    moment = rows.double().T @ rows.double() / len(rows)
    tried = rows[:: -(-len(rows) // _TRIED)]
    found = [basis_of(moment, cost, queries, share) for share in SHARES]
    lost = [rounding_cost(tried, cost, levels, basis, queries) for basis in found]
    return found[lost.index(min(lost))]


def rounding_cost(rows: Tensor, cost: Tensor, levels: Levels, basis: Tensor, queries: bool) -> float:
    """What the errors of rows (n, d) float32 cost in a basis, over what it would cost to forget them; 0 for zeros."""
    held = rounded_back(*round_in_basis(rows[:, None], levels, basis[None]), levels.knee)[:, 0]
    error = held @ (basis[BACK].T if queries else basis[BACK]) - rows
    lost, whole = (float(((x @ cost) * x).sum(dtype=torch.float64)) for x in (error, rows))
    return max(lost, 0.0) / whole if whole > 0 else 0.0


def basis_of(moment: Tensor, cost: Tensor, queries: bool, share: float = SHARES[0]) -> Tensor:
    """A head's basis (3, d, d) float32 (runtime/kernels/basis.py): into, feedback, back.

    moment   (d, d) mean of x xᵀ over the head's rows.
    cost     (d, d), an error e of a row costs eᵀ · cost · e.
    queries  whether `back` is for queries (of keys) or for what was mixed (of values).
    share    of the mean, see SHARES.
    """
    root, inverse_root = _roots(_with_floor(cost.double(), _COST))
    spread = root @ _with_floor(moment.double(), _LEAST) @ root
    found, directions = torch.linalg.eigh((spread + spread.T) / 2)
    found = found.clamp_min(_LEAST * float(found.mean()))
    found = found + share * found.mean()
    steps = torch.where(torch.arange(len(found)) < HALVES, 2.0, 1.0).double()
    q, r = triangular(found.sqrt(), steps)
    # A step of any code, a half's among them, costs the same.
    turn, unit = directions @ q, r / r.diagonal() * steps
    # Rows as columns: x = back · codes · scale, and codes are near into · x / scale.
    back = inverse_root @ turn @ unit
    into = torch.linalg.solve_triangular(unit, turn.T @ root, upper=True)
    feedback = (unit / steps[:, None]).T.tril(-1)
    return torch.stack((into.T, feedback, back if queries else back.T)).float().contiguous()


def _with_floor(matrix: Tensor, share: float) -> Tensor:
    mean = float(matrix.diagonal().mean())
    return matrix + (share * mean if mean > 0 else 1.0) * torch.eye(len(matrix), dtype=matrix.dtype)


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of a positive matrix, and the root's inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(_LEAST * float(values.mean())).sqrt()
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T
