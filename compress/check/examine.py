"""Every weight of the checked model, one at a time: what is in it, and how far it is from the original's."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from compress.check import causes
from compress.check.causes import Cause
from compress.check.compare import Distance, Scaling, Sight, distance, far_from_one, find_scaling, look, sketch_of
from compress.check.findings import Finding, Weight
from compress.check.layers import Sizes, Stored, by_weight, is_packed, kind_of, read, rows_of, sizes
from compress.check.opening import Opened
from compress.check.originals import Originals
from compress.progress import Progress
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight

# From here on a plain weight is another one than the original's: rounding to bfloat16 stays below a third of it.
PLAIN = 0.01
# From here on a packed weight's error, over that of rounding to nearest, is worth a look at what could be the cause.
_LOOK = 1.12
# And from here on at more than a few rows, and at what scaling explains. Where norms are not the original's a method
# has put factors into them (AWQ, SmoothQuant), and all weights are looked at for those that undo them.
_FAR = 1.7
# Fits by scaling: how far the factors have to be from 1 to be a method's, and how much nearer they have to bring it;
# beside changed norms as near as rounding is.
_VARIED, _NEARER = 0.03, 0.7
_MOST_SCALED = 1 << 27


@dataclass(frozen=True, eq=False)
class Examined:
    """One weight.

    sight     of itself; weight: the row of the result.
    original  the original's sketch; None: there is no such weight there, or of another shape.
    cause     a reading that would fit; scaling: by which the original was multiplied.
    scale     the stored scales, where they may be another weight's.
    rows      each row's squared error over what it should be; ratio: ours over the original's, of a vector.
    emptied   share of zeros beyond those of rounding to nearest.
    """

    weight: Weight
    sight: Sight
    original: Tensor | None = None
    cause: Cause | None = None
    scaling: Scaling | None = None
    scale: Tensor | None = None
    rows: Tensor | None = None
    ratio: Tensor | None = None
    emptied: float = 0.0


def examine(
    opened: Opened, originals: Originals | None, progress: Progress, findings: list[Finding]
) -> Iterator[Examined]:
    """The weights in the order of their names; what cannot be read becomes a finding."""
    weights = by_weight(opened.tensors)
    scaled = originals is not None and _has_other_norms(opened, originals, weights)
    for number, (name, stored) in enumerate(weights.items()):
        progress("check", number, len(weights))
        if name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")):
            continue
        if opened.unread is not None and is_packed(stored):
            continue
        try:
            weight = read(opened, name)
        except UserError as error:
            findings.append(_damaged(name, str(error), opened.shown))
            continue
        if isinstance(weight, Tensor) and not weight.is_floating_point():
            continue
        found = _one(opened, originals, name, weight, sizes(opened, name, stored, weight), findings, scaled)
        if found is not None:
            yield found
    progress("check", len(weights), len(weights))


def _has_other_norms(opened: Opened, originals: Originals, weights: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the norm of a block differs from the original's by more than rounding."""
    for name, stored in weights.items():
        if is_packed(stored) or kind_of(name) == "" or "norm" not in name.rpartition(".")[0].rpartition(".")[2]:
            continue
        try:
            ours = read(opened, name)
        except UserError:
            continue
        real = originals.get(name)
        if isinstance(ours, Tensor) and ours.ndim == 1 and real is not None and real.shape == ours.shape:
            off = float((ours.float() - real.float()).norm() / real.float().norm().clamp_min(1e-30))
            if off > PLAIN / 2:
                return True
    return False


def _damaged(name: str, says: str, shown: str) -> Finding:
    says = says.removeprefix(f"{shown}: ")
    kind = "finite" if "finite" in says else "shape" if "shape" in says or "words" in says else "quantization"
    if "is missing" in says:
        kind = "missing"
    return Finding(level="broken", kind=kind, where=name, says=says)  # type: ignore[arg-type]


def _one(
    opened: Opened,
    originals: Originals | None,
    name: str,
    weight: Stored,
    size: Sizes,
    findings: list[Finding],
    scaled: bool,
) -> Examined | None:
    if 0 in size.shape:
        findings.append(Finding(level="broken", kind="shape", where=name, says=f"has no values: shape {size.shape}"))
        return None
    sight = look(weight)
    row = Weight(
        name=name,
        kind=kind_of(name),
        stored=size.stored,
        packed=isinstance(weight, PackedWeight),
        shape=size.shape,
        bits=size.bits,
        zeros=sight.zeros,
    )
    real = None if originals is None or sight.bad else originals.get(name)
    scale = weight.scale if isinstance(weight, PackedWeight) else None
    if real is None or not _comparable(weight, real):
        return Examined(row, sight, scale=scale if _is_small(scale) else None)
    if tuple(real.shape) != tuple(size.shape):
        real = real.reshape(size.shape)
    found, scaling, cause = _nearest_reading(weight, real, scaled)
    row = row.model_copy(
        update={
            "error": found.error,
            "nearest": found.nearest,
            "cosine": found.cosine,
            "scaled": scaling is not None,
        }
    )
    far = cause is not None or scaling is not None
    return Examined(
        row,
        sight,
        sketch_of(real),
        cause,
        scaling,
        scale if far or _is_small(scale) else None,
        found.rows,
        _plain_ratio(weight, real) if not row.packed and found.error > PLAIN / 2 else None,
        sight.zeros - (found.zeros if row.packed else 0.0),
    )


def _is_small(scale: Tensor | None) -> bool:
    return scale is not None and scale.numel() <= 1 << 16


def _plain_ratio(weight: Stored, real: Tensor) -> Tensor | None:
    """ours / original of a vector, which a norm that absorbed a scaling shows."""
    if not isinstance(weight, Tensor) or weight.ndim != 1 or bool((real == 0).any()):
        return None
    return weight.float() / real.float()


def _comparable(weight: Stored, real: Tensor) -> bool:
    """Of one shape; a convolution's or gate's extra dimensions of size 1 do not count."""
    ours = weight.shape
    return tuple(s for s in ours if s != 1) == tuple(s for s in real.shape if s != 1)


def _nearest_reading(weight: Stored, real: Tensor, is_scaled: bool) -> tuple[Distance, Scaling | None, Cause | None]:
    """The distance; with a scaling where one explains most of it, and with a cause where another reading does.

    is_scaled  whether factors are expected, as norms have changed.
    """
    found = distance(weight, real)
    looked = is_scaled and isinstance(weight, PackedWeight)
    if not looked and not is_off(found.error, found.nearest, _LOOK):
        return found, None, None
    n, k = rows_of(weight)
    cause = causes.find_cause(weight, real, found) if n > 1 or isinstance(weight, PackedWeight) else None
    if cause is not None and cause.kind != "scales":
        return found, None, cause
    if n == 1 or n * k > _MOST_SCALED or not (looked or is_off(found.error, found.nearest, _FAR)):
        return found, None, cause
    scaling = find_scaling(weight, real)
    if max(far_from_one(scaling.rows), far_from_one(scaling.columns)) < (_VARIED / 3 if looked else _VARIED):
        return found, None, cause
    scaled = distance(weight, real, scaling)
    whole = looked and not is_off(scaled.error, scaled.nearest, _LOOK)
    if not whole and scaled.error > _NEARER * min(found.error, found.error if cause is None else cause.error):
        return found, None, cause
    inner = None
    if is_off(scaled.error, scaled.nearest, 1.5):
        inner = causes.find_cause(weight, real, scaled, scaling)
    return scaled, scaling, inner if inner is not None else cause


def is_off(error: float, nearest: float | None, factor: float) -> bool:
    """Whether an error is more than `factor` times that of rounding to nearest; of plain weights more than rounding."""
    return error > (PLAIN if nearest is None else factor * nearest + 1e-4)
