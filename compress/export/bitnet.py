"""Export "bitnet": transformers' two-bit ternary layout, which llama.cpp's converter reads too."""

from torch import Tensor

from compress.export.directory import Form, Layout
from compress.export.layers import Facts, Model
from runtime.formats import ternary
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import KINDS

_REFUSED = {
    kind: (
        f"bitnet holds ternary weights, found {kind}, which rounding to three values would ruin: compress with a recipe"
        " that trains ternary weights"
    )
    for kind in KINDS
    if kind != "ternary"
} | {
    "ternary-1.25": (
        "bitnet has one scale a layer, found ternary-1.25, which has one a row: export to gguf, compressed-tensors or"
        " gptq, which hold it exactly"
    )
}


def _form(model: Model) -> Form:
    def store(layer: Facts, weight: PackedWeight) -> dict[str, Tensor]:
        return ternary.to_tensors(weight, layer.prefix, model.dtype)

    return Form(ternary.hf_config(model.skipped), store)


LAYOUT = Layout("bitnet", _REFUSED, _form)
refusal, write = LAYOUT.refusal, LAYOUT.write
