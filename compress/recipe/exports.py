"""The names of what `compress.export` can write."""

from collections.abc import Iterable

from compress.errors import UserError
from runtime.errors import meant

EXPORTS = ("gptq", "awq", "compressed-tensors", "bitsandbytes", "bitnet", "gguf", "onnx", "onnx-fp16")


def check_exports(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once. Raises UserError for one that is unknown."""
    names = tuple(dict.fromkeys(names))
    if unknown := [name for name in names if name not in EXPORTS]:
        hint = meant(unknown[0], EXPORTS, "correct the name")
        raise UserError(f"export {unknown[0]!r} is unknown: expected one of {', '.join(EXPORTS)}: {hint}")
    return names
