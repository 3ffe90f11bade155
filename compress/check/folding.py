"""AWQ and SmoothQuant multiply columns of a weight and divide what comes before: whether both halves are there."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.check.compare import spread_of
from compress.check.examine import Examined
from compress.check.findings import Finding
from compress.check.layers import layer_number

# How near the product of both halves has to be to 1, the same over how much factors differ, and how near the factor
# that all have in common; how much they differ before they count as factors.
_NEAR, _SHARE, _COMMON, _VARIED = 0.06, 0.4, 0.1, 0.03


@dataclass(frozen=True, eq=False)
class _Half:
    """Factors of one weight: of its columns, of its rows, or of a norm, whose common factor is known, too."""

    name: str
    factors: Tensor
    is_norm: bool = False


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
        columns = [
            _Half(one.weight.name, one.scaling.columns)
            for one in members
            if one.scaling is not None and spread_of(one.scaling.columns) > _VARIED
        ]
        before = [
            _Half(one.weight.name, one.scaling.rows)
            for one in members
            if one.scaling is not None and spread_of(one.scaling.rows) > _VARIED
        ]
        before += [_Half(one.weight.name, one.ratio, True) for one in members if one.ratio is not None]
        for half in columns:
            if any(_make_up(half.factors, other) for other in before):
                explained.add(half.name)
                continue
            says = (
                "its columns are the original's multiplied by factors, as AWQ and SmoothQuant do, and nothing before"
                " the layer is divided by them"
            )
            findings.append(Finding(level="broken", kind="scales", where=half.name, says=says))
        for half in before:
            if any(_make_up(other.factors, half) for other in columns):
                explained.add(half.name)
    return findings, frozenset(explained)


def _make_up(columns: Tensor, half: _Half) -> bool:
    """Whether columns' factors undo those of what comes before, which may be shared by several heads."""
    before = half.factors
    if before.numel() == 0 or columns.numel() % before.numel():
        return False
    repeats = columns.numel() // before.numel()
    if repeats > 1:
        # Key heads are shared by groups of query heads: head size unknown, so that any that divides is tried.
        sizes = [size for size in (16, 32, 64, 80, 96, 128, 256) if before.numel() % size == 0]
        return any(
            _near(columns, before.view(-1, size).repeat_interleave(repeats, 0).flatten(), False) for size in sizes
        )
    return _near(columns, before, half.is_norm)


def _near(columns: Tensor, before: Tensor, is_norm: bool) -> bool:
    product = columns * before
    middle = product.median()
    if float(middle.abs()) < 1e-20 or (is_norm and abs(float(middle) - 1) > _COMMON):
        return False
    most = min(_NEAR, _SHARE * spread_of(columns))
    return float((product / middle - 1).abs().median()) < most and bool(torch.isfinite(product).all())
