"""Triton's kernels on a machine without a GPU: in Triton's interpreter, which patches triton.language once here.

By itself it looks through the whole language before each kernel, and again at each call of a function that is written
in it (tl.sum, tl.max, our own helpers): nearly a millisecond every time, more than most of them then take. And at each
operation it works out anew what a shape of these sizes is, which takes longer than the operation. Nothing in the tests'
processes needs the language as it was.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch


class _Kept:
    """In place of what takes a patch back."""

    def restore(self) -> None:
        pass


class _Once:
    """Triton's patch, once for each module: what is patched depends on the names that it has for the language."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._seen: set[int] = set()

    def __call__(self, function: Any) -> _Kept:
        module = id(function.__globals__)
        if module not in self._seen:
            self._patch(function)
            self._seen.add(module)
        return _Kept()


def interpret() -> None:
    """Turns the interpreter on, where there is no GPU. Before any kernel is defined: Triton decides then."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    if not isinstance(interpreter._patch_lang, _Once):
        interpreter._patch_lang = _Once(interpreter._patch_lang)
        _remember_types()


def _remember_types() -> None:
    """Lets what follows from a type's or a shape's name alone be worked out once for each."""
    from triton.language import core
    from triton.runtime import interpreter

    numpy_type, tuple_type = interpreter._get_np_dtype, core._type_for_tuple_values
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_types: dict[str, Any] = {}
    tuple_types: dict[tuple[int, ...], Any] = {}
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def sizes(values: Any) -> tuple[int, ...] | None:
        found = tuple([one.value if type(one) is core.constexpr else one for one in values])
        return found if all(type(one) is int for one in found) else None

    def numpy_type_of(kind: Any) -> Any:
        found = numpy_types.get(kind.name)
        if found is None:
            found = numpy_types[kind.name] = numpy_type(kind)
        return found

    def tuple_type_of(values: Any, fields: Any = None) -> Any:
        key = sizes(values) if fields is None else None
        if key is None:
            return tuple_type(values, fields)
        found = tuple_types.get(key)
        if found is None:
            found = tuple_types[key] = tuple_type(values)
        return found

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        dimensions = sizes(shape)
        if dimensions is None:
            return make_block(self, element_ty, shape)
        found = blocks.get((element_ty.name, dimensions))
        if found is None:
            make_block(self, element_ty, shape)
            blocks[element_ty.name, dimensions] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        found = tensors.get(key)
        if found is None:
            make_tensor(self, handle, type)
            tensors[key] = self.numel, self.shape
        else:
            self.numel, self.shape = found
            self.handle, self.type, self.dtype = handle, type, type.scalar

    interpreter._get_np_dtype = numpy_type_of
    core._type_for_tuple_values = tuple_type_of
    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
