"""What blocks are given of a text besides hidden states: inputs of their own, and keys and values of earlier blocks.

Gemma 4 has both. They stand behind the hidden states in each token's row of activations, so that they are saved, read
and resumed together.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# What is shared under a key: tensors (1, heads, T, dim).
States = Mapping[str, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Row:
    """What stands in a token's row, in order.

    hidden  numbers of its hidden state.
    own     of the inputs of the blocks from the next one on.
    shared  (key, (heads, dim) of each tensor) of what earlier blocks have left.
    """

    hidden: int
    own: tuple[int, ...] = ()
    shared: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.hidden + sum(self.own) + sum(heads * dim for _, sizes in self.shared for heads, dim in sizes)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor | None, States]:
        """Hidden states (1, T, hidden), the next block's own input (1, T, size), what is shared; of rows (1, T, W)."""
        hidden, *parts = rows.split([self.hidden, *self.own, *self._flat_sizes()], dim=-1)
        own = parts[0] if self.own else None
        flat = iter(parts[len(self.own) :])
        shared = {
            key: tuple(next(flat).unflatten(-1, size).transpose(1, 2) for size in sizes) for key, sizes in self.shared
        }
        return hidden.contiguous(), own, shared

    def following(self, rows: Tensor, hidden: Tensor, shared: States) -> tuple["Row", Tensor]:
        """The next block's rows, of this one's (1, T, W), what it gives, and what is shared behind it."""
        after = replace(
            self,
            own=self.own[1:],
            shared=tuple((key, tuple((t.shape[1], t.shape[3]) for t in parts)) for key, parts in shared.items()),
        )
        first = self.hidden + (self.own[0] if self.own else 0)
        later = rows[..., first : first + sum(after.own)]
        flat = [tensor.transpose(1, 2).flatten(2) for parts in shared.values() for tensor in parts]
        return after, torch.cat([hidden.to(torch.float32), later, *flat], dim=-1)

    def _flat_sizes(self) -> list[int]:
        return [heads * dim for _, sizes in self.shared for heads, dim in sizes]

    def to_json(self) -> dict[str, Any]:
        """As the journal keeps it."""
        return {"hidden": self.hidden, "own": list(self.own), "shared": [[k, [*map(list, s)]] for k, s in self.shared]}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "Row":
        """The inverse of `to_json`."""
        shared = tuple((str(key), tuple((int(h), int(d)) for h, d in sizes)) for key, sizes in found["shared"])
        return Row(int(found["hidden"]), tuple(map(int, found["own"])), shared)


@dataclass(frozen=True)
class Call:
    """What the model hands to a decoder layer beside its input: the same for every window but for two arguments.

    own     where its own input of the text goes: an index of `args`, or a key of `kwargs`; None: it has none.
    shared  the key of `kwargs` that has what blocks leave for later ones, an empty mapping here; None: no such thing.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    own: int | str | None = None
    shared: str | None = None

    def bare(self) -> "Call":
        """Without its own input."""
        if isinstance(self.own, int):
            return replace(self, args=(*self.args[: self.own], None, *self.args[self.own + 1 :]))
        return self if self.own is None else replace(self, kwargs=self.kwargs | {self.own: None})

    @property
    def input(self) -> Tensor | None:
        """Its own input."""
        if self.own is None:
            return None
        found: Tensor = self.args[self.own] if isinstance(self.own, int) else self.kwargs[self.own]
        return found

    def of_window(self, own: Tensor | None, shared: States) -> tuple[tuple[Any, ...], dict[str, Any], States]:
        """The arguments for one window, and the mapping among them that the block may write to."""
        args, kwargs, left = self.args, dict(self.kwargs), dict(shared)
        if isinstance(self.own, int):
            args = (*args[: self.own], own, *args[self.own + 1 :])
        elif self.own is not None:
            kwargs[self.own] = own
        if self.shared is not None:
            left = type(kwargs[self.shared])()
            left.update(shared)
            kwargs[self.shared] = left
        return args, kwargs, left


def find_places(calls: list[Call], others: list[Call]) -> list[Call]:
    """The calls of one text, told by those of another which arguments are the text's, and where blocks leave something.

    Arguments that differ in another way are left where they are.
    """
    out = []
    for call, other in zip(calls, others, strict=True):
        pairs: dict[int | str, tuple[Any, Any]] = dict(enumerate(zip(call.args, other.args, strict=False)))
        pairs |= {key: (value, other.kwargs.get(key)) for key, value in call.kwargs.items()}
        differing = [place for place, (a, b) in pairs.items() if _differ(a, b)]
        mappings = [key for key, value in call.kwargs.items() if isinstance(value, MutableMapping) and not value]
        own = differing[0] if len(differing) == 1 and pairs[differing[0]][0].ndim == 3 else None
        out.append(replace(call, own=own, shared=mappings[0] if len(mappings) == 1 else None))
    return out


def _differ(one: Any, other: Any) -> bool:
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return tensors and one.shape == other.shape and not torch.equal(one, other)
