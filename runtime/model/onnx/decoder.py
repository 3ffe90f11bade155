"""The Decoder contract over an ONNX Runtime session: exports of ours, and other decoders with the same names.

ONNX Runtime promises no order of operations, so the lossless class is `measured`, not `exact`. Measured on a CPU (1.31,
AVX512, 1 and 2 threads; float32, int8, MatMulNBits, MatMulBnb4): a row that is alone takes a path of its own and comes
out with other bits, and with the same bits at every other width. So a forward has at least two rows here,
and a plain step, too, takes the path that verifies drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.checkpoints import model_config
from runtime.checkpoints.safetensors import inside
from runtime.errors import UserError
from runtime.files import read_json
from runtime.model.chains import ChainDecoder
from runtime.model.onnx import graph
from runtime.model.onnx.graph import Signature, signature

# The least rows of a forward, by what the module's text says; the added one is dropped.
LEAST_ROWS = 2
# The most: the graph makes logits of every row, which is 64 MB for 128 rows of 128 k tokens.
MOST_ROWS = 128


@dataclass
class _Held:
    """One request's keys and values (1, heads, slots, head dim) each; the first `length` slots count."""

    length: int
    states: list[np.ndarray]


class OnnxDecoder(ChainDecoder):
    """A Decoder over a session, whose keys and values go in and come out (`_Held`)."""

    kernels = "onnxruntime"
    no_kinds = (
        "an ONNX graph holds its keys and values as it was exported, neither quantised nor paged; leave out the kind of"
        " cache and the pages."
    )
    no_trees = "an ONNX graph takes chains of tokens and no trees; choose another drafter than tree or medusa."

    def __init__(self, session: Any, taken: Signature, max_positions: int, threads: int, device: torch.device):
        self.session, self.signature, self.max_positions = session, taken, max_positions
        self.vocab_size, self.hidden_size = taken.vocabulary, taken.hidden
        self._threads, self.device = threads, device
        self._outputs = ["logits", *(["hidden_states"] if taken.hidden else []), *taken.present]

    @property
    def threads(self) -> int:
        """The session's, inside an operator."""
        return self._threads

    def empty(self) -> _Held:
        """No slots."""
        heads, dim = self.signature.shape
        return _Held(0, [np.zeros((1, heads, 0, dim), dtype=self.signature.dtype)] * len(self.signature.past))

    def length(self, state: _Held) -> int:
        return state.length

    def cut(self, state: _Held, length: int) -> _Held:
        return _Held(length, state.states)

    def copied(self, state: _Held) -> _Held:
        """The arrays themselves: nothing is ever written to them."""
        return replace(state)

    def bytes_per_token(self) -> int:
        """Keys and values over all layers, in the graph's dtype."""
        heads, dim = self.signature.shape
        return len(self.signature.past) * heads * dim * self.signature.dtype.itemsize

    def run(self, tokens: Tensor, state: _Held, at: Sequence[int]) -> list[tuple[Tensor, ...]]:
        ids = tokens.detach().cpu().numpy().astype(np.int64)
        found: list[tuple[Tensor, ...]] = []
        for begin in range(0, len(ids), MOST_ROWS):
            piece = ids[begin : begin + MOST_ROWS]
            given = self._append(piece, state)
            here = [row - begin for row in at if begin <= row < begin + len(piece)]
            found += [tuple(torch.from_numpy(part[0, row]) for part in given) for row in here]
        return found

    def _append(self, ids: np.ndarray, state: _Held) -> list[np.ndarray]:
        """Appends a chain to a request's states; logits and, where there are any, hidden states."""
        before, count = state.length, len(ids)
        rows = max(count, LEAST_ROWS)
        # Rows behind the last are seen by none before them. They repeat its position: the next one may not exist.
        spare = rows - count
        held = [np.ascontiguousarray(part[:, :, :before]) for part in state.states]
        feeds = {
            "input_ids": np.pad(ids, (0, spare), mode="edge")[None],
            "attention_mask": np.ones((1, before + rows), dtype=np.int64),
            **dict(zip(self.signature.past, held, strict=True)),
        }
        if self.signature.positions:
            feeds["position_ids"] = np.pad(np.arange(before, before + count), (0, spare), mode="edge")[None]
        given = self._given(feeds, rows, before)
        shown = len(given) - len(self.signature.present)
        state.length, state.states = before + count, given[shown:]
        return given[:shown]

    def _given(self, feeds: dict[str, np.ndarray], rows: int, before: int) -> list[np.ndarray]:
        """The session's outputs. Raises UserError where it fails, or gives other shapes than it said."""
        try:
            given: list[np.ndarray] = self.session.run(self._outputs, feeds)
        except Exception as error:  # as in _session
            raise UserError(
                f"{graph.GRAPH}: ONNX Runtime cannot run it ({graph.first_line(error)}); export it again"
            ) from error
        heads, dim = self.signature.shape
        expected = {"logits": (1, rows, self.vocab_size), "hidden_states": (1, rows, self.hidden_size)}
        for name, value in zip(self._outputs, given, strict=True):
            wanted = expected.get(name, (1, heads, before + rows, dim))
            if value.shape != wanted:
                raise UserError(
                    f"{graph.GRAPH}: {name} should have come out as {wanted}, and is {value.shape}; export it again"
                )
        return given


def open_decoder(folder: Path, device: torch.device, threads: int | None) -> tuple[OnnxDecoder, Any]:
    """The decoder of a directory with a model.onnx, and config.json's values as attributes.

    threads  of the session (None: as many as torch has). Raises UserError for damaged or missing files, for a graph
    that is no decoder, and where ONNX Runtime, or its CUDA provider for a CUDA device, is not installed.
    """
    config = read_json(inside(folder, "config.json", "config.json"))
    model_config.check(config, f"{folder.name}/config.json")
    graph.check(folder)
    shown = f"{folder.name}/{graph.GRAPH}"
    number = threads or torch.get_num_threads()
    session = _session(folder / graph.GRAPH, shown, device, number)
    taken = signature(session, shown)
    limits = [config[key] for key in ("max_position_embeddings", "n_positions") if config.get(key)]
    if not limits or not isinstance(limits[0], int) or limits[0] < 1:
        raise UserError(f"{folder.name}/config.json: max_position_embeddings must say how long a text may be")
    return OnnxDecoder(session, taken, limits[0], number, device), SimpleNamespace(**config)


def _session(path: Path, shown: str, device: torch.device, threads: int) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(
            f'{shown}: running it needs ONNX Runtime, which is missing: pip install "specpress[onnx]", or'
            ' "specpress[onnx-gpu]" where there is CUDA'
        ) from error
    provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise UserError(
            f"{shown}: device {str(device)!r} needs onnxruntime-gpu in place of onnxruntime: pip install"
            ' "specpress[onnx-gpu]"'
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # its errors come out as exceptions, too, and those are told
    chosen = (provider, {"device_id": device.index or 0}) if device.type == "cuda" else provider
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=[chosen])
    except Exception as error:  # its errors have no class in common but this
        reason = graph.first_line(error)
        raise UserError(f"{shown}: ONNX Runtime cannot load it ({reason}); export it again") from error
    if provider not in session.get_providers():
        # Where its CUDA libraries do not load, ONNX Runtime says so in a log and takes the CPU.
        raise UserError(
            f"{shown}: device {str(device)!r} was asked for, but ONNX Runtime {onnxruntime.__version__} cannot load its"
            " CUDA provider; install the CUDA and cuDNN libraries that this version of onnxruntime-gpu asks for"
        )
    return session
