"""int8 rows by torch's integer product (`torch._int_mm`): for as many rows as were asked for, else as linear.py does.

The sums are exact integers and the scaling is that of Triton's own kernel, so the bits are the reference's, and the
same at every width, whichever of the two products ran. It reads Triton's layout of the weight: nothing is held twice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.triton.expert_rows import Picks
from runtime.kernels.triton.linear import TritonLinear, add
from runtime.kernels.triton.quantize_inputs import Rounded
from runtime.kernels.triton.weight_layout import Cut

NAME = "torch-int-mm"
# CUDA's product takes more than 16 rows, and outputs in eights (Triton stores inputs in 32s at least).
LEAST_ROWS = 17
_OUTPUTS = 8


@dataclass(frozen=True, eq=False)
class IntMmLinear(TritonLinear):
    """A layer (`int_mm_linear`) whose products of `spans` of rows (first, last or None) torch computes."""

    spans: tuple[tuple[int, int | None], ...] = ((1, None),)

    @property
    def libraries(self) -> tuple[str, ...]:
        """Whose products it runs."""
        return (NAME,)

    def _rows(
        self, x: Rounded, y: Tensor, residual: Tensor | None, cut: Cut, picks: Picks | None, paired: bool
    ) -> None:
        rows = len(y)
        ours = any(first <= rows and (last is None or rows <= last) for first, last in self.spans)
        # Of a stack each row has a weight of its own.
        if picks is not None or not ours:
            return super()._rows(x, y, residual, cut, picks, paired)
        w = self.weight
        codes = torch.nn.functional.pad(x.codes, (0, 0, 0, max(0, LEAST_ROWS - rows)))
        # Rows that were filled in lie behind the others, which is all that the next kernel looks at.
        sums = torch._int_mm(codes, w.codes.t())
        return add(sums.unsqueeze(0), y, residual, w.bias, w.scale, w.offset, x)


def int_mm_linear(layer: TritonLinear, spans: tuple[tuple[int, int | None], ...]) -> TritonLinear:
    """The layer with `spans` of its products' rows on torch's.

    As it is where torch's do not take its weight: they want int8, one scale a row, outputs in eights, not in planes.
    """
    weight = layer.weight
    one_group = weight.cut is not None and weight.cut.columns == 1
    if weight.kind != "int8" or not one_group or weight.shape[0] % _OUTPUTS:
        return layer
    return IntMmLinear(weight, layer.plan, layer.splits, layer.how, spans)
