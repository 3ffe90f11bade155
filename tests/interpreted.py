"""Triton's kernels on a machine without a GPU: in Triton's interpreter, which patches triton.language once here.

By itself it looks through the whole language before each kernel, and again at each call of a function that is written
in it (tl.sum, tl.max, our own helpers): nearly a millisecond every time, more than most of them then take. Nothing in
the tests' processes needs the language as it was.
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
