"""A device "cuda" that lies in the CPU's memory, on machines without one: it computes, and refuses what CUDA refuses.

Real values, so that whole commands run on it. What it refuses: operations on tensors of both devices (but for numbers
and indices, which CUDA takes from the host), `.numpy()` of the device's tensors, and a CPU's random generator there.
It says nothing about speed, about kernels, or about CUDA's own errors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from runtime.kernels.reference import integer_product

NAME = "pretended GPU"
_COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.to}
# CUDA reads these arguments' indices from the host where they lie there.
_INDEXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten._index_put_impl_.default,
    torch.ops.aten._unsafe_index.Tensor,
}


class OnDevice(Tensor):
    """A tensor that says it is on the device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        # Never an inference tensor: torch would refuse views of weights that were loaded outside of that mode.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device("cuda:0"),
            )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{operation} outside of the pretended GPU's mode")


class _Pretence(TorchDispatchMode):
    # torch asks no driver for devices while a mode of this kind is on; its own fake tensors come by the same door.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        on_device = any(isinstance(value, OnDevice) for value in tensors)
        if on_device and operation.overloadpacket not in _COPIES:
            _refuse(operation, args, kwargs)
        asked = next((value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.device)), None)
        if asked is not None:
            on_device = asked.type == "cuda"
            args, kwargs = tree_map(_on_host, (args, kwargs))
            kwargs.pop("pin_memory", None)
        if operation is torch.ops.aten.copy_.default:
            on_device = isinstance(args[0], OnDevice)
        held = tree_map(_held, args)
        # A GPU's product of integers is exact; torch's on a CPU saturates without VNNI.
        is_product = on_device and operation is torch.ops.aten._int_mm.default
        out = integer_product(*held) if is_product else operation(*held, **tree_map(_held, kwargs))
        if not on_device:
            return out
        # What changed a tensor in place gives that tensor back.
        known = {id(value.held): value for value in tensors if isinstance(value, OnDevice)}
        return tree_map(
            lambda value: (
                known[id(value)]
                if id(value) in known
                else OnDevice(value)
                if isinstance(value, Tensor) and not isinstance(value, OnDevice)
                else value
            ),
            out,
        )


class _Doors(TorchFunctionMode):
    """Calls that would ask a driver before the other mode sees them: a torch without CUDA refuses those."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            del kwargs["device"]
            return function(*args, **kwargs).to("cuda:0")
        if function in _GUARDED and any(isinstance(value, OnDevice) for value in tree_leaves((args, kwargs))):
            if function is Tensor.__setitem__:
                _refuse(torch.ops.aten.index_put_.default, args, kwargs)
            elif function is Tensor.__getitem__:
                _refuse(torch.ops.aten.index.Tensor, args, kwargs)
            else:
                _refuse(function, args, kwargs)
            out = function(*tree_map(_held, args), **tree_map(_held, kwargs))
            return tree_map(lambda value: OnDevice(value) if isinstance(value, Tensor) else value, out)
        if function is torch.device:
            return function(*args, **kwargs)
        return function(*tree_map(_numbered, args), **tree_map(_numbered, kwargs))


_GUARDED = {
    *(Tensor.__getitem__, Tensor.__setitem__, Tensor.contiguous, Tensor.tolist, Tensor.data_ptr),
    *(Tensor.__invert__, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.nonzero),
    *(torch.bmm, torch.isfinite, torch.nonzero),
}


def _numbered(value: Any) -> Any:
    if (isinstance(value, torch.device) and value.type == "cuda") or (isinstance(value, str) and value == "cuda"):
        return torch.device("cuda:0")
    return value


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


def _refuse(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    looked_at = args if operation not in _INDEXED else (args[0], *args[2:])
    strangers = [
        value
        for value in tree_leaves((looked_at, kwargs))
        if isinstance(value, Tensor) and not isinstance(value, OnDevice) and value.dim() > 0
    ]
    if strangers and any(isinstance(value, OnDevice) for value in tree_leaves((looked_at, kwargs))):
        raise RuntimeError(f"{operation}: tensors on cuda:0 and on the CPU {[tuple(s.shape) for s in strangers]}")
    if operation in _INDEXED and not isinstance(args[0], OnDevice):
        raise RuntimeError(f"{operation}: indices on cuda:0 for a tensor on the CPU")
    if operation is torch.ops.aten._int_mm.default and (args[0].shape[0] <= 16 or any(n % 8 for n in args[1].shape)):
        raise RuntimeError(f"_int_mm: {tuple(args[0].shape)} x {tuple(args[1].shape)} is a product that CUDA refuses")
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type == "cpu":
        raise RuntimeError(f"{operation}: a CPU's generator for a tensor on cuda:0")


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, "cuda" is a device that there is."""
    said: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "synchronize": lambda device=None: None,
        "mem_get_info": lambda device=None: (1 << 34, 1 << 34),
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "memory_allocated": lambda device=None: 1 << 20,
        "memory_reserved": lambda device=None: 1 << 20,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "empty_cache": lambda: None,
    }
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, value)
    # Moving a module's parameters in place would leave the values where they are.
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    with _Pretence(), _Doors():
        yield
