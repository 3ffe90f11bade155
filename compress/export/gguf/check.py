"""Whether a GGUF file says all of a model: its keys, read as llama.cpp reads them, make the model's record again."""

import copy
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.errors import UserError
from compress.export.gguf.folding import folded
from compress.export.gguf.metadata import WINDOWS, Keys
from runtime.checkpoints.architecture import Architecture, describe
from runtime.checkpoints.gguf.config import configure
from runtime.checkpoints.gguf.names import FORMS, architecture_of
from runtime.checkpoints.gguf.reader import Header, TensorEntry
from runtime.checkpoints.gguf.rope import TRUNCATE
from runtime.checkpoints.gguf.state_spaces import LEAST_STEP
from runtime.errors import UserError as RuntimeUserError
from runtime.model.rotary import frequencies

# Of the record: what a file says in its tensors, or in other words. `check` looks at windows and activations itself.
_NOT_COMPARED = ("model_type", "names", "max_positions", "tied", "windows", "activation", "fused", "rotary")
# Rotations whose factors a tensor has.
_WITH_FACTORS = ("llama3", "proportional", "longrope")
# llama.cpp takes the groups whose best so many experts add up to most.
_BEST = 2
# The least step of Nemotron-H's releases, below which hardly any is, and which llama.cpp leaves out.
_USUAL_STEP = 0.001


def check(shown: str, a: Architecture, config: Any, found: Keys, tensors: dict[str, TensorEntry]) -> tuple[str, ...]:
    """Notes on what a file with the keys `found` and such tensors says otherwise than the model does.

    config  as transformers reads it. Raises UserError naming what the architecture of llama.cpp's cannot express.
    """
    kind, a = architecture_of(a), folded(a)
    metadata: dict[str, Any] = {f"{kind}.{key}": _as_read(value) for key, value in found.items()}
    try:
        values = configure(Header(Path(shown), metadata | {"general.architecture": kind}, tensors))
        again = describe(values)
    except RuntimeUserError as error:
        raise UserError(f"{error}: GGUF's {kind} cannot hold this model, so export it to another form") from error
    if again is None:
        raise UserError(f"{shown}: GGUF's {kind} cannot hold this variant: export it to another form")
    unused = () if _has_mlp(a) and _has_mlp(again) else ("intermediate",)
    differing = [
        (field.name, getattr(a, field.name), getattr(again, field.name))
        for field in fields(Architecture)
        if field.name not in (*_NOT_COMPARED, *unused)
        and not _equal(getattr(a, field.name), getattr(again, field.name))
    ]
    if kind in WINDOWS and a.windows != again.windows:
        differing.append(("windows", a.windows, again.windows))
    if _rotated(a) != _rotated(again):
        differing.append(("rotated layers", _rotated(a), _rotated(again)))
    if {a.activation, again.activation} not in ({a.activation}, {"gelu", "gelu_tanh"}):
        differing.append(("activation", a.activation, again.activation))
    if FORMS[kind].square and a.heads * a.head_dim != a.hidden:
        differing.append(("heads that are together as wide as the hidden size", a.heads * a.head_dim, a.hidden))
    if FORMS[kind].head == "never" and not a.tied:
        differing.append(("tied embedding and head", False, True))
    if a.mamba is not None and a.model_type == "nemotron_h" and a.mamba.limits[0] > _USUAL_STEP:
        differing.append(("least step", a.mamba.limits[0], f"of at most {_USUAL_STEP}"))
    if a.experts is not None and a.experts.groups[0] > 1 and a.experts.groups[2] != _BEST:
        differing.append(("groups of experts by their best two", "groups of experts by their best one", ""))
    if differing:
        what, ours, theirs = _part(*differing[0])
        raise UserError(
            f"{shown}: expected {what} {theirs}, as llama.cpp has it for {kind}, found {ours}: export it to another"
            " form"
        )
    _check_rotation(shown, kind, a, again, config, values)
    return tuple(_notes(a, kind, found))


def _has_mlp(a: Architecture) -> bool:
    """Whether a layer has an MLP that is no mixture."""
    return any(
        layer not in a.without_mlp and (a.experts is None or layer in a.dense_layers) for layer in range(a.layers)
    )


def _notes(a: Architecture, kind: str, found: Keys) -> "list[str]":
    notes = []
    if a.activation == "gelu" and kind in ("gptneox", "falcon"):
        notes.append("llama.cpp computes this architecture's GELU by its tanh form: logits differ in the fourth digit")
    if (least := found.get(LEAST_STEP)) is not None:
        notes.append(f"llama.cpp has no least step of state spaces, which is {least:g} in this model")
    if found.get(TRUNCATE) is False:
        notes.append("llama.cpp rounds the bounds of yarn's ramp to whole dimensions, which this model does not")
    return notes


def _as_read(value: Any) -> Any:
    """A value as a reader has it."""
    if isinstance(value, float):
        return float(np.float32(value))
    return np.array(value) if isinstance(value, list) else value


def _equal(ours: Any, theirs: Any) -> bool:
    """Whether two values of records are the same; floats went through float32."""
    if isinstance(ours, float) and isinstance(theirs, float | int):
        return math.isclose(ours, theirs, rel_tol=1e-5)
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(_equal(*pair) for pair in zip(ours, theirs, strict=True))
    if hasattr(ours, "__dataclass_fields__") and type(ours) is type(theirs):
        return all(
            _equal(getattr(ours, field.name), getattr(theirs, field.name))
            for field in fields(ours)
            if field.name not in ("names", "routers", "fused", "transposed", "interleaved")
        )
    return bool(ours == theirs)


def _rotated(a: Architecture) -> str:
    """The numbers of the layers whose queries and keys are rotated."""
    return ", ".join(str(layer) for layer, kind in enumerate(a.rotations) if kind is not None) or "none"


def _part(what: str, ours: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Of two descriptions the part that differs."""
    if hasattr(ours, "__dataclass_fields__") and type(ours) is type(theirs):
        for field in fields(ours):
            pair = getattr(ours, field.name), getattr(theirs, field.name)
            if not _equal(*pair):
                return f"{what}' {field.name}", *pair
    return what, ours, theirs


def _check_rotation(shown: str, kind: str, a: Architecture, again: Architecture, config: Any, values: Keys) -> None:
    """Raises UserError where a layer would rotate at other frequencies."""
    from transformers import AutoConfig

    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    if any(one.get("rope_type") == "llama3" for one in sets) and not FORMS[kind].rope_factors:
        raise UserError(
            f"{shown}: expected rotary frequencies without Llama 3's factors, which llama.cpp has no place for in"
            f" {kind}, found them: export it to another form"
        )
    plain = {key: value for key, value in values.items() if key not in ("model_type", "quantization_config")}
    rotated = a.head_dim
    theirs = AutoConfig.for_model(values["model_type"], **copy.deepcopy(plain))
    sizes = [a.shape(layer).head_dim if a.latent is None else 0 for layer in range(a.layers)]
    for ours_kind, their_kind, size in set(zip(a.rotations, again.rotations, sizes, strict=True)):
        if ours_kind is None or their_kind is None:
            continue
        size = size if a.head_shapes else 0
        (one, factor), (other, their_factor) = (
            frequencies(said, name, size) for said, name in ((config, ours_kind), (theirs, their_kind))
        )
        rotated = 2 * len(one)
        if (parameters.get(ours_kind) or parameters).get("rope_type") in _WITH_FACTORS:
            # They come with a tensor, which llama.cpp reads whatever they are.
            one, factor = other, their_factor
        if one.shape != other.shape or not torch.allclose(one, other, 1e-4, 0.0) or abs(factor - their_factor) > 1e-4:
            raise UserError(
                f"{shown}: expected rotary frequencies that llama.cpp has for {kind}, found"
                f" {parameters.get(ours_kind) or parameters}: export it to another form"
            )
    if FORMS[kind].neighbours and not a.rotary_neighbours and rotated != a.head_dim:
        raise UserError(
            f"{shown}: expected heads of which all dimensions rotate, as llama.cpp has it for {kind}, found"
            f" {rotated} of {a.head_dim}: export it to another form"
        )
