"""A tensor of a GGUF file, and the names of a block's."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoints.gguf.names import Form
from runtime.checkpoints.record import Architecture

Order = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor of a GGUF file.

    names     transformers' tensors that it holds: one, or one for each expert or head of a stack.
    stacked   each of them is an element of its first dimension.
    rows      row i is transformers' row rows[i]; None: the rows are in transformers' order. Where several parts have
              one name, each has some of its rows.
    columns   of a matrix, as `rows`.
    offset    what is added to the values there.
    logarithm transformers' values are x where -exp(x) is there.
    shape     transformers' shape, where it is another.
    there     the shape there, where it is not what follows from transformers'.
    turned    "matrix": transformers' is (inputs, outputs). "heads": of each head the rows are columns there.
    half      of a stack's elements: the first (0) or the second (1) half of their rows; None: all.
    vector    float32 always, as llama.cpp wants it.
    bias      it may be missing.
    """

    tensor: str
    names: tuple[str, ...]
    stacked: bool = False
    rows: Order | None = None
    columns: Order | None = None
    offset: float = 0.0
    logarithm: bool = False
    shape: tuple[int, ...] | None = None
    there: tuple[int, ...] | None = None
    turned: Literal["matrix", "heads"] | None = None
    heads: int = 1
    half: int | None = None
    vector: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Numbers:
    """Tensors of one number each that a GGUF file has as an array in its metadata: a number for each layer.

    key      all of it, since the architecture is no part of it.
    default  of checkpoints that leave such tensors out; None: none does.
    """

    key: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    default: float | None = None


@dataclass(frozen=True)
class Names:
    """Names of parts in a block of a file (`there`) and of a checkpoint (`here`)."""

    form: Form
    there: str = ""
    here: str = ""

    def tensor(self, part: str) -> str:
        return self.there + self.form.renamed.get(part, part)

    def layer(
        self,
        part: str,
        name: str,
        rows: Order | None = None,
        turned: Literal["matrix"] | None = None,
        vector: bool = False,
    ) -> Iterator[Part]:
        """A layer and its bias."""
        there, here = self.tensor(part), self.here + name
        yield Part(f"{there}.weight", (f"{here}.weight",), rows=rows, turned=turned, vector=vector)
        yield Part(f"{there}.bias", (f"{here}.bias",), rows=rows, vector=True, bias=True)

    def norm(self, a: Architecture, part: str, name: str | None, offset: float | None = None) -> Iterator[Part]:
        """A norm and its bias; nothing for None."""
        if name is None:
            return
        there, here = self.tensor(part), self.here + name
        weight = there if part in self.form.bare else f"{there}.weight"
        added = a.norm_offset if offset is None else offset
        yield Part(weight, (f"{here}.weight",), offset=added, vector=True)
        yield Part(f"{there}.bias", (f"{here}.bias",), vector=True, bias=True)

    def stack(self, part: str, base: str, count: int, name: str) -> Iterator[Part]:
        """A layer of every expert, and their biases."""
        for kind in ("weight", "bias"):
            each = tuple(f"{base}.experts.{i}.{name}.{kind}" for i in range(count))
            bias = kind == "bias"
            yield Part(f"{self.tensor(part)}.{kind}", each, stacked=True, vector=bias, bias=bias)
