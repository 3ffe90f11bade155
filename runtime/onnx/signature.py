"""What an ONNX Runtime session takes and gives, as far as a decoder has to know."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.errors import UserError

_DTYPES: dict[str, np.dtype] = {"tensor(float)": np.dtype(np.float32), "tensor(float16)": np.dtype(np.float16)}


@dataclass(frozen=True)
class Signature:
    """What a session takes and gives.

    past, present  names of keys and values, layer by layer, in the same order.
    shape          (kv heads, head dim).
    positions      whether it takes position_ids.
    hidden         the final hidden states' size; 0 where it does not give them.
    """

    past: tuple[str, ...]
    present: tuple[str, ...]
    shape: tuple[int, int]
    dtype: np.dtype
    positions: bool
    vocabulary: int
    hidden: int


def signature(session: Any, shown: str) -> Signature:
    """Raises UserError, naming `shown`, for a session that is no decoder with keys and values."""
    try:
        return _signature(session, shown)
    except UnicodeDecodeError as error:
        raise UserError(f"{shown}: names in its graph should be UTF-8, and one is not; export it again") from error


def _signature(session: Any, shown: str) -> Signature:
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name: value for value in session.get_outputs()}
    past = tuple(name for name in inputs if name.startswith("past_key_values."))
    present = tuple(name.replace("past_key_values.", "present.") for name in past)
    lacking = [name for name in ("input_ids", "attention_mask") if name not in inputs]
    lacking += [name for name in ("logits", *present) if name not in outputs]
    others = set(inputs) - {"input_ids", "attention_mask", "position_ids", *past}
    if lacking or others or not past:
        found = f"lacks {lacking[0]}" if lacking else f"wants {min(others)}" if others else "has no past_key_values"
        raise UserError(
            f"{shown}: a decoder with past_key_values.N.key and .value was expected, and this graph {found}; export it"
            " with `python -m compress.export --to onnx`"
        )
    shape, kind = inputs[past[0]].shape, inputs[past[0]].type
    given = [outputs[name].shape for name in ("logits", "hidden_states") if name in outputs]
    sizes = (shape[1], shape[3], *(found[-1] for found in given)) if len(shape) == 4 and all(given) else ()
    if kind not in _DTYPES or not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UserError(
            f"{shown}: {past[0]} must be float32 or float16 (batch, heads, past, head dim) with known heads and sizes,"
            f" found {kind} {shape}, and logits and hidden states must have a known last size, found {given};"
            " export it again"
        )
    hidden = outputs["hidden_states"].shape[-1] if "hidden_states" in outputs else 0
    return Signature(
        past,
        present,
        (shape[1], shape[3]),
        _DTYPES[kind],
        "position_ids" in inputs,
        outputs["logits"].shape[-1],
        hidden,
    )
