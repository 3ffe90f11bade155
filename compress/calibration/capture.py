"""What goes into the first block, and how the model calls each of its blocks, found by the model's own forward.

Every layer's forward is replaced by one that notes its arguments and passes the hidden states on, so masks and position
embeddings are whatever the architecture makes of them, layer by layer (Gemma's differ between its windows). Some models
take a layer's output as it is and others the first of several: which, is tried.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.calibration.activations import check_window
from compress.calibration.carried import Call, Row, find_places
from compress.errors import UserError
from compress.model.block_loader import BlockLoader
from compress.model.structure import make_buffers
from runtime.formats.tensors import check_finite

# What a layer gives to its model: hidden states, alone or before what the model does not need here.
_FORMS: tuple[Callable[[Tensor], Any], ...] = (lambda x: x, lambda x: (x, None), lambda x: (x, None, None))


class _LastLayerError(Exception):
    """Ends a forward at the last layer: nothing after it is wanted, or has weights."""


class Capture:
    """The model's front: embeddings in, the first block's inputs and every block's other arguments out."""

    def __init__(self, loader: BlockLoader, outside: Sequence[str]):
        """outside: the checkpoint's tensors that belong to no block. The head is not needed and not loaded."""
        self._body: Any = loader.structure.body
        self._layers = loader.structure.layers
        self._forms = _FORMS
        self.calls: list[Call] = []
        for name, module in loader.structure.model.named_modules():
            if not f"{name}.".startswith(f"{loader.structure.blocks_at}."):
                make_buffers(loader.structure.model, module)
        self._filled: list[tuple[nn.Module, str]] = []
        self._hooks: list[RemovableHandle] = []
        for name in outside:
            parameter = loader.structure.find(name)
            if parameter is None or parameter.kind == "head" or loader.structure.is_beside(name):
                continue
            tensor = loader.checkpoint.tensor(name)
            check_finite(name, tensor)
            place, _, leaf = parameter.name.rpartition(".")
            module = loader.structure.model.get_submodule(place)
            # An embedding is large and only looked up: it stays in the file's memory and type.
            is_embedding = parameter.kind == "embedding"
            value = tensor if is_embedding else tensor.to(torch.float32, copy=True)
            setattr(module, leaf, nn.Parameter(value, requires_grad=False))
            self._filled.append((module, leaf))
            if is_embedding:
                self._hooks.append(module.register_forward_hook(lambda module, given, out: out.to(torch.float32)))

    def inputs(self, tokens: Tensor) -> Iterator[tuple[Row, Tensor]]:
        """What goes into block 0, (1, T, W) float32, for each row of tokens (S, T) int64, and what it is; fills
        `calls`.

        Raises UserError for NaN and infinity, and for an architecture that hands its layers more of the text than
        hidden states and one tensor of the layer's own.
        """
        for number, row in enumerate(tokens):
            hidden, found = self._forward(row)
            check_window(hidden, number, "the embeddings")
            if not self.calls:
                other = self._forward(row.flip(0))[1]
                placed = find_places(found, other)
                self.calls = [call.bare() for call in placed]
                self._require_same(other)
            calls = self._require_same(found)
            own = [given.to(torch.float32) for call in calls if (given := call.input) is not None]
            if own and len(own) < len(calls):
                raise UserError(
                    f"{type(self._body).__name__}: expected an input of its own for every layer or for none, found "
                    f"{len(own)} of {len(calls)}: use a recipe that looks at no text"
                )
            yield Row(hidden.shape[-1], tuple(part.shape[-1] for part in own)), torch.cat([hidden, *own], dim=-1)

    def _require_same(self, found: Sequence[Call]) -> list[Call]:
        """The calls of a text, told where its own arguments are. Raises UserError where others differ from `calls`."""
        told = [replace(call, own=of.own, shared=of.shared) for call, of in zip(found, self.calls, strict=True)]
        if not all(_same(one, other.bare()) for one, other in zip(self.calls, told, strict=True)):
            raise UserError(
                f"{type(self._body).__name__}: expected layers that are given of the text their hidden states and one "
                "tensor at most, found other arguments that differ between texts: use a recipe that looks at no text"
            )
        return told

    def release(self) -> None:
        """Lets go of the weights."""
        for module, leaf in self._filled:
            setattr(module, leaf, nn.Parameter(getattr(module, leaf).to("meta"), requires_grad=False))
        for hook in self._hooks:
            hook.remove()

    def _forward(self, row: Tensor) -> tuple[Tensor, list[Call]]:
        problem = ""
        for form in self._forms:
            seen: list[tuple[Tensor, Call]] = []
            with _recording(self._layers, seen, form), torch.no_grad(), suppress(_LastLayerError):
                try:
                    self._body(input_ids=row.unsqueeze(0), use_cache=False)
                except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                    problem = f": {' '.join(str(error).split())[:100]}"
            shapes = {tuple(hidden.shape) for hidden, _ in seen}
            if len(seen) == len(self._layers) and shapes == {(1, len(row), seen[0][0].shape[-1])}:
                self._forms = (form,)
                return seen[0][0].to(torch.float32), [call for _, call in seen]
        raise UserError(
            f"{type(self._body).__name__}: expected every token's hidden states to go from layer to layer, "
            f"found {sorted(shapes)} in {len(seen)} of {len(self._layers)} layers{problem}: "
            "use a recipe that looks at no text"
        )


@contextmanager
def _recording(
    layers: Sequence[nn.Module], seen: list[tuple[Tensor, Call]], form: Callable[[Tensor], Any]
) -> Iterator[None]:
    """Replaces the layers' forwards meanwhile by ones that give `form` of what they are given."""

    def recorder(last: bool) -> Any:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((hidden_states, Call(args, kwargs)))
            if last:
                raise _LastLayerError
            return form(hidden_states)

        return forward

    try:
        for layer in layers:
            layer.__dict__["forward"] = recorder(layer is layers[-1])
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _same(one: Call, other: Call) -> bool:
    from torch.utils._pytree import tree_flatten

    first, second = (tree_flatten((call.args, dict(call.kwargs)))[0] for call in (one, other))
    return len(first) == len(second) and all(map(_equal, first, second))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.shape == other.shape and torch.equal(one, other))
    return one is other or bool(one == other)
