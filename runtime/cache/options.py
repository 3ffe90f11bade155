"""How a user asks for a cache: the kind of keys and values, pages, and what states are held in."""

from dataclasses import dataclass
from typing import Literal, get_args

from runtime.contract import Cache, CacheKind, Decoder, StateKind
from runtime.errors import UserError


@dataclass(frozen=True)
class CacheOptions:
    """How the target's cache holds keys and values, and in how many pages of 64 tokens (None: memory per request).

    kind    "auto": as the target's artifact says (float32 where it says nothing).
    states  what the states of layers that carry one are held in: float32, float16 or, on CPUs, int8.

    Raises UserError for an unknown kind, or for no pages.
    """

    kind: CacheKind | Literal["auto"] = "auto"
    pages: int | None = None
    states: StateKind = "float32"

    def __post_init__(self) -> None:
        if self.kind not in ("auto", *get_args(CacheKind)):
            kinds = ", ".join(("auto", *get_args(CacheKind)))
            raise UserError(f"the kind of cache must be one of {kinds}, but is {self.kind!r}; choose one of them.")
        if self.states not in get_args(StateKind):
            kinds = ", ".join(get_args(StateKind))
            raise UserError(f"states must be held in one of {kinds}, but it is {self.states!r}; choose one of them.")
        if self.pages is not None and self.pages < 1:
            raise UserError(f"a paged cache needs at least 1 page, but {self.pages} were asked for; give it more.")

    def make(self, decoder: Decoder) -> Cache:
        """An empty cache of the decoder's."""
        return decoder.new_cache(decoder.kv.kind if self.kind == "auto" else self.kind, self.pages, self.states)


CONTIGUOUS = CacheOptions()
