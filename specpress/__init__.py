"""The whole product by one name: `from specpress import compress, load, Speculator`, and the command `specpress`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress import Artifact, Recipe, compress
    from runtime import Model, Speculator, load

__all__ = ["Artifact", "Model", "Recipe", "Speculator", "compress", "load"]

_COMPRESS = ("Artifact", "Recipe", "compress")


def __getattr__(name: str) -> Any:
    # torch takes a second to import; a command that only prints its help should not pay for it.
    if name in __all__:
        return getattr(import_module("compress" if name in _COMPRESS else "runtime"), name)
    raise AttributeError(f"module 'specpress' has no attribute {name!r}")
