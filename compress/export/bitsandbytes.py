"""Export "bitsandbytes": nf4, or LLM.int8 where every layer is int8 by rows, for transformers and vLLM on GPUs."""

from torch import Tensor

from compress.export import told
from compress.export.directory import Form, Layout
from compress.export.layers import Facts, Model, to_int8_rows
from runtime.formats import dequantize, int8, llm_int8, nf4
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import stored_scale_dtype

_REFUSED = {
    "ternary-1.25": "bitsandbytes has no ternary format, and nf4 triples the file: export to gguf",
    "ternary": "bitsandbytes has no ternary format, and nf4 would double the file: export to bitnet or gguf",
}


def _form(model: Model) -> Form:
    return _int8(model) if all(layer.scheme.kind in ("int8", "int6") for layer in model.packed) else _nf4(model)


def _int8(model: Model) -> Form:
    def store(layer: Facts, weight: PackedWeight) -> dict[str, Tensor]:
        row = weight.scheme.group_size == 0 and weight.offset is None and weight.perm is None
        ready = weight if row else to_int8_rows(weight, stored_scale_dtype(model.dtype))
        return llm_int8.to_tensors(ready, layer.prefix, model.dtype)

    notes = told(
        "LLM.int8 multiplies inputs above its threshold in 16 bits, which Specpress' kernels do not.",
        any(layer.scheme.kind == "int6" for layer in model.packed)
        and "Integers in groups are rounded again, to int8 with one scale per row.",
        any(layer.static for layer in model.packed)
        and "The static steps of the inputs are left out: this layout rounds inputs per token.",
        _on_experts(model),
    )
    return Form(llm_int8.hf_config(model.skipped), store, notes)


def _nf4(model: Model) -> Form:
    plain = [layer for layer in model.packed if layer.shape[1] % nf4.BLOCK or layer.is_head]

    def store(layer: Facts, weight: PackedWeight) -> dict[str, Tensor]:
        return nf4.to_tensors(nf4.pack(dequantize(weight), bias=weight.bias), layer.prefix, model.dtype)

    compute = str(model.dtype).removeprefix("torch.")
    config = nf4.hf_config([*model.skipped, *(layer.prefix for layer in plain)], compute=compute)
    notes = told(
        "Integers have no place among nf4's levels, so every layer is rounded again.",
        plain
        and f"{len(plain)} layers have rows that blocks of {nf4.BLOCK} do not divide, or are the head: stored plain.",
        _on_experts(model),
    )
    return Form(config, store, notes, plain)


def _on_experts(model: Model) -> str | None:
    if any(int8.is_expert(layer.prefix) for layer in model.packed):
        return "transformers' bitsandbytes loader leaves experts alone, so it does not load these."
    return None


LAYOUT = Layout("bitsandbytes", _REFUSED, _form)
refusal, write = LAYOUT.refusal, LAYOUT.write
