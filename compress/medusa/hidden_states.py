"""Text and the hidden states that a packed model has on it, kept on disk in chunks, so that training reads them back.

Every chunk is two NumPy files: states-N.npy, (windows, length, hidden) float16, which is mapped and not read, and
tokens-N.npy, (windows, length) int32, which is written last: a chunk counts when it is there.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.artifact.files import render_json, whole, write_atomic, write_json
from compress.errors import UserError
from runtime.contract import Decoder, Rows, integers
from runtime.engine.taken import with_taps
from runtime.model.load import Model
from runtime.sampling.params import Sampling
from runtime.speculate import Speculator

Continuations = Literal["greedy", "sampled", "none"]
# Windows in a chunk: as many texts are written at a time.
CHUNK = 64
# Rows of one forward.
_ROWS = 512
_ABOUT, _DONE = "states.json", "done.json"


@dataclass(frozen=True)
class Source:
    """What the windows are made of.

    windows        (n, length) int64.
    continuations  what follows the first tokens of each: what the model writes, or (none) what stands there.
    prompts        how many these are, which are the text's own: of window n the n-th number, by turns.
    seed           of drawn continuations.
    as_is          share of the windows, the first of each chunk, that stay as they stand in any case.
    """

    windows: Tensor
    continuations: Continuations
    prompts: tuple[int, ...]
    seed: int = 0
    as_is: float = 0.0

    def kept(self, count: int) -> int:
        """How many windows of a chunk of so many stay as they stand: its first ones."""
        return count if self.continuations == "none" else round(self.as_is * count)

    def begins(self) -> Tensor:
        """(n,) int64: tokens of each window before what the model wrote; the shortest prompt where it wrote nothing."""
        if self.continuations == "none":
            return torch.ones(len(self.windows), dtype=torch.int64)
        found = torch.tensor(self.prompts).repeat(-(-len(self.windows) // len(self.prompts)))[: len(self.windows)]
        for chunk in found.split(CHUNK):
            chunk[: self.kept(len(chunk))] = min(self.prompts)
        return found

    def texts(self, model: Model, first: int, count: int) -> Tensor:
        """(count, length) int64: windows first, first + 1, … with what the model writes behind their prompts."""
        windows = self.windows[first : first + count].clone()
        kept = self.kept(len(windows))
        temperature = 1.0 if self.continuations == "sampled" else 0.0
        for turn, size in enumerate(self.prompts):
            rows = [row for row in range(kept, len(windows)) if (first + row) % len(self.prompts) == turn]
            if rows:
                samplings = [Sampling(temperature, seed=self.seed + first + row) for row in rows]
                prompts, missing = windows[rows, :size].tolist(), windows.shape[1] - size
                results = Speculator(model).generate(prompts, missing, samplings, stop=())
                windows[rows, size:] = torch.tensor([result.tokens for result in results])
        return windows


class HiddenStates:
    """The chunks of a folder, as a sequence of windows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._states: list[NDArray[np.float16]] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._find()

    def __len__(self) -> int:
        return sum(map(len, self._tokens))

    @property
    def seconds(self) -> float:
        """What the last chunks took, since the run began or went on; 0 while there are more to come."""
        done = self.folder / _DONE
        return float(json.loads(done.read_text())["seconds"]) if done.is_file() else 0.0

    @property
    def chunks(self) -> int:
        """Chunks that are whole."""
        return len(self._tokens)

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens (n, length) int64 and hidden states (n, length, hidden) float32 of these windows."""
        places = [divmod(index, CHUNK) for index in indices]
        tokens = np.stack([self._tokens[chunk][row] for chunk, row in places]).astype(np.int64)
        states = np.stack([self._states[chunk][row] for chunk, row in places]).astype(np.float32)
        return torch.from_numpy(tokens), torch.from_numpy(states)

    def tokens(self) -> Tensor:
        """(windows, length) int64: all texts."""
        return torch.from_numpy(np.concatenate(self._tokens).astype(np.int64))

    def blocks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`read` of all windows in order, `size` at a time."""
        for first in range(0, len(self), size):
            yield self.read(range(first, min(first + size, len(self))))

    def add(self, tokens: Tensor, states: Tensor) -> None:
        """Writes another chunk. Only the last one may have fewer than CHUNK windows."""
        name = f"{self.chunks:05d}.npy"
        for kind, value in (("states", states.numpy().astype(np.float16)), ("tokens", tokens.numpy().astype(np.int32))):
            with whole(self.folder / f"{kind}-{name}") as file:
                np.save(file, value)
        self._find()

    def _find(self) -> None:
        while (self.folder / f"tokens-{self.chunks:05d}.npy").is_file():
            name = f"{self.chunks:05d}.npy"
            self._states.append(np.load(self.folder / f"states-{name}", mmap_mode="r"))
            self._tokens.append(np.load(self.folder / f"tokens-{name}"))


def collect(
    model: Model,
    source: Source,
    folder: Path,
    about: dict[str, Any],
    seconds: float | None,
    progress: Callable[[int, int], None],
    taps: Sequence[int] = (),
) -> HiddenStates:
    """Writes the source's windows and the model's hidden states on them; goes on where an earlier call was stopped.

    about    what the result depends on beside the source; a folder that was made of something else is refused.
    taps     which states: those of the residual stream behind so many layers, side by side (contract.TakesStates); ():
             the final ones.
    seconds  stop after the first chunk that ends later than this (None: never). How many chunks there are then is
             kept, so that a resumed run trains on the same ones; and so is the time that they took.

    Raises UserError for such a folder, and for hidden states that are NaN, infinite or beyond float16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, wanted = folder / _ABOUT, render_json(about)
    if path.is_file() and path.read_bytes() != wanted:
        raise UserError(
            f"{folder.name}/{_ABOUT}: expected hidden states of this run, found those of another: delete the folder"
        )
    write_atomic(path, wanted)
    found, total = HiddenStates(folder), -(-len(source.windows) // CHUNK)
    begun = time.monotonic()
    while not (folder / _DONE).exists():
        progress(found.chunks, total)
        texts = source.texts(model, found.chunks * CHUNK, CHUNK)
        found.add(texts, _states(model.decoder, texts, taps))
        spent = time.monotonic() - begun
        if found.chunks == total or (seconds is not None and spent > seconds):
            write_json(folder / _DONE, {"chunks": found.chunks, "seconds": spent})
    progress(total, total)
    return found


def _states(decoder: Decoder, windows: Tensor, taps: Sequence[int]) -> Tensor:
    """(n, length, hidden), or taps · hidden, float32 on the CPU."""
    length, found, nothing = windows.shape[1], [], torch.empty(0, dtype=torch.int64)
    _, decoder = with_taps(decoder, taps)
    cache = decoder.new_cache()
    for window in windows:
        handle = cache.open(length)
        pieces = []
        for first in range(0, length, _ROWS):
            piece = window[first : first + _ROWS].tolist()
            rows = Rows.chains([(handle, first, len(piece))])
            out = decoder.forward(integers(piece), rows, cache, nothing if taps else None)
            pieces.append((out.hidden if out.taken is None else out.taken).cpu())
        cache.close(handle)
        found.append(torch.cat(pieces))
    states = torch.stack(found)
    if not bool((states.abs() <= torch.finfo(torch.float16).max).all()):
        raise UserError("the target's hidden states hold NaN, Inf or more than float16 can: check the checkpoint")
    return states
