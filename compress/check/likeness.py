"""Weights that stand in another one's place: told by a sample of each, compared with those of all others."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compress.check.examine import Examined
from compress.check.findings import Finding

# How much nearer another original has to be; and the relative distance up to which it is that one,
# of matrices and of vectors, which are all much alike.
_NEARER, _AT_MOST, _VECTOR = 0.6, 0.75, 0.05
# Relative difference of scales up to which they are the wanted ones.
_SAME_SCALES = 0.08


def find_swapped(examined: Sequence[Examined], suspects: Sequence[Examined]) -> list[Finding]:
    """For every suspect that is nearer to the original of another weight of its shape: which one."""
    groups: dict[tuple[int, ...], list[Examined]] = defaultdict(list)
    for one in examined:
        if one.original is not None:
            groups[one.weight.shape].append(one)
    tables = {
        shape: torch.stack([one.original for one in of if one.original is not None]) for shape, of in groups.items()
    }
    findings = []
    for one in suspects:
        if one.original is None or one.weight.shape not in tables:
            continue
        table, sketch = tables[one.weight.shape], one.sight.sketch
        far = (table - sketch).norm(dim=1) / table.norm(dim=1).clamp_min(1e-20)
        own = float((one.original - sketch).norm() / one.original.norm().clamp_min(1e-20))
        place = int(far.argmin())
        other = groups[one.weight.shape][place].weight.name
        most = _AT_MOST if len(one.weight.shape) > 1 else _VECTOR
        if other != one.weight.name and float(far[place]) < min(_NEARER * own, most):
            says = f"holds what the original has as {other}: the two are swapped, or one was written twice"
            findings.append(Finding(level="broken", kind="swapped", where=one.weight.name, says=says))
    return findings


def find_scales(examined: Sequence[Examined], suspect: Examined) -> str | None:
    """Whose stored scales are those that the suspect's codes would fit with."""
    wanted, which = (None, None) if suspect.cause is None else (suspect.cause.scales, suspect.cause.rows)
    if wanted is None or which is None or suspect.scale is None:
        return None
    best: tuple[float, str] | None = None
    for other in examined:
        if other is suspect or other.scale is None or other.scale.shape != suspect.scale.shape:
            continue
        off = _apart(other.scale[which], wanted)
        if best is None or off < best[0]:
            best = off, other.weight.name
    own = _apart(suspect.scale[which], wanted)
    return best[1] if best is not None and best[0] < min(_SAME_SCALES, own / 2) else None


def _apart(scale: Tensor, wanted: Tensor) -> float:
    used = wanted.abs() > 1e-20
    return float((scale[used] / wanted[used] - 1).abs().median()) if bool(used.any()) else float("inf")


def find_doubles(examined: Sequence[Examined]) -> list[Finding]:
    """Matrices of two layers that are the same, bit by bit in the sample; the head and the embedding may be."""
    seen: dict[tuple[tuple[int, ...], bytes], str] = {}
    findings = []
    for one in examined:
        if len(one.weight.shape) < 2 or one.sight.constant or one.sight.spread == 0:
            continue
        key = one.weight.shape, one.sight.sketch.numpy().tobytes()
        if (first := seen.setdefault(key, one.weight.name)) != one.weight.name and ".layers." in one.weight.name:
            says = f"is the same as {first}: one of the two was written twice"
            findings.append(Finding(level="suspicious", kind="swapped", where=one.weight.name, says=says))
    return findings


def same_in_original(examined: Sequence[Examined]) -> Mapping[str, str]:
    """Weights that are the same in the original, too."""
    seen: dict[tuple[tuple[int, ...], bytes], str] = {}
    found = {}
    for one in examined:
        if one.original is not None:
            key = one.weight.shape, one.original.numpy().tobytes()
            if (first := seen.setdefault(key, one.weight.name)) != one.weight.name:
                found[one.weight.name] = first
    return found
