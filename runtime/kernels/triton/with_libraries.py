"""Layers whose products run on Triton's kernels or on a library's, by the number of rows, as library_choice.py says."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.formats.packed import PackedWeight
from runtime.kernels import libraries
from runtime.kernels.libraries import LibraryLinear
from runtime.kernels.library_choice import Choice
from runtime.kernels.reference import integer_product
from runtime.kernels.triton.expert_rows import Picks
from runtime.kernels.triton.linear import TritonLinear, scale_sums
from runtime.kernels.triton.quantize_inputs import Rounded

Weight = PackedWeight | Tensor
_FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "f32"}
_PACKED: dict[str, Callable[[PackedWeight], LibraryLinear | None]] = {
    "torch-int4": libraries.int4_linear,
    "torch-scaled-mm": libraries.scaled_linear,
    "bitsandbytes": partial(libraries.bitsandbytes_linear, dtype=torch.bfloat16),
}
_INT_MM = "torch-int-mm"
# CUDA's integer product takes more than 16 rows, and outputs in eights (Triton stores inputs in 32s at least).
_LEAST_ROWS, _OUTPUTS = 17, 8
# Rows of products that a probe compares: those of verifying drafts, and some of batches and prompts.
_WIDTHS = (*range(1, 17), 17, 33, 300)


@dataclass(frozen=True, eq=False)
class IntMmLinear(TritonLinear):
    """A layer (`int_mm_linear`) whose products of `spans` of rows (first, last or None) torch computes, of int8 rows.

    The sums are exact integers and the scaling is that of Triton's own kernel, so the bits are the reference's, and the
    same at every width, whichever of the two products ran. It reads Triton's layout: nothing is held twice.
    """

    spans: tuple[tuple[int, int | None], ...] = ((1, None),)

    @property
    def libraries(self) -> tuple[str, ...]:
        return (_INT_MM,)

    def _multiply(
        self, x: Rounded | Tensor, y: Tensor, residual: Tensor | None, picks: Picks | None, paired: bool
    ) -> None:
        rows = len(y)
        ours = any(first <= rows and (last is None or rows <= last) for first, last in self.spans)
        # Of a stack each row has a weight of its own.
        if picks is not None or not ours or isinstance(x, Tensor):
            return super()._multiply(x, y, residual, picks, paired)
        w = self.weight
        codes = torch.nn.functional.pad(x.codes, (0, 0, 0, max(0, _LEAST_ROWS - rows)))
        # Rows that were filled in lie behind the others, which is all that the next kernel looks at.
        # Triton's interpreter is on the CPU, where torch's own product saturates without VNNI.
        multiply = torch._int_mm if codes.is_cuda else integer_product
        sums = multiply(codes, w.codes.t())
        return scale_sums(sums, y, residual, w, x)


def int_mm_linear(layer: TritonLinear, spans: tuple[tuple[int, int | None], ...]) -> TritonLinear:
    """The layer with `spans` of its products' rows on torch's.

    As it is where torch's do not take its weight: they want int8, one scale a row, outputs in eights, not in planes.
    """
    weight = layer.weight
    one_group = weight.cut is not None and weight.cut.columns == 1
    if weight.kind != "int8" or not one_group or weight.shape[0] % _OUTPUTS:
        return layer
    return IntMmLinear(weight, layer.plan, layer.splits, layer.how, spans)


@dataclass(frozen=True, eq=False)
class MixedLinear:
    """y (T, N) = x (T, K) Wᵀ (+ b), float32: the part whose rows hold T computes it, else `rest`.

    rest  None where the parts hold every number of rows.
    """

    parts: tuple[tuple[Choice, LibraryLinear], ...]
    rest: TritonLinear | None

    @property
    def libraries(self) -> tuple[str, ...]:
        layers = (*(layer for _, layer in self.parts), self.rest)
        return tuple(dict.fromkeys(name for layer in layers for name in getattr(layer, "libraries", ())))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds; what two parts share comes twice."""
        own = () if self.rest is None else self.rest.weight.tensors
        return own + tuple(tensor for _, layer in self.parts for tensor in layer.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that a product of one row reads."""
        return self._of(1).nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._of(x.shape[0])(x)

    def _of(self, rows: int) -> LibraryLinear | TritonLinear:
        """What computes so many rows; a library of other bits before torch-int-mm, which is in `rest`."""
        found = next((layer for choice, layer in self.parts if choice.holds(max(rows, 1))), self.rest)
        assert found is not None
        return found


def scheme_of(weight: Weight) -> str:
    """What the table calls a weight's scheme."""
    return _FLOATS.get(weight.dtype, str(weight.dtype)) if isinstance(weight, Tensor) else weight.scheme.kind


def library_layer(name: str, weight: Weight, bias: Tensor | None) -> LibraryLinear | None:
    """The layer of an implementation; None where it does not take the weight's sizes and what comes with it.

    torch-int-mm stands in for Triton's own product (IntMmLinear).
    """
    if isinstance(weight, Tensor):
        return libraries.dense_linear(weight, bias) if name == "torch" and weight.dtype in _FLOATS else None
    if name not in _PACKED or weight.planes:
        return None
    return _PACKED[name](weight)


def mixed_linear(
    own: TritonLinear, weight: Weight, bias: Tensor | None, table: Sequence[Choice], exact: bool
) -> TritonLinear | MixedLinear:
    """The layer of a weight by the entries of a table that are for its scheme and take it; else `own` as it is.

    own    Triton's layer of the same weight.
    exact  bits must be the same at every width: a probe on the weight's device decides, and `own` stays, with a
           warning, where they are not or the library fails.

    Raises UserError where bits are free and the library fails.
    """
    found = [one for one in table if one.scheme == scheme_of(weight)]
    if not found:
        return own
    names, (outputs, inputs) = ", ".join(dict.fromkeys(one.implementation for one in found)), own.weight.shape
    layers = f"{scheme_of(weight)} layers of {outputs} outputs and {inputs} inputs"
    try:
        made = _made(own, weight, bias, found)
        if made is own or _tried(made, own, found, exact):
            return made
        why = f"the bits of {layers} change with the width on this device, which the table of measurements denies"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ImportError) as error:
        why = f"no product of {layers} on this device ({' '.join(str(error).split())[:120]})"
        if not exact:
            raise UserError(f"{names}: {why}; use kernels='auto'") from error
    warnings.warn(
        f"{names}: {why}; Triton's kernels run them (`python -m runtime.bench gpu kernels` measures anew)", stacklevel=2
    )
    return own


def _made(
    own: TritonLinear, weight: Weight, bias: Tensor | None, found: Sequence[Choice]
) -> TritonLinear | MixedLinear:
    integer = tuple((one.first_row, one.last_row) for one in found if one.implementation == _INT_MM)
    rest = int_mm_linear(own, integer) if integer else own
    made = [(one, library_layer(one.implementation, weight, bias)) for one in found]
    parts = tuple((one, layer) for one, layer in made if layer is not None)
    if not parts:
        return rest
    everything = any(one.first_row == 1 and one.last_row is None for one, _ in parts)
    return MixedLinear(parts, None if everything else rest)


def _tried(made: TritonLinear | MixedLinear, own: TritonLinear, found: Sequence[Choice], exact: bool) -> bool:
    """Whether it may run: always where bits are free, once it has run at all."""
    inputs, device = own.weight.shape[1], own.weight.codes.device
    if exact:
        borders = [edge for one in found for edge in (one.first_row, one.last_row) if edge is not None]
        return keeps_bits(made, inputs, device, borders)
    with _on(device):
        for one in found:
            made(torch.zeros((one.first_row, inputs), device=device))
    return True


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def keeps_bits(
    layer: Callable[[Tensor], Tensor], inputs: int, device: torch.device, borders: Sequence[int] = ()
) -> bool:
    """Whether each row of random inputs has one result, whatever the rows beside it; tried on the device.

    layer    (T, inputs) float32 to (T, N).
    borders  rows at which another product may begin or end, tried beside widths 1 to 16 and some more.
    """
    widths = sorted({*_WIDTHS, *borders, *(edge + 1 for edge in borders)})
    x = torch.randn(widths[-1], inputs, device=device, generator=torch.Generator(device).manual_seed(0))
    spans = [*((0, width) for width in widths[:-1]), (3, 4), (7, 8), (15, 16), (5, 21)]
    with _on(device):
        whole = layer(x)
        return all(torch.equal(layer(x[first:last]), whole[first:last]) for first, last in spans)
