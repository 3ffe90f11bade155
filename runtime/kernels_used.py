"""Which layers of a decoder a library runs: said beside the name of the kernels, wherever that is reported."""

from collections import Counter
from typing import Any

from runtime.blocks import Parts
from runtime.errors import UserError
from runtime.kernels.choices import IMPLEMENTATIONS
from runtime.kernels.dispatch import Kernel
from runtime.upper import linears


def described(decoder: Any) -> str:
    """The decoder's kernels by name, and how many of its layers run on which library's products."""
    parts = getattr(decoder, "parts", None)
    if not isinstance(parts, Parts):
        return str(decoder.kernels)
    counts, total = _counts(parts), sum(1 for _ in linears(parts))
    return "; ".join([decoder.kernels, *(f"{name} in {count} of {total} layers" for name, count in counts.items())])


def require_used(kernel: Kernel, parts: Parts) -> None:
    """Raises UserError where a library was asked for by name and takes none of the layers."""
    if kernel.name in IMPLEMENTATIONS and kernel.table and not _counts(parts)[kernel.name]:
        schemes = ", ".join(IMPLEMENTATIONS[kernel.name].schemes)
        raise UserError(
            f"kernels={kernel.name!r} take none of this model's layers: they are for {schemes}, in sizes that they"
            " divide; use kernels='auto'"
        )


def _counts(parts: Parts) -> Counter[str]:
    return Counter(name for layer in linears(parts) for name in getattr(layer, "libraries", ()))
