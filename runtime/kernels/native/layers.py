"""Native layers one by one: what the decoder is made of, and callable alone."""

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runtime.kernels.native.binding import (
    PATHS,
    HeadsStruct,
    ModelStruct,
    Pool,
    ProjectionStruct,
    WeightsStruct,
    require,
)
from runtime.kernels.native.weights import NativeWeight

WeightPointer = ctypes.POINTER(WeightsStruct)


def project(weights: list[NativeWeight]) -> ProjectionStruct:
    """Layers of one input as one projection. The struct keeps its array of pointers alive, not the weights."""
    pointers = (WeightPointer * len(weights))(*[ctypes.pointer(w.struct) for w in weights])
    return ProjectionStruct(len(weights), pointers)


class Runner:
    """A native decoder without layers: the workspace in which a single projection runs."""

    def __init__(self, weight: NativeWeight, path: str, pool: Pool):
        self._weight, self._pool = weight, pool
        model = ModelStruct(
            heads=HeadsStruct(1, 1, 1, 0, 0, None),
            hidden=weight.struct.inputs,
            head=ctypes.pointer(weight.struct),
            embedding_scale=1.0,
        )
        self.handle = require().specpress_decoder_new(ctypes.byref(model), PATHS.index(path), pool.handle)
        weakref.finalize(self, require().specpress_decoder_free, self.handle)


@dataclass(frozen=True, eq=False)
class NativeLinear:
    """y (T, N) = x (T, K) Wᵀ (+ b), float32, in the kernels of one instruction path."""

    weight: NativeWeight
    path: str
    pool: Pool
    _runner: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Raises ValueError unless x is (T, K) float32 on the CPU."""
        return self.on(x)()

    def on(self, x: Tensor) -> Callable[[], Tensor]:
        """The product with x as a call that allocates nothing, for whoever makes it again and again on the same memory.

        Each call reads x as it is then, and returns the same y. Raises ValueError as calling the layer does, and what x
        holds is copied where it is not contiguous.
        """
        n, k = self.weight.shape
        if x.ndim != 2 or x.shape[1] != k or x.dtype != torch.float32 or x.device.type != "cpu":
            raise ValueError(f"this layer takes (T, {k}) float32 on the CPU, found {x.dtype} {list(x.shape)}")
        x = x.contiguous()
        y = torch.empty((x.shape[0], n))
        if not self._runner:
            self._runner["it"] = Runner(self.weight, self.path, self.pool)
            self._runner["projection"] = project([self.weight])
        handle, projection = self._runner["it"].handle, ctypes.byref(self._runner["projection"])
        call, read, rows, written = require().specpress_project, x.data_ptr(), x.shape[0], y.data_ptr()

        def product(layer: "NativeLinear" = self, x: Tensor = x) -> Tensor:
            # The defaults keep alive what the pointers point to.
            call(handle, projection, read, rows, written)
            return y

        return product
