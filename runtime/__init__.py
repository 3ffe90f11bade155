"""Packed weights, kernels and decoding: `import runtime` alone loads and runs any artifact.

from runtime import Speculator, load
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.model.load import Model, load
    from runtime.speculate import Speculator

__all__ = ["Model", "Speculator", "load"]


def __getattr__(name: str) -> Any:
    # torch takes a second to import; a command that only prints its help should not pay for it.
    if name == "Speculator":
        from runtime.speculate import Speculator

        return Speculator
    if name in ("load", "Model"):
        from runtime.model import load

        return getattr(load, name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
