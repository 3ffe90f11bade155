"""What an ONNX file promises, checked against the files that are there before ONNX Runtime allocates anything."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.shards import INDEX, SINGLE, inside

GRAPH = "model.onnx"
_MOST_CHARACTERS = 400


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

    count = 1
    for size in tensor.dims:
        count *= size
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
