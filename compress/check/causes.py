"""What a weight that is off looks like: readings of its codes, scales and zero points that would fit the original."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.check.compare import Distance, Scaling, sample_rows
from compress.check.findings import Kind
from compress.check.layers import Stored, plain_rows, rows_of, take_rows
from compress.check.orders import INTERLEAVED, ORDERS_OF_CODES, ORDERS_OF_GROUPS, swapped_rows
from runtime import formats
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import KINDS

_MOST = 16384
_TINY = 1e-30
_CERTAIN, _DIFFERENT, _NEAR = 0.6, 0.3, 1.8
# Rows for a first look; and the cosine above which rows and columns are in their own places.
_FEW, _ELSEWHERE = 64, 0.8


@dataclass(frozen=True, eq=False)
class Cause:
    """A reading that fits.

    says    in words; error: relative, of the sample, read so.
    scales  where the codes fit with other scales: those, (sampled rows, G), and `rows`, which rows these are.
    """

    kind: Kind
    says: str
    error: float
    scales: Tensor | None = None
    rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows of a weight and of the original, and the whole packed weight that they are of."""

    rows: Tensor
    real: Tensor
    part: PackedWeight
    packed: PackedWeight

    def error(self, found: Tensor) -> float:
        """Relative, of weights of the sample."""
        return float((found - self.real).norm() / self.real.norm().clamp_min(_TINY))


def find_cause(ours: Stored, original: Tensor, far: Distance, scaling: Scaling | None = None) -> Cause | None:
    """The reading that fits best, where one makes the error much smaller and brings it near to that of rounding.

    far  the distance as the weight is read now.
    """
    n, _ = rows_of(ours)
    rows = sample_rows(n)
    if far.nearest is not None and far.error < _NEAR * far.nearest:
        rows = rows[:_FEW]
    real = plain_rows(original, rows)
    if scaling is not None:
        real = scaling.of(real, rows)
    nearest = far.nearest
    found: list[Cause] = []
    most = float("inf") if nearest is None else _NEAR * nearest + 1e-3
    if isinstance(ours, PackedWeight):
        sample = Sample(rows, real, take_rows(ours, rows), ours)
        here = sample.error(formats.dequantize(sample.part))
        for kind, says, read in _readings(sample):
            fits = sample.error(read())
            if fits < min(_CERTAIN * here, most):
                found.append(Cause(kind, f"fits when {says}", fits))
        if not found or min(cause.error for cause in found) > _CERTAIN * far.error:
            found += [
                cause
                for cause in (_reordered(sample), _rescaled(sample))
                if cause and cause.error < min(0.8 * here, most)
            ]
    if not found:
        return _moved(ours, original, rows, real) if far.cosine < _ELSEWHERE else None
    return min(found, key=lambda cause: cause.error)


Reading = tuple[Kind, str, Callable[[], Tensor]]


def _readings(sample: Sample) -> Iterator[Reading]:
    """Other ways to read the stored numbers."""
    part = sample.part
    kind = KINDS[part.scheme.kind]
    integers = not kind.is_float and not kind.levels and not kind.has_tiles

    def codes(change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        def read() -> Tensor:
            if kind.is_float:
                # torch moves floats of eight bits as bytes only.
                octets = change(part.codes.view(torch.uint8)).contiguous()
                return formats.dequantize(replace(part, codes=octets.view(part.codes.dtype)))
            if part.perm is None:
                return formats.dequantize(replace(part, codes=change(part.codes).contiguous()))
            # Files hold codes in the order of the inputs.
            moved = change(part.codes[:, part.perm.argsort()])[:, part.perm]
            return formats.dequantize(replace(part, codes=moved.contiguous()))

        return read

    if integers:
        yield from _zero_points(sample)
        if part.scheme.bits <= 8:
            half = 1 << part.scheme.bits - 1
            low, high = (-half, half - 1) if int(part.codes.min()) < 0 else (0, 2 * half - 1)
            yield (
                "codes",
                "the codes' highest bit is turned",
                codes(lambda c: torch.where(c >= low + half, c - half, c + half)),
            )
            yield "codes", "the codes are counted from the other end", codes(lambda c: low + high - c)
    if integers and part.scheme.bits == 8:
        swapped = "the halves of each code are swapped: nibbles"
        yield "codes", swapped, codes(lambda c: _halves_of(c.int() + 128) - 128)
        yield "codes", swapped, codes(lambda c: (_halves_of(c.int() & 255) ^ 128) - 128)
    if kind.levels:
        yield "codes", "the codes are counted from the other end", codes(lambda c: 15 - c)
    for says, change in ORDERS_OF_CODES:
        yield "codes", says, codes(change)
    for says, change in ORDERS_OF_GROUPS:
        yield "scales", f"the scales are {says}", _regrouped(sample, change)
    if part.perm is not None:
        yield "order", "the inputs are taken in their own order", lambda: formats.dequantize(replace(part, perm=None))
        perm = part.perm
        yield (
            "order",
            "the order of inputs is turned round",
            lambda: formats.dequantize(replace(part, perm=perm.argsort())),
        )


def _halves_of(octets: Tensor) -> Tensor:
    """Bytes with their halves exchanged."""
    return octets >> 4 | (octets & 15) << 4


def _zero_points(sample: Sample) -> Iterator[Reading]:
    part = sample.part
    offset = torch.zeros_like(part.scale) if part.offset is None else part.offset

    def shifted(steps: int) -> Callable[[], Tensor]:
        return lambda: formats.dequantize(replace(part, offset=offset + steps * part.scale))

    yield "zero points", "zero points are lowered by 1", shifted(-1)
    yield "zero points", "zero points are raised by 1", shifted(1)
    if part.offset is None:
        return
    yield "zero points", "zero points are left out", lambda: formats.dequantize(replace(part, offset=None))
    yield (
        "zero points",
        "zero points are subtracted the other way",
        lambda: formats.dequantize(replace(part, offset=-offset)),
    )
    packed = sample.packed
    assert packed.offset is not None
    zeros = packed.offset / packed.scale
    changes = [*ORDERS_OF_GROUPS, ("with their nibbles swapped", swapped_rows), *INTERLEAVED]
    for says, change in changes:

        def read(change: Callable[[Tensor], Tensor] = change) -> Tensor:
            moved = change(zeros)
            if moved.shape != zeros.shape:
                return torch.zeros_like(sample.real)
            return formats.dequantize(replace(part, offset=moved[sample.rows] * part.scale))

        yield "zero points", f"zero points are taken {says}", read


def _regrouped(sample: Sample, change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    """The sample with the whole weight's scales in another order, zero points where they are."""
    packed, part = sample.packed, sample.part

    def read() -> Tensor:
        scale = change(packed.scale)[sample.rows]
        offset = None if part.offset is None else part.offset / part.scale * scale
        return formats.dequantize(replace(part, scale=scale, offset=offset))

    return read


def _reordered(sample: Sample) -> Cause | None:
    """Whether every input would rather be of another group: an activation order that was lost or made up."""
    part = sample.part
    groups = part.scale.shape[1]
    if groups == 1:
        return None
    codes = part.codes.float() if not KINDS[part.scheme.kind].levels else None
    if codes is None:
        return None
    if part.perm is not None:
        codes = codes[:, part.perm.argsort()]
    offset = torch.zeros_like(part.scale) if part.offset is None else part.offset
    scale, real = part.scale, sample.real
    # |c s − o − w|² of every input under every group's scale s and offset o, summed over the rows.
    cost = (codes**2).t() @ scale**2 + (offset**2).sum(0) - 2 * codes.t() @ (scale * offset)
    cost += 2 * real.t() @ offset - 2 * (codes * real).t() @ scale
    best = cost.argmin(1)
    found = codes * scale[:, best] - offset[:, best]
    width = codes.shape[1] // groups
    now = torch.arange(codes.shape[1]) // width
    if part.perm is not None:
        now = torch.empty_like(now).scatter_(0, part.perm, now)
    moved = float((best != now).float().mean())
    if moved < _DIFFERENT:
        return None
    counts = torch.bincount(best, minlength=groups)
    even = float(((counts - width).abs() <= max(2, width // 8)).float().mean())
    lost = "fits when inputs are put into other groups"
    says = f"{lost}: the activation order (g_idx) is lost" if part.perm is None else f"{lost}: g_idx is wrong"
    if even < 0.9:
        says = f"{lost} ({moved:.0%} of the inputs)"
    return Cause("order", says, sample.error(found))


def _rescaled(sample: Sample) -> Cause | None:
    """Whether the codes fit with scales (and zero points) of their own, found by least squares."""
    part = sample.part
    n, k = part.shape
    groups = part.scale.shape[1]
    real = sample.real if part.perm is None else sample.real[:, part.perm]
    plain = replace(part, scale=torch.ones_like(part.scale), offset=None, perm=None)
    values = formats.dequantize(plain).view(n, groups, k // groups)
    target = real.view(n, groups, k // groups)
    middle_v, middle_t = (x.mean(2, keepdim=True) if part.offset is not None else 0 for x in (values, target))
    above = ((values - middle_v) * (target - middle_t)).sum(2)
    scale = above / (values - middle_v).square().sum(2).clamp_min(_TINY)
    found = (values - middle_v) * scale.unsqueeze(2) + middle_t
    error = float((found - target).norm() / target.norm().clamp_min(_TINY))
    used = part.scale.abs() > _TINY
    ratio = (part.scale / torch.where(scale.abs() > _TINY, scale, 1.0))[used]
    if not ratio.numel():
        return Cause("scales", "the codes fit the original, but all scales are 0", error, scale, sample.rows)
    middle = float(ratio.median())
    spread = float(((ratio - middle).abs() / max(abs(middle), _TINY)).median())
    says = "the codes fit the original, but the scales do not"
    if part.offset is not None:
        says = "the codes fit the original, but the scales or zero points do not"
        zero = part.offset / part.scale
        wanted = (scale * (middle_v - middle_t / scale.unsqueeze(2).clamp_min(_TINY)).squeeze(2)) / scale.clamp_min(
            _TINY
        )
        off = float((zero - wanted).abs().median())
        if spread < 0.1 and abs(middle - 1) < 0.1 and off > 0.3:
            return Cause("zero points", "codes and scales fit the original, but the zero points do not", error)
    if spread < 0.05 + error / (k / groups) ** 0.5 and abs(middle - 1) > 0.05:
        says = f"the codes fit the original, but the scales are {middle:.3g} times what they should be"
    return Cause("scales", says, error, scale, sample.rows)


def _moved(ours: Stored, original: Tensor, rows: Tensor, real: Tensor) -> Cause | None:
    """Rows, columns or signs that are the original's in other places."""
    n, k = rows_of(ours)
    found = plain_rows(ours, rows)
    size = real.norm().clamp_min(_TINY)
    if float((found + real).norm() / size) < _CERTAIN:
        return Cause("codes", "it is the original with the other sign", float((found + real).norm() / size))
    here = float((found - real).norm() / size)
    if n == k and n <= _MOST:
        other = plain_rows(original, slice(None)).t()[rows]
        if (error := float((found - other).norm() / size)) < _CERTAIN * here:
            return Cause("order", "it is the original transposed", error)
    if k <= _MOST and len(rows) >= 8 and (cause := _permuted(found.t(), real.t(), "columns")) is not None:
        return cause
    if n <= _MOST and k >= 8:
        columns = sample_rows(k)
        all_ours = torch.cat([plain_rows(ours, slice(i, i + 1024))[:, columns] for i in range(0, n, 1024)])
        all_real = torch.cat([plain_rows(original, slice(i, i + 1024))[:, columns] for i in range(0, n, 1024)])
        return _permuted(all_ours, all_real, "rows")
    return None


def _permuted(found: Tensor, real: Tensor, what: str) -> Cause | None:
    """found, real: (count, numbers). Whether each of `found` is most like another of `real`."""
    ours = torch.nn.functional.normalize(found, dim=1)
    theirs = torch.nn.functional.normalize(real, dim=1)
    best, likeness = [], []
    for part in ours.split(2048):
        like, place = (part @ theirs.t()).max(1)
        best.append(place)
        likeness.append(like)
    place, like = torch.cat(best), torch.cat(likeness)
    own = torch.arange(len(place))
    moved = float((place != own).float().mean())
    # Nearly every one has a partner of its own, and most partners are others.
    distinct = len(place.unique()) / len(place)
    if moved < _DIFFERENT or float(like.median()) < 0.7 or distinct < 0.9:
        return None
    error = float((found - real[place]).norm() / real.norm().clamp_min(_TINY))
    return Cause("order", f"its {what} are the original's in another order{_known_order(place, what)}", error)


def _known_order(place: Tensor, what: str) -> str:
    own = torch.arange(len(place))
    if float((place == (own ^ 1)).float().mean()) > 0.9:
        return ": neighbours are swapped, as nibbles are"
    if float((place == own.flip(0)).float().mean()) > 0.9:
        return ": from the last to the first"
    if what == "rows":
        for head in (16, 32, 64, 80, 96, 128, 256):
            if len(place) % head:
                continue
            halves = own.view(-1, 2, head // 2).transpose(1, 2).reshape(-1)
            for order in (halves, halves.argsort()):
                if float((place == order).float().mean()) > 0.9:
                    return f": halves and neighbours of rotated heads of {head} are exchanged (rotary layout)"
    return ""
