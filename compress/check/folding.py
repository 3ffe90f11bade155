"""AWQ and SmoothQuant multiply columns of a weight and divide what comes before: whether both halves are there."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.check.compare import far_from_one, spread_of
from compress.check.examine import Examined
from compress.check.findings import Finding
from compress.check.layers import layer_number

# How near the product of both halves has to be to 1, the same over how far factors are from 1, but never nearer than
# they can be estimated; and how near the factor that all have in common.
_NEAR, _SHARE, _LEAST, _COMMON = 0.06, 0.4, 0.01, 0.1
# How far they are from 1 before columns count as scaled, where nothing undoes them, and before rows do.
_VARIED = 0.03


@dataclass(frozen=True, eq=False)
class _Half:
    """Factors of one weight: of its columns, of its rows, or of a norm.

    shared  whether what all of them have in common is known: it is a norm's, and that of columns where rows have none.
    """

    name: str
    factors: Tensor
    shared: bool = False

    def size(self) -> float:
        """How far the factors are from 1, as far as that is known."""
        return far_from_one(self.factors) if self.shared else spread_of(self.factors)


def check_folding(examined: Sequence[Examined]) -> tuple[list[Finding], frozenset[str]]:
    """Findings about halves without their other half, and the weights whose distance is explained by a whole pair."""
    findings: list[Finding] = []
    explained: set[str] = set()
    blocks: dict[int | None, list[Examined]] = defaultdict(list)
    for one in examined:
        blocks[layer_number(one.weight.name)].append(one)
    for members in blocks.values():
        if not any(one.scaling is not None for one in members):
            continue
        scaled = [(one.weight.name, one.scaling) for one in members if one.scaling is not None]
        before = [_Half(name, found.rows) for name, found in scaled if spread_of(found.rows) > _VARIED]
        columns = [_Half(name, found.columns, spread_of(found.rows) <= _VARIED) for name, found in scaled]
        before += [_Half(one.weight.name, one.ratio, True) for one in members if one.ratio is not None]
        for half in columns:
            if any(_make_up(half, other) for other in before):
                explained.add(half.name)
                continue
            if half.size() <= _VARIED:
                continue
            says = (
                "its columns are the original's multiplied by factors, as AWQ and SmoothQuant do, and nothing before"
                " the layer is divided by them"
            )
            findings.append(Finding(level="broken", kind="scales", where=half.name, says=says))
        for half in before:
            if any(_make_up(other, half) for other in columns):
                explained.add(half.name)
    return findings, frozenset(explained)


def _make_up(columns: _Half, before: _Half) -> bool:
    """Whether columns' factors undo those of what comes before, which may be shared by several heads."""
    count, least = columns.factors.numel(), before.factors.numel()
    if least == 0 or count % least:
        return False
    repeats = count // least
    if repeats == 1:
        return _near(columns, before.factors, columns.shared and before.shared)
    # Key heads are shared by groups of query heads: head size unknown, so that any that divides is tried.
    sizes = [size for size in (16, 32, 64, 80, 96, 128, 256) if least % size == 0]
    heads = (before.factors.view(-1, size).repeat_interleave(repeats, 0).flatten() for size in sizes)
    return any(_near(columns, factors, False) for factors in heads)


def _near(columns: _Half, before: Tensor, shared: bool) -> bool:
    product = columns.factors * before
    middle = product.median()
    if float(middle.abs()) < 1e-20 or (shared and abs(float(middle) - 1) > _COMMON):
        return False
    most = max(_LEAST, min(_NEAR, _SHARE * columns.size()))
    return float((product / middle - 1).abs().median()) < most and bool(torch.isfinite(product).all())
