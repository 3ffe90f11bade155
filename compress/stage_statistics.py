"""What a stage reads of a layer's statistics: there, or it was never asked for."""

from typing import TYPE_CHECKING

from torch import Tensor

from compress.block import Statistics

if TYPE_CHECKING:
    from calib.moments import Moments


def hessian_of(statistics: Statistics, path: str) -> Tensor:
    found = statistics[path].hessian
    if found is None:
        raise ValueError(f"{path}: no Hessian was collected")
    return found


def rows_of(moments: "Moments") -> Tensor:
    if moments.rows is None:
        raise ValueError("no input rows were collected")
    return moments.rows


def absmean_of(moments: "Moments") -> Tensor:
    if moments.absmean is None:
        raise ValueError("no ranges were collected")
    return moments.absmean


def absmax_of(moments: "Moments") -> Tensor:
    if moments.absmax is None:
        raise ValueError("no ranges were collected")
    return moments.absmax
