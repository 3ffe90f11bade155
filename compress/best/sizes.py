"""Bytes on disk of an assignment, exactly, from names and shapes alone: no weight is read."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from compress.artifact import SHARD_BYTES, safetensors
from compress.artifact.safetensors import Described
from compress.best.space import CACHE, KEEP, Assignment, Option, Unit, library_of
from compress.model.plan import make_plan
from compress.model.source import Source
from compress.model.structure import ModelStructure
from compress.recipe.block_stages import Quantize
from runtime.cache.scheme import holds_scales, scale_name
from runtime.checkpoints.architecture import describe
from runtime.formats.schemes import KINDS
from runtime.formats.trellis import STATES, TILE

# A place in a file of weights that takes as many digits as any.
_FAR = 10**13


def packed(prefix: str, shape: tuple[int, int], option: Option, dtype: str) -> list[Described]:
    """The tensors of a packed layer (N, K), all but its bias; `dtype` is the element type of the original's weight."""
    (n, k), scheme = shape, option.stored_as
    if option.has_tiles:
        tiles = (-(-n // TILE), -(-k // TILE), TILE * TILE * scheme.bits // 8)
        return [
            (f"{prefix}.weight_tiles", "U8", tiles),
            (f"{prefix}.weight_levels", "I8", (STATES // 2,)),
            (f"{prefix}.weight_scale", dtype if dtype in ("F16", "BF16") else "BF16", (n, 1)),
            (f"{prefix}.weight_shape", "I64", (2,)),
        ]
    scale = dtype if dtype in ("F16", "BF16") else "BF16"
    groups = k // (scheme.group_size or k)
    scales = (f"{prefix}.weight_scale", scale, (n, groups))
    if KINDS[scheme.kind].layout == "int-quantized":
        return [(f"{prefix}.weight", "I8", (n, k)), scales]
    words = -(-k * scheme.bits // 32)
    return [(f"{prefix}.weight_packed", "I32", (n, words)), scales, (f"{prefix}.weight_shape", "I64", (2,))]


@dataclass(frozen=True)
class Sizes:
    """A model's tensors as a run writes them: in parts, of which each is in order; `units` are what may change.

    scales  that a quantised cache adds, where the library has a place for them.
    """

    parts: tuple[tuple[Described, ...], ...]
    units: tuple[Unit, ...]
    scales: tuple[Described, ...] = ()

    def exact(self, assignment: Assignment, limit: int = SHARD_BYTES) -> int:
        """Bytes of all files of weights, headers included; `limit` is the most in one."""
        parts: Sequence[Sequence[Described]] = self.described(assignment)
        if not assignment.get(CACHE, KEEP).keeps and _has_scales(library_of(assignment)):
            # The scales come when the weights are written, and join them.
            parts = [*safetensors.joined(parts, limit), self.scales]
        return safetensors.joined_bytes(parts, limit)

    def described(self, assignment: Assignment) -> list[list[Described]]:
        """What is in each part."""
        options = {
            f"{prefix}.weight": (prefix, shape, assignment[unit.name])
            for unit in self.units
            for prefix, shape in zip(unit.prefixes, unit.shapes, strict=True)
        }
        found = []
        for part in self.parts:
            tensors: list[Described] = []
            for name, dtype, shape in part:
                known = options.get(name)
                if known is None or known[2].keeps:
                    tensors.append((name, dtype, shape))
                else:
                    tensors += packed(known[0], known[1], known[2], dtype)
            found.append(tensors)
        return found

    def shares(self) -> tuple[int, list[list[int]]]:
        """(bytes of all else, [unit][option] bytes), which add up to `exact`, or to a few bytes a tensor more.

        What a tensor takes in the header depends on the tensors before it (digits of its place): the most is taken.
        """
        every = {name: dtype for part in self.parts for name, dtype, _ in part}
        mine = {f"{prefix}.weight" for unit in self.units for prefix in unit.prefixes}
        whole = sum(_bytes(one, 0) for part in self.parts for one in part)
        # Of the header: its own length, what every file says of itself, and the filling.
        rest = 80 + sum(_bytes(one, whole) for part in self.parts for one in part if one[0] not in mine)
        shares = []
        for unit in self.units:
            layers = list(zip(unit.prefixes, unit.shapes, strict=True))
            shares.append(
                [
                    sum(
                        _bytes(one, whole)
                        for prefix, shape in layers
                        for one in (
                            [(f"{prefix}.weight", every[f"{prefix}.weight"], shape)]
                            if option.keeps
                            else packed(prefix, shape, option, every[f"{prefix}.weight"])
                        )
                    )
                    for option in unit.options
                ]
            )
        return rest, shares

    def cache_share(self, option: Option) -> int:
        """Bytes that one of CACHES adds, or a few more, where the library has a place for them."""
        return 0 if option.keeps else sum(_bytes(one, _FAR) for one in self.scales)


def _has_scales(library: str | None) -> bool:
    """Whether a quantised cache's scales lie in the files of this library's weights, or of plain ones (None)."""
    return library in (None, "compressed-tensors")


def read_sizes(source: Source, model: ModelStructure, units: Sequence[Unit]) -> Sizes:
    """The sizes of a checkpoint. Raises UserError as `make_plan` does."""
    plan = make_plan(source.shapes(), model, Quantize(scheme="int8-dynamic"))
    entry = source.checkpoint.shards.entry
    parts = tuple(tuple((name, entry(name).dtype, entry(name).shape) for name in names) for _, names in plan.parts)
    return Sizes(parts, tuple(units), _scales(source))


def _scales(source: Source) -> tuple[Described, ...]:
    """Of every layer the static scales of keys and of values, which lie among the weights."""
    architecture = describe(source.checkpoint.config)
    if architecture is None or not holds_scales(source.checkpoint.config):
        return ()
    held = sorted((layer, group.shape.kv_heads) for group in architecture.key_groups for layer in group.layers)
    return tuple((scale_name(layer, part), "F32", (heads, 1, 1)) for part in "kv" for layer, heads in held)


def _bytes(tensor: Described, places: int) -> int:
    """What a tensor takes in a file whose last place has as many digits as `places`; 0: without its header."""
    name, dtype, shape = tensor
    about = {name: {"dtype": dtype, "shape": shape, "data_offsets": [places, places]}}
    header = len(json.dumps(about, separators=(",", ":"))) - 1 if places else 0
    return math.prod(shape) * safetensors.WIDTHS[dtype] + header
