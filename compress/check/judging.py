"""From the distances of all weights to findings: which are off, what they look like, and what is meant to be so."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import torch

from compress.check import likeness
from compress.check.examine import PLAIN, Examined, is_off
from compress.check.findings import Finding, Kind, Level
from compress.check.folding import check_folding
from compress.check.layers import experts

# Packed weights whose error is this many times that of rounding to nearest are off: GPTQ on little text comes to twice
# as much, for its codes make up for each other. Beside siblings less is enough; a cosine so low is off in any case.
_OFF, _FAR = 3.0, 4.0
_BESIDE, _BESIDE_AT_LEAST = 2.5, 1.8
_COSINE = 0.6
# Where half of all weights are farther than this, the model is; its weights are then counted as beside siblings.
_USUAL = 2.2
# From this share of the matrices on a difference is the model's, not a weight's.
_EVERYWHERE = 0.75
# How much farther than its siblings one weight is before it is named all the same.
_WORSE = 2.5
# Squared errors of a row over the usual ones.
_ROWS = 9.0
# Share of zeros, beyond those that rounding makes, from which on weights are called pruned.
_PRUNED = 0.2
# An expert is called not calibrated where it is as rounding to nearest is, and its siblings are not.
_NEAREST, _CALIBRATED = 0.004, 1.03
_TOGETHER = 4


def _finding(level: Level, kind: Kind, where: str, says: str) -> Finding:
    return Finding(level=level, kind=kind, where=where, says=says)


def judge_weights(examined: Sequence[Examined]) -> list[Finding]:
    """All findings that follow from the weights and the original's."""
    compared = [one for one in examined if one.weight.error is not None]
    folding, explained = check_folding(examined)
    faulty = {finding.where for finding in folding}
    factors = [factor for one in compared if (factor := one.weight.factor) is not None]
    usual = median(factors) if factors else 1.0
    off = [one for one in compared if one.weight.name not in explained and _is_off(one, usual)]
    swapped = likeness.find_swapped(examined, off)
    faulty |= {finding.where for finding in swapped}
    known = faulty | explained | {one.weight.name for one in off if one.cause is not None}
    rows = _rows([one for one in compared if one.weight.name not in known])
    findings = [*swapped, *rows]
    named = {finding.where for finding in findings}
    faulty |= named
    caused = [one for one in off if one.cause is not None and one.weight.name not in named]
    findings += _caused(examined, caused)
    names = {one.weight.name for one in caused}
    findings += [finding for finding in folding if finding.where not in names | named]
    left = [one for one in off if one.weight.name not in faulty | names]
    return [*findings, *_uncaused(compared, left), *_experts(examined)]


def _is_off(one: Examined, usual: float) -> bool:
    """`usual`: the median factor of the model's packed weights."""
    weight = one.weight
    assert weight.error is not None
    most = _BESIDE_AT_LEAST if usual > _USUAL else _OFF
    if one.cause is not None or is_off(weight.error, weight.nearest, most):
        return True
    factor = weight.factor
    beside = factor is not None and factor > max(_BESIDE * usual, _BESIDE_AT_LEAST)
    return beside or (weight.packed and _cosine(one) < _COSINE)


def _rows(compared: Sequence[Examined]) -> list[Finding]:
    """Weights that are right but for some rows."""
    findings = []
    for one in compared:
        if one.rows is None or one.rows.numel() < 8:
            continue
        usual = max(float(one.rows.median()), 1e-12 if not one.weight.packed else 1e-4)
        bad = (one.rows > _ROWS * usual) & (one.rows > (PLAIN**2 if not one.weight.packed else 1.5))
        count = int(bad.sum())
        if count:
            first = int(bad.nonzero()[0])
            worst = (float(one.rows.max()) / usual) ** 0.5
            says = f"{count} of {bad.numel()} rows are off (the first is row {first}): up to {worst:.3g} times as far"
            says += " from the original as the other rows"
            findings.append(_finding("broken", "error", one.weight.name, says))
    return findings


def _caused(examined: Sequence[Examined], caused: Sequence[Examined]) -> list[Finding]:
    """Those that another reading fits; where one reading fits many, they are one finding."""
    groups: dict[tuple[Kind, str], list[Examined]] = defaultdict(list)
    for one in caused:
        assert one.cause is not None
        says = one.cause.says
        if (owner := likeness.find_scales(examined, one)) is not None:
            says = f"the codes fit the original with the scales of {owner}: scales are swapped"
        groups[one.cause.kind, says].append(one)
    findings = []
    for (kind, says), of in groups.items():
        parts = [of] if len(of) > _TOGETHER else [[one] for one in of]
        for part in parts:
            first = part[0]
            assert first.cause is not None
            more = f" and {len(part) - 1} more" if len(part) > 1 else ""
            errors = f"relative error {first.weight.error:.3g}, {first.cause.error:.3g} when read so"
            if first.weight.nearest is not None:
                errors += f", {first.weight.nearest:.3g} by rounding to nearest"
            findings.append(_finding("broken", kind, first.weight.name + more, f"{says} ({errors})"))
    return findings


def _uncaused(compared: Sequence[Examined], left: Sequence[Examined]) -> list[Finding]:
    """Those that nothing explains: everywhere, which training and pruning do, or somewhere, which is damage."""
    matrices = [one for one in compared if len(one.weight.shape) > 1]
    far = [one for one in left if len(one.weight.shape) > 1]
    if matrices and len(far) >= _EVERYWHERE * len(matrices):
        usual = median(_error(one) for one in far)
        worse = [one for one in far if _error(one) > _WORSE * usual and _cosine(one) < 0.5]
        return [_everywhere(far), *(_worse(one, usual) for one in worse)]
    return [_alone(one) for one in left if not _beside_trained(one, far)]


def _beside_trained(one: Examined, far: Sequence[Examined]) -> bool:
    """A vector that moved a little beside matrices that moved as well."""
    return len(one.weight.shape) < 2 and bool(far) and _cosine(one) > 0.99


def _error(one: Examined) -> float:
    return one.weight.error or 0.0


def _cosine(one: Examined) -> float:
    return 1.0 if one.weight.cosine is None else one.weight.cosine


def _alone(one: Examined) -> Finding:
    weight = one.weight
    if weight.factor is not None:
        says = f"relative error {weight.error:.3g}, {weight.factor:.3g} times that of rounding to nearest"
        level: Level = "broken" if weight.factor > _FAR or _cosine(one) < 0.7 else "suspicious"
    elif weight.packed:
        says, level = f"relative error {weight.error:.3g}", "broken" if _cosine(one) < 0.7 else "suspicious"
    else:
        says = f"is stored plain and differs from the original's (relative error {weight.error:.3g})"
        level = "broken" if _error(one) > 0.1 else "suspicious"
    if _cosine(one) < 0.3:
        says += "; it has next to nothing in common with the original's"
    return _finding(level, "error", weight.name, says)


def _worse(one: Examined, usual: float) -> Finding:
    says = f"relative error {one.weight.error:.3g}, {_error(one) / usual:.3g} times that of the model's other weights"
    return _finding("broken", "error", one.weight.name, says)


def _everywhere(far: Sequence[Examined]) -> Finding:
    """Far from the original everywhere: trained, pruned, rotated, or another model."""
    error, cosine = median(_error(one) for one in far), median(_cosine(one) for one in far)
    zeros = median(one.weight.zeros for one in far)
    where = "all weights" if len(far) > 1 else far[0].weight.name
    even = "everywhere, evenly" if max(map(_error, far)) < _WORSE * error else "everywhere"
    start = f"far from the original {even} (relative error {error:.3g})"
    if median(one.emptied for one in far) > _PRUNED:
        return _finding("note", "trained", where, f"{start}: pruned, not broken; {zeros:.0%} zeros")
    if cosine < 0.2:
        says = f"{start}: the weights have next to nothing in common with the original's: rotated, or another model"
        return _finding("suspicious", "trained", where, says)
    return _finding("note", "trained", where, f"{start}: trained further (QAT, distillation), not broken")


def _experts(examined: Sequence[Examined]) -> list[Finding]:
    """Experts beside their siblings."""
    by_name = {one.weight.name: one for one in examined}
    findings = []
    for (place, layer), of in experts(by_name).items():
        members = {number: by_name[name] for number, name in of.items()}
        packed = {number for number, one in members.items() if one.weight.packed}
        if packed and len(packed) < len(members):
            rest = sorted(set(members) - packed)
            says = f"{layer} of {_numbers(rest)} is stored plain, and that of {len(packed)} experts is quantised"
            findings.append(_finding("broken", "experts", place, says))
        factors = {n: f for n, one in members.items() if (f := one.weight.factor) is not None}
        if len(factors) < 3:
            continue
        usual = median(factors.values())
        worse = sorted(n for n, factor in factors.items() if factor > 1.5 * usual and factor > 1.3)
        if worse:
            times = max(factors[n] for n in worse) / usual
            says = f"{layer} of {_numbers(worse)} is up to {times:.3g} times as far from the original as its siblings"
            findings.append(_finding("suspicious", "experts", place, says))
        nearest = sorted(n for n, factor in factors.items() if abs(factor - 1) < _NEAREST)
        if usual > _CALIBRATED and nearest:
            says = f"{layer} of {_numbers(nearest)} is rounded to nearest, its siblings are calibrated: no token came"
            findings.append(_finding("suspicious", "experts", place, f"{says} there"))
    return findings


def _numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (" and others" if len(numbers) > 6 else "")
    return f"expert{'s' if len(numbers) > 1 else ''} {shown}"


def judge_alone(examined: Sequence[Examined]) -> list[Finding]:
    """What the weights say without an original."""
    findings = []
    for one in examined:
        weight, sight = one.weight, one.sight
        if sight.bad:
            says = f"{sight.bad} of its values are NaN or infinite"
            findings.append(_finding("broken", "finite", weight.name, says))
        matrix = len(weight.shape) > 1
        same = one.original is not None and bool((one.original == one.original[0]).all())
        if matrix and sight.constant and not same:
            findings.append(_finding("broken", "constant", weight.name, "all of its values are the same"))
        elif matrix and sight.tail > max(1, weight.shape[0] // 64) and not _ends_empty(one):
            says = f"its last {sight.tail} of {weight.shape[0]} rows are all zeros, as where a file was cut short"
            findings.append(_finding("broken", "constant", weight.name, says))
        if one.scale is not None and _all_the_same(one):
            findings.append(_finding("broken", "constant", weight.name, "all of its scales are the same"))
    same_there = likeness.same_in_original(examined)
    findings += [f for f in likeness.find_doubles(examined) if f.where not in same_there]
    return [*findings, *_outliers(examined)]


def _ends_empty(one: Examined) -> bool:
    """Tables of embeddings end with rows for tokens that there are not."""
    return one.weight.name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight"))


def _all_the_same(one: Examined) -> bool:
    assert one.scale is not None
    grouped = one.weight.stored.startswith(("int", "nf4")) and " in groups" in one.weight.stored
    return grouped and one.scale.numel() > 8 and bool((one.scale == one.scale.flatten()[0]).all())


def _outliers(examined: Sequence[Examined]) -> list[Finding]:
    """Weights whose size is another order than that of the same layer in other blocks."""
    kinds: dict[tuple[str, tuple[int, ...]], list[Examined]] = defaultdict(list)
    for one in examined:
        if len(one.weight.shape) > 1 and one.sight.spread > 0:
            kinds[one.weight.kind, one.weight.shape].append(one)
    findings = []
    for (kind, _), of in kinds.items():
        if len(of) < 3:
            continue
        usual = float(torch.tensor([one.sight.spread for one in of]).median())
        for one in of:
            times = one.sight.spread / usual
            if not 1 / 16 < times < 16 and one.weight.error is None:
                says = f"its values are {times:.3g} times as large as those of {kind} in other blocks"
                findings.append(_finding("suspicious", "scales", one.weight.name, says))
    return findings
