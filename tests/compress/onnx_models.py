"""ONNX exports of tiny models for tests. Tracing takes seconds, so each architecture is traced once a process."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.export import Exported
from compress.export.onnx import graph as onnx_graph
from compress.export.onnx import model as onnx
from runtime.checkpoints.open import open_checkpoint

_TRACED: dict[tuple[str, torch.dtype], tuple[Any, onnx_graph.Sizes]] = {}


def export(
    kind: str, model: Path, out: Path, dtype: torch.dtype = torch.float32, one_file: int = onnx.ONE_FILE
) -> Exported:
    """What `onnx.export` does, for a model of the tiny architecture `kind`."""
    if (kind, dtype) not in _TRACED:
        _TRACED[kind, dtype] = onnx_graph.trace(model, dtype)
    graph, sizes = _TRACED[kind, dtype]
    out.mkdir(parents=True)
    return onnx.assemble(open_checkpoint(model), graph.clone(), sizes, out, lambda *_: None, dtype, one_file)


def session(folder: Path) -> Any:
    """An ONNX Runtime session of one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])


def step(made: Any, tokens: torch.Tensor, past: list[np.ndarray] | None = None) -> list[np.ndarray]:
    """tokens (batch, n) after `past`: all outputs, as the session gives them (logits, hidden states, present …)."""
    inputs = [value for value in made.get_inputs() if value.name.startswith("past_key_values.")]
    dtype = np.float16 if inputs[0].type == "tensor(float16)" else np.float32
    batch, count = tokens.shape
    states = past or [np.zeros((batch, v.shape[1], 0, v.shape[3]), dtype=dtype) for v in inputs]
    before = states[0].shape[2]
    feeds = {
        "input_ids": tokens.numpy(),
        "attention_mask": np.ones((batch, before + count), dtype=np.int64),
        "position_ids": np.tile(np.arange(before, before + count), (batch, 1)),
        **{value.name: state for value, state in zip(inputs, states, strict=True)},
    }
    given: list[np.ndarray] = made.run(None, feeds)
    return given
