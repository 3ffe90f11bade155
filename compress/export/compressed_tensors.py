"""Export "compressed-tensors": pack-quantized and int-quantized, for transformers, vLLM, SGLang and llm-compressor."""

from torch import Tensor

from compress.errors import UserError
from compress.export.directory import Form, Layout
from compress.export.layers import Facts, Model, to_int8_rows, with_scale_in, with_whole_zeros
from runtime import formats
from runtime.formats import int4, int8
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import stored_scale_dtype

_REFUSED = {
    "nf4": (
        "compressed-tensors holds evenly spaced codes, found nf4, whose codes are not: compress with an int4 recipe, or"
        " export to bitsandbytes"
    )
}


def _form(model: Model) -> Form:
    schemes = {layer.prefix: _scheme(layer) for layer in model.packed}
    reordered = [layer.prefix for layer in model.packed if layer.reordered and schemes[layer.prefix].kind == "int4"]
    try:
        config = formats.hf_config(schemes, model.skipped, reordered=reordered)
    except ValueError as error:
        raise UserError(f"export compressed-tensors: {error}: choose another form") from error
    scales = stored_scale_dtype(model.dtype)

    def store(layer: Facts, weight: PackedWeight) -> dict[str, Tensor]:
        wanted = schemes[layer.prefix]
        if wanted.kind == "int8":
            ready = weight if _is_row(layer) else to_int8_rows(weight, scales)
            ready = with_scale_in(ready, scales)
            return int8.to_tensors(ready, layer.prefix, model.dtype, scales)
        ready = with_scale_in(with_whole_zeros(weight), scales)
        ready = PackedWeight(wanted, ready.codes, ready.scale, ready.offset, ready.perm, ready.bias)
        return int4.to_tensors(ready, layer.prefix, model.dtype, scales)

    return Form(config, store, tuple(_notes(model, reordered)))


def _is_row(layer: Facts) -> bool:
    return layer.scheme.group_size == 0 and layer.zeros == (0, 0) and not layer.reordered


def _scheme(layer: Facts) -> Scheme:
    """What a layer becomes: ternary fits two bits, and other kinds of int8 than rows are rounded to those."""
    if layer.scheme.kind == "int8":
        return layer.scheme if _is_row(layer) else int8.scheme("float")
    symmetric = layer.zeros == (0, 0)
    return int4.scheme(layer.scheme.group_size, bits=layer.scheme.bits, symmetric=symmetric)


def _notes(model: Model, reordered: list[str]) -> list[str]:
    notes = []
    if reordered:
        notes.append(
            "Inputs in activation order are stored with weight_g_idx, which vLLM reads; compressed-tensors dropped it"
            " in August 2026, and transformers refuses it since."
        )
    if any(layer.zeros != (0, 0) for layer in model.packed):
        notes.append("With zero points transformers loads models of one scheme only, and with dequantize=True.")
    if any(layer.scheme.kind == "ternary" for layer in model.packed):
        notes.append("Ternary codes are stored in two bits, one scale per row; inputs are no longer rounded to int8.")
    if any(layer.scheme.kind == "int8" and not _is_row(layer) for layer in model.packed):
        notes.append("int8 in groups, with zero points or in activation order is rounded again, to symmetric rows.")
    return notes


LAYOUT = Layout("compressed-tensors", _REFUSED, _form)
refusal, write = LAYOUT.refusal, LAYOUT.write
