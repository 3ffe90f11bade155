"""How caches hold keys and values: the kinds there are (kv.py rounds), and which one a model asks for."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

CacheKind = Literal["float32", "float16", "int8", "int4"]
# Those that hold numbers as they are, so that neither scales nor key factors have a meaning.
FLOATS: tuple[CacheKind, ...] = ("float32", "float16")


@dataclass(frozen=True)
class CacheScheme:
    """What a model's caches are by default.

    kind        how keys and values are held where nobody asks for anything else.
    key_factor  (layers, kv_heads, head_dim) float32, what keys are divided by before they are rounded; None: 1.
    note        why a scheme that the artifact names is not followed; empty where it is, or names none.
    """

    kind: CacheKind = "float32"
    key_factor: Tensor | None = None
    note: str = ""

    def factor(self, kind: CacheKind) -> Tensor | None:
        """The key factors of a cache of this kind; None for floats, which have no codes."""
        return None if kind in FLOATS else self.key_factor


UNCALIBRATED = CacheScheme()
