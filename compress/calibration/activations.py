"""The activations between two blocks: in memory, or mapped from a file where they outgrow the budget.

Either way they are in a file of the partial folder, which only the user may read: a run that was killed goes on from
there. A window is copied into a buffer of its own before it is used, so that both ways give the same bits: what a
product's order of additions is may depend on where its inputs lie.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.artifact.files import PRIVATE, Digesting, whole
from compress.artifact.safetensors import raw
from compress.calibration.carried import Call, Row, States
from compress.errors import UserError
from compress.model.block import Block


@contextmanager
def matmul_precision() -> Iterator[None]:
    """Lets oneDNN compute float32 matrix products within, where it keeps all of their factors' bits.

    torch leaves them to another library otherwise, which on some processors takes more than twice as long. The setting
    that brings oneDNN in also permits it to round factors to bfloat16, which it does on processors with units for such
    matrices (AMX): there products stay as they are, for what a block gives would be off by a percent.
    """
    with _onednn() if _keeps_factors() else nullcontext():
        yield


@contextmanager
def _onednn() -> Iterator[None]:
    mkldnn: Any = torch.backends.mkldnn  # whose annotations leave this setting out
    matmul = mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def _keeps_factors() -> bool:
    """Whether a product under the setting is as near to the true one as float32 gets; true without oneDNN, too."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*shape, generator=generator) for shape in ((256, 512), (512, 256)))
    exact = left.double() @ right.double()
    with _onednn():
        found = (left @ right).double()
    # float32's rounding gives some 1e-7, bfloat16's 2e-3.
    return float((found - exact).norm() / exact.norm()) < 1e-5


_FLOAT = np.dtype("<f4")


@dataclass(frozen=True, eq=False)
class Activations:
    """(S, T, W) float32: what goes into block `block` for S windows of T tokens; `row`: what a token's numbers are
    (None: its hidden state)."""

    block: int
    data: np.ndarray[Any, np.dtype[np.float32]]
    row: Row | None = None

    def __len__(self) -> int:
        return int(self.data.shape[0])

    @property
    def tokens(self) -> int:
        """S · T."""
        return int(self.data.shape[0] * self.data.shape[1])

    def stored(self) -> Iterator[tuple[Row, Tensor]]:
        """Every window as `save` takes it."""
        for number in range(len(self)):
            yield self.row or Row(self.data.shape[2]), self.window(number)

    def window(self, number: int) -> Tensor:
        """(1, T, W), a copy."""
        out = torch.empty(1, *self.data.shape[1:])
        np.copyto(out.numpy()[0], self.data[number])
        return out


@dataclass(frozen=True)
class Inputs:
    """What goes into a block, and how the model calls it.

    twins  whether behind the windows those of the original model follow, as many, which no rounded layer has changed.
    """

    activations: Activations
    call: Call
    twins: bool = False

    def __len__(self) -> int:
        return len(self.activations) // (2 if self.twins else 1)

    @property
    def row(self) -> Row:
        """What the numbers of a token are."""
        return self.activations.row or Row(self.activations.data.shape[2])

    def windows(self) -> Iterator[Tensor]:
        """Each window's hidden states (1, T, D), copies."""
        for number in range(len(self)):
            yield self.row.split(self.activations.window(number))[0]

    def outputs(self, block: Block) -> Iterator[Tensor]:
        """What the block as it is now makes of each window, (1, T, D). Raises UserError for NaN and infinity."""
        for number in range(len(self)):
            yield self.output(block, number, self.activations.window(number))[0]

    def following(self, block: Block) -> Iterator[tuple[Row, Tensor]]:
        """What goes into the next block, window by window, and what it is. Raises UserError as `outputs` does."""
        for number in range(len(self)):
            window = self.activations.window(number)
            yield self.row.following(window, *self.output(block, number, window))

    def following_twins(self, block: Block) -> Iterator[tuple[Row, Tensor]]:
        """`following` of the original's windows, by a block that no stage has changed yet."""
        for number in range(len(self), len(self.activations)):
            window = self.activations.window(number)
            yield self.row.following(window, *self.output(block, number, window))

    def show_twin(self, block: Block, number: int) -> None:
        """Sends the original's window of that number through the block, for hooks to see."""
        self.output(block, number, self.activations.window(len(self) + number))

    def show(self, block: Block) -> Iterator[None]:
        """Sends each window through the block, for hooks to see.

        A hook that has seen all it wants of a window raises `Enough`: what comes after it is not computed. Raises
        UserError as `outputs` does, where it comes that far.
        """
        for number in range(len(self)):
            with suppress(Enough):
                self.output(block, number, self.activations.window(number))
            yield

    def output(self, block: Block, number: int, window: Tensor) -> tuple[Tensor, States]:
        """The block's hidden states of a window, and what is shared behind it. Raises UserError as `outputs` does."""
        given, own, shared = self.row.split(window)
        args, kwargs, left = self.call.of_window(own, shared)
        # What hooks compute belongs to the products: the Hessians.
        with torch.no_grad(), matmul_precision():
            out = block.module(given, *args, **kwargs)
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        check_window(hidden, number, f"what {block.prefix} gives")
        return hidden, left


class Enough(Exception):  # noqa: N818 (nothing is wrong)
    """A hook has seen all that it wants of a window."""


def check_window(values: Tensor, number: int, what: str) -> None:
    """Raises UserError naming the window where values are NaN or infinite."""
    # A sum says it at once, unless finite numbers add up to more than a float holds.
    if not math.isfinite(float(values.sum())) and not bool(torch.isfinite(values).all()):
        found = "NaN" if bool(values.isnan().any()) else "an infinite number"
        raise UserError(
            f"calibration window {number + 1}: expected finite numbers in {what}, found {found}: check the model's "
            "weights, or calibrate on other text with --calib or --seed"
        )


def file_name(block: int) -> str:
    """The file in the partial folder that holds what goes into a block."""
    return f"inputs-{block:05d}.bin"


def save(folder: Path, block: int, windows: Iterable[tuple[Row, Tensor]], count: int, tokens: int) -> dict[str, Any]:
    """Writes what goes into block `block`, `count` windows of `tokens` tokens, and returns the journal's record of it.

    windows  each one's rows (1, tokens, W), and what they are, which is the same for all.
    """
    name, found = file_name(block), 0
    row = Row(0)
    with whole(folder / name, PRIVATE) as opened:
        file = Digesting(opened)
        for said, window in windows:
            row = said
            file.write(raw(window.to(torch.float32)))
            found += 1
    written, shape = file.written(), (count, tokens, row.width)
    if found != count or written.bytes != math.prod(shape) * _FLOAT.itemsize:
        raise ValueError(f"block {block}: expected activations {shape}, found {found} windows, {written.bytes} bytes")
    record = {"block": block, "file": name, "bytes": written.bytes, "sha256": written.sha256, "shape": list(shape)}
    return record | {"row": row.to_json()}


def load(folder: Path, record: dict[str, Any], mapped: bool) -> Activations:
    """The activations of a journal's record; `mapped`: from the file, page by page, instead of in memory."""
    shape = tuple(record["shape"])
    path = folder / str(record["file"])
    data = np.memmap(path, _FLOAT, "r", shape=shape) if mapped else np.fromfile(path, _FLOAT).reshape(shape)
    return Activations(int(record["block"]), data, Row.from_json(record["row"]))
