"""Layers on Triton's kernels, alone or several over one input. Usable inside the capture of a CUDA graph.

Same bits at every width, whatever the number of rows: packed weights, which have those of kernels/reference.py where K
is one split (tile_sizes.splits) or one group; and float weights, whose tensor-core instruction is the same for all
tiles.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from runtime.kernels.joined import Joined, OfWeight
from runtime.kernels.triton import interpreted, tile_sizes, unpack
from runtime.kernels.triton.expert_rows import Picks
from runtime.kernels.triton.product_few import few_groups_product, few_rows_product
from runtime.kernels.triton.product_float import float_product
from runtime.kernels.triton.product_int import groups_product, rows_product, scale_kernel
from runtime.kernels.triton.quantize_inputs import OPTIONS, Rounded, Rounding, quantize, rounding
from runtime.kernels.triton.unpack import LEFT, Codes
from runtime.kernels.triton.weight_layout import Cut
from runtime.kernels.triton.weights import GpuWeight, upper_weight

# Outputs of one program that scales sums.
_SCALED = 256
# uint8 is fp8's bytes.
_FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.uint8: "fp8"}


@dataclass(frozen=True, eq=False)
class TritonLinear(OfWeight):
    """y (T, N) = x (T, K) Wᵀ (+ b), float32.

    plan    tile sizes; splits: parts into which K is cut, 1, 2 or 4 (tile_sizes has both).
    how     how inputs are rounded; None: they are not (float and fp8 weights).
    """

    weight: GpuWeight
    plan: tile_sizes.Plan
    splits: int
    how: Rounding | None

    def __call__(self, x: Tensor) -> Tensor:
        """Raises ValueError unless x is (T, K) float32."""
        return self.product(self.round(x))

    def round(self, x: Tensor) -> Rounded | Tensor:
        """x as the product takes it; layers for which `Rounding.serves` holds share it."""
        return x if self.how is None else quantize(x, self.how)

    def product(
        self,
        rounded: Rounded | Tensor,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        picks: Picks | None = None,
    ) -> Tensor:
        """The product with rounded inputs, plus `residual` (T, N) float32, into `out` (T, N) float32 where given.

        `residual` may be `out`. picks: the weight is a stack of experts (expert_rows.py), the inputs have a row for
        each row or for each pair, and the output has one for each pair.
        Raises ValueError for inputs that were rounded for another kind of weight or have not those rows, and for
        outputs that are not contiguous.
        """
        n, k = self.weight.shape
        given = rounded if isinstance(rounded, Tensor) else rounded.codes
        rows, device = len(given), given.device
        paired = picks is not None and rows == picks.pairs
        if picks is not None:
            if rows not in (picks.rows, picks.pairs):
                raise ValueError(f"inputs need {picks.rows} or {picks.pairs} rows, found {rows}")
            rows = picks.pairs
        for name, tensor in (("out", out), ("residual", residual)):
            if tensor is not None and not (tensor.shape == (rows, n) and tensor.is_contiguous()):
                raise ValueError(f"{name} must be ({rows}, {n}) and contiguous, found {list(tensor.shape)}")
        y = torch.empty((rows, n), device=device) if out is None else out
        if isinstance(rounded, Tensor):
            if self.how is not None or rounded.ndim != 2 or rounded.shape[1] != k or rounded.dtype != torch.float32:
                wanted = "rounded inputs" if self.how is not None else f"(T, {k}) float32"
                raise ValueError(f"this layer takes {wanted}, found {rounded.dtype} {list(rounded.shape)}")
            rounded = rounded if rounded.stride(1) == 1 or k == 1 else rounded.contiguous()
        elif self.how is None or not rounded.how.serves(self.how):
            raise ValueError("these inputs were rounded for a weight that is cut or ordered otherwise")
        if rows:
            self._multiply(rounded, y, residual, picks, paired)
        return y

    @property
    def has_planes(self) -> bool:
        """Whether `upper` takes it."""
        return self.weight.has_planes

    def upper(self) -> "TritonLinear":
        """The layer on the upper plane of its weight. Raises ValueError where it has none."""
        return triton_linear(upper_weight(self.weight), self.plan, self.splits)

    def _multiply(
        self, x: Rounded | Tensor, y: Tensor, residual: Tensor | None, picks: Picks | None, paired: bool
    ) -> None:
        """y = the product, and the residual."""
        w, cut, (n, k) = self.weight, self.weight.cut, self.weight.shape
        rows = len(y) if picks is None else picks.rows
        # Of experts a program takes the rows of one narrow tile, however many there are.
        tiles = tile_sizes.for_rows(self.plan, rows if picks is None else min(rows, tile_sizes.NARROW), cut is None)
        first = triton.cdiv(rows, tiles.block_t) if picks is None else picks.pairs
        # Programs of the same outputs are neighbours: a long prompt reads the weights once.
        programs = (first, triton.cdiv(n, tiles.block_n))
        many = cut is not None and tiles is self.plan.wide
        # Where each warp takes a split there are as many warps as splits.
        warps = tiles.warps if many else self.splits
        constants: dict[str, Any] = {"BLOCK_N": tiles.block_n, "BLOCK_T": tiles.block_t, "num_warps": warps}
        constants |= {"num_stages": tiles.stages, **OPTIONS}
        # What is read in turns: blocks of a float row, rounds of groups, units of a packed row.
        if cut is None:
            count = triton.cdiv(k, tiles.block_k)
        elif cut.columns == 1:
            count = cut.units
        else:
            count = cut.columns // cut.per_byte if cut.units == 0 else cut.groups
        each = triton.cdiv(count, self.splits)
        whole = each * self.splits == count
        ends = (residual, y, None if picks is None else picks.experts, rows, n)
        of_rows = {"COUNT": 1 if picks is None else picks.count, "PAIRED": paired}
        if isinstance(x, Tensor) or cut is None:
            assert isinstance(x, Tensor)
            kind, whole = _FLOATS[w.codes.dtype], whole and k % tiles.block_k == 0
            float_product[programs](
                *(x, w.codes, w.scale, w.bias, *ends, k, x.stride(0), each),
                **(constants | of_rows | {"KIND": kind, "WHOLE": whole, "SPLITS": self.splits}),
                BLOCK_K=tiles.block_k, INTERPRETED=interpreted(),
            )  # fmt: skip
            return
        constants |= {"CODES": _codes(w, cut)}
        if not many:
            constants |= of_rows | {"SPLITS": self.splits, "WHOLE": whole}
        if many and cut.columns == 1:
            rows_product[programs](*_operands(x, w), residual, y, rows, n, cut.stored, cut.units, **constants)
        elif cut.columns == 1:
            few_rows_product[programs](*_operands(x, w), *ends, cut.stored, cut.units, each, **constants)
        else:
            sizes = (cut.stored, cut.row_bytes, cut.columns, count, each)
            constants |= {"UNITS": cut.units, "STAGES": tiles.stages}
            if many:
                constants |= {"SPLITS": self.splits}
                groups_product[programs](*_operands(x, w), residual, y, rows, n, *sizes, **constants)
            else:
                few_groups_product[programs](*_operands(x, w), *ends, *sizes, **constants)


@dataclass(frozen=True)
class TritonJoined(Joined):
    """Layers of one input that are several products: the input is rounded once where one rounding serves them all."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return split_outputs(self.products(self.round(x)), self.sizes)

    @property
    def layers(self) -> tuple[TritonLinear, ...]:
        """The parts, which are all Triton's."""
        return self.parts  # type: ignore[return-value]

    @property
    def how(self) -> Rounding | None:
        """The one rounding of all parts; None: they are float, or do not share one."""
        return rounding(*(layer.weight for layer in self.layers))

    def round(self, x: Tensor) -> Rounded | Tensor:
        """x as `products` takes it."""
        how = self.how
        return x if how is None else quantize(x, how)

    def products(self, rounded: Rounded | Tensor) -> tuple[Tensor, ...]:
        """Each part's output; x itself is rounded by the parts that want it rounded."""
        if isinstance(rounded, Tensor):
            return tuple(layer(rounded) for layer in self.layers)
        return tuple(layer.product(rounded) for layer in self.layers)


def split_outputs(outputs: tuple[Tensor, ...], sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Outputs of parts, cut to the sizes of the layers that were joined; views where one part holds them all."""
    if len(outputs) == 1:
        return outputs[0].split(sizes, dim=1)
    if tuple(output.shape[1] for output in outputs) == sizes:
        return outputs
    return torch.cat(outputs, dim=1).split(sizes, dim=1)


def triton_linear(weight: GpuWeight, plan: tile_sizes.Plan | None = None, splits: int | None = None) -> TritonLinear:
    """The layer of a weight; tiles and splits from tile_sizes where they are not given."""
    chosen = tile_sizes.plan(weight.kind, weight.codes.device, weight.shape[0]) if plan is None else plan
    cuts = tile_sizes.splits(weight.shape[1]) if splits is None else splits
    return TritonLinear(weight, chosen, cuts, rounding(weight))


def scale_sums(sums: Tensor, out: Tensor, residual: Tensor | None, weight: GpuWeight, x: Rounded) -> None:
    """out (rows, N) = sums (at least so many rows, N) int32 of the inputs' codes times the weight's, scaled as
    product_int.scale_kernel says."""
    (_, n), rows = sums.shape, len(out)
    added = x.sums if weight.offset is not None else None
    ends = (x.step, added, weight.scale, weight.offset, weight.bias, residual)
    scale_kernel[(triton.cdiv(n, _SCALED), rows)](sums, *ends, out, n, BLOCK=_SCALED, **OPTIONS)


def _operands(x: Rounded, w: GpuWeight) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Inputs and weight as `rows_product` takes them; sums are read where there are offsets."""
    inputs = (x.codes, x.step, x.sums if w.offset is not None else None)
    return inputs, (w.codes, w.lower, w.levels, w.scale, w.offset, w.bias)


def _codes(weight: GpuWeight, cut: Cut) -> Codes:
    """How the kernel unpacks."""
    texts = () if interpreted() else unpack.texts(weight.kind, cut.per_byte)
    return Codes(weight.kind, cut.chunk, cut.per_byte, LEFT.get(weight.kind, 0), texts)
