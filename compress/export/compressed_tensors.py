"""Export "compressed-tensors": pack-quantized and int-quantized, for transformers, vLLM, SGLang and llm-compressor."""

from dataclasses import replace

from torch import Tensor

from compress.errors import UserError
from compress.export import told
from compress.export.directory import Form, Layout, evenly_spaced
from compress.export.layers import Facts, Model, to_int8_rows, with_scale_in, with_whole_zeros
from runtime import formats
from runtime.formats import int4, int8
from runtime.formats.packed import PackedWeight, Scheme
from runtime.formats.tensors import stored_scale_dtype


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
            return int8.to_tensors(with_scale_in(ready, scales), layer.prefix, model.dtype, scales)
        ready = with_scale_in(with_whole_zeros(weight), scales)
        return int4.to_tensors(replace(ready, scheme=wanted, input_scale=None), layer.prefix, model.dtype, scales)

    kinds = {layer.scheme.kind for layer in model.packed}
    notes = told(
        reordered
        and "Inputs in activation order are stored with weight_g_idx, which vLLM reads; compressed-tensors dropped it"
        " in August 2026, and transformers refuses it since.",
        any(layer.zeros != (0, 0) for layer in model.packed)
        and "With zero points transformers loads models of one scheme only, and with dequantize=True.",
        "ternary" in kinds
        and "Ternary codes are stored in two bits, one scale per row; inputs are no longer rounded to int8.",
        any(layer.scheme.kind == "int8" and not _is_row(layer) for layer in model.packed)
        and "int8 in groups, with zero points or in activation order is rounded again, to symmetric rows.",
    )
    return Form(config, store, notes)


def _is_row(layer: Facts) -> bool:
    return layer.scheme.group_size == 0 and layer.zeros == (0, 0) and not layer.reordered


def _scheme(layer: Facts) -> Scheme:
    """What a layer becomes: ternary fits two bits, and other kinds of int8 than rows are rounded to those."""
    if layer.scheme.kind == "int8":
        return layer.scheme if _is_row(layer) else int8.scheme("float")
    symmetric = layer.zeros == (0, 0)
    return int4.scheme(layer.scheme.group_size, bits=layer.scheme.bits, symmetric=symmetric)


LAYOUT = Layout("compressed-tensors", evenly_spaced("compressed-tensors"), _form)
refusal, write = LAYOUT.refusal, LAYOUT.write
