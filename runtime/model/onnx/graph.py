"""What an ONNX file promises, checked against the files that are there before ONNX Runtime allocates anything."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from runtime.checkpoints.safetensors import INDEX, SINGLE, inside
from runtime.errors import UserError

_DTYPES: dict[str, np.dtype] = {"tensor(float)": np.dtype(np.float32), "tensor(float16)": np.dtype(np.float16)}
GRAPH = "model.onnx"
_MOST_CHARACTERS = 400


@dataclass(frozen=True)
class Signature:
    """What a session takes and gives.

    past, present  names of keys and values, layer by layer, in the same order.
    shape          (kv heads, head dim).
    positions      whether it takes position_ids.
    hidden         the final hidden states' size; 0 where it does not give them.
    """

    past: tuple[str, ...]
    present: tuple[str, ...]
    shape: tuple[int, int]
    dtype: np.dtype
    positions: bool
    vocabulary: int
    hidden: int


def signature(session: Any, shown: str) -> Signature:
    """Raises UserError, naming `shown`, for a session that is no decoder with keys and values."""
    try:
        return _signature(session, shown)
    except UnicodeDecodeError as error:
        raise UserError(f"{shown}: names in its graph should be UTF-8, and one is not; export it again") from error


def _signature(session: Any, shown: str) -> Signature:
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name: value for value in session.get_outputs()}
    past = tuple(name for name in inputs if name.startswith("past_key_values."))
    present = tuple(name.replace("past_key_values.", "present.") for name in past)
    lacking = [name for name in ("input_ids", "attention_mask") if name not in inputs]
    lacking += [name for name in ("logits", *present) if name not in outputs]
    others = set(inputs) - {"input_ids", "attention_mask", "position_ids", *past}
    if lacking or others or not past:
        found = f"lacks {lacking[0]}" if lacking else f"wants {min(others)}" if others else "has no past_key_values"
        raise UserError(
            f"{shown}: a decoder with past_key_values.N.key and .value was expected, and this graph {found}; export it"
            " with `python -m compress.export --to onnx`"
        )
    shape, kind = inputs[past[0]].shape, inputs[past[0]].type
    given = [outputs[name].shape for name in ("logits", "hidden_states") if name in outputs]
    sizes = (shape[1], shape[3], *(found[-1] for found in given)) if len(shape) == 4 and all(given) else ()
    if kind not in _DTYPES or not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UserError(
            f"{shown}: {past[0]} must be float32 or float16 (batch, heads, past, head dim) with known heads and sizes,"
            f" found {kind} {shape}, and logits and hidden states must have a known last size, found {given};"
            " export it again"
        )
    hidden = outputs["hidden_states"].shape[-1] if "hidden_states" in outputs else 0
    return Signature(
        past,
        present,
        (shape[1], shape[3]),
        _DTYPES[kind],
        "position_ids" in inputs,
        outputs["logits"].shape[-1],
        hidden,
    )


def holds(folder: Path) -> bool:
    """Whether a directory is an ONNX model, and not also one of safetensors."""
    safetensors = any((folder / name).is_file() for name in (SINGLE, INDEX))
    return (folder / GRAPH).is_file() and (folder / "config.json").is_file() and not safetensors


def check(folder: Path) -> None:
    """Raises UserError, in one sentence, for a graph that is cut short or no ONNX, and for weights that are not there.

    A tensor's bytes must be those that its shape asks for, and external ones must lie inside their file, which must lie
    in the folder.
    """
    try:
        import onnx
    except ImportError as error:
        raise UserError(
            f'{folder.name}/{GRAPH}: reading it needs the package onnx, which is missing: pip install "specpress[onnx]"'
        ) from error
    path = inside(folder, GRAPH, GRAPH)
    shown = f"{folder.name}/{GRAPH}"
    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except Exception as error:  # protobuf's own error class is not part of onnx's interface
        raise UserError(f"{shown} is truncated or no ONNX file ({first_line(error)}); export it again") from error
    if not model.graph.node or not model.graph.output:
        raise UserError(f"{shown} is truncated or no ONNX file (its graph is empty); export it again")
    sizes: dict[str, int] = {}
    for tensor in _tensors(model.graph):
        _check_tensor(folder, shown, tensor, sizes)


def _tensors(graph: Any) -> Iterator[Any]:
    """Initialisers and constants, those of inner graphs included."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)


def _check_tensor(folder: Path, shown: str, tensor: Any, sizes: dict[str, int]) -> None:
    needed = _bytes(shown, tensor)
    if tensor.data_location != tensor.EXTERNAL:
        if tensor.raw_data and len(tensor.raw_data) != needed:
            raise UserError(
                f"{shown}: tensor {tensor.name} has {len(tensor.raw_data)} bytes, and its shape {list(tensor.dims)}"
                f" asks for {needed}; the file is damaged, so export it again"
            )
        return
    about = {entry.key: entry.value for entry in tensor.external_data}
    name = about.get("location", "")
    if not isinstance(name, str):  # protobuf hands out what is no UTF-8 as bytes
        raise UserError(f"{shown}: tensor {tensor.name} is in a file whose name is no text; export it again")
    if name not in sizes:
        sizes[name] = inside(folder, name, GRAPH).stat().st_size
    try:
        offset, length = int(about.get("offset", 0)), int(about.get("length", needed))
    except ValueError as error:
        raise UserError(f"{shown}: tensor {tensor.name} has an offset that is no number; export it again") from error
    if offset < 0 or length != needed or offset + length > sizes[name]:
        raise UserError(
            f"{shown}: tensor {tensor.name} is to be bytes {offset} to {offset + length} of {name}, its shape"
            f" {list(tensor.dims)} asks for {needed} bytes, and the file has {sizes[name]}; one of the two files is"
            " truncated or another model's, so export it again"
        )


def _bytes(shown: str, tensor: Any) -> int:
    """Bytes of a tensor by its type and shape, packed types rounded up."""
    from onnx import TensorProto, helper

    count = prod(tensor.dims)
    narrow = {TensorProto.INT4: 4, TensorProto.UINT4: 4}
    try:
        bits = narrow.get(tensor.data_type) or 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, ValueError) as error:
        raise UserError(f"{shown}: tensor {tensor.name} is of an unknown type; export it again") from error
    if count < 0:
        raise UserError(f"{shown}: tensor {tensor.name} has the shape {list(tensor.dims)}; export it again")
    return int(-(-count * bits // 8))


def first_line(error: Exception) -> str:
    """What an error of a library says, cut to a sentence's length: ONNX Runtime quotes C++ types of any length."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return said if len(said) <= _MOST_CHARACTERS else f"{said[:_MOST_CHARACTERS]}…"
