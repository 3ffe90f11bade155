"""Recipes, algorithms, exports and the report: a model becomes an artifact.

from compress import Recipe, compress
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.artifact import Artifact
    from compress.pipeline import compress
    from compress.recipe import Recipe

__all__ = ["Artifact", "Recipe", "compress"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import; a command that only prints its help should not pay for them.
    if name == "Recipe":
        from compress.recipe import Recipe

        return Recipe
    if name == "Artifact":
        from compress.artifact import Artifact

        return Artifact
    if name == "compress":
        from compress.pipeline import compress

        return compress
    raise AttributeError(f"module 'compress' has no attribute {name!r}")
