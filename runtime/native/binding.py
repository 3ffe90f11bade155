"""The compiled library, by ctypes. Pointers leave Python only in this folder; structs.py has what they point to."""

import ctypes
import weakref
from collections.abc import Callable
from ctypes import byref, c_double, c_float, c_int64, c_uint64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from runtime.machine import cores
from runtime.native.arena import Arena
from runtime.native.structs import (
    AnglesStruct,
    BatchStruct,
    BlockLayerStruct,
    BlockNetworkStruct,
    BlockTextStruct,
    ChainNoiseStruct,
    ConvolutionStruct,
    DeltaStruct,
    HeadsStruct,
    LatentStruct,
    LayerGateStruct,
    LayerInputsStruct,
    LayerStruct,
    MambaStruct,
    MixtureStruct,
    MlpBesideStruct,
    ModelStruct,
    StoreStruct,
    TakenStruct,
    WeightsStruct,
)

# Fastest first; the numbers are those of api.cpp.
PATHS = {"amx-int8": 6, "avx512-vnni": 0, "avx-vnni": 1, "avx2": 2, "neon-i8mm": 5, "neon-dotprod": 4, "portable": 3}
_KINDS = ("f32", "bf16", "int8", "int4", "nf4", "ternary", "nested", "upper", "trellis", "ternary-1.25")
KINDS = {name: number for number, name in enumerate(_KINDS)}
# Inputs that one 64-byte vector holds of each of its 16 outputs; of ternary-1.25 five together.
STEPS = dict(zip(_KINDS, (1, 2, 4, 8, 8, 16, 8, 8, 16, 128), strict=True))
BLOCK = 32
# What a path lacks, where a bit of specpress_path is not set.
_LACKS = {
    2: "this processor lacks the instructions",
    1: "the compiler that built specpress does not know these instructions",
    4: "the operating system does not let this process use these instructions",
}
CACHES = {"float32": 0, "int8": 1, "int4": 2, "int3": 3}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4, "xielu": 5, "clamped_swiglu": 6}
SCORINGS = {"softmax": 0, "sigmoid": 1, "sparse mixer": 2}


_SIZES = (
    WeightsStruct,
    LayerStruct,
    ModelStruct,
    MixtureStruct,
    LatentStruct,
    BatchStruct,
    StoreStruct,
    HeadsStruct,
    AnglesStruct,
    ConvolutionStruct,
    DeltaStruct,
    MambaStruct,
    MlpBesideStruct,
    LayerInputsStruct,
    LayerGateStruct,
    TakenStruct,
    ChainNoiseStruct,
    BlockNetworkStruct,
    BlockLayerStruct,
    BlockTextStruct,
)
_VERSION = 2  # of what the functions take (api.cpp)
_I, _P = c_int64, c_void_p
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "path": (_I, [_I]),
    "sizes": (None, [_P]),
    "pool_new": (_P, [_I]),
    "pool_free": (None, [_P]),
    "packed_bytes": (_I, [_P]),
    "pack": (_I, [_P, _P, _P, _I, _P, _P]),
    "unpack_nibbles": (None, [_P, _P, _I, _I, _I, _P]),
    "encode_tiles": (None, [_I, _P, _P]),
    "decoder_new": (_P, [_P, _I, _P]),
    "decoder_free": (None, [_P]),
    "forward": (None, [_P, _P, _P, _P, _I, _P, _P, _P, _P]),
    "draft": (_I, [_P, _P, _P, _I, _P, _I, _P, _I, _P]),
    "block_new": (_P, [_P, _P, _I, _P]),
    "block_free": (None, [_P]),
    "block_draft": (_I, [_P, _P, _P, _P, _I, _I, _P, _P, _P]),
    "experts_read": (_I, [_P]),
    "project": (None, [_P, _P, _P, _I, _P]),
    "norm": (None, [_I, _P, _P, _I, _I, c_float, c_float, _P]),
    "layer_norm": (None, [_I, _P, _P, _P, _I, _I, c_float, _P]),
    "gated": (None, [_I, _P, _P, _I, _I, _P, _P]),
    "largest": (_I, [_I, _P, _I, _I]),
    "rotate": (None, [_I, _P, _I, _I, _I, _I, _P, _P]),
    "remember": (None, [_I, _P, _I, _P, _I, _P, _P, _P]),
    "move": (None, [_P, _I, _P, _I, _P, _P]),
    "attend": (None, [_I, _P, _P, _I, _I, c_float, c_float, _P, _P, _P, _P]),
    "uniforms": (None, [c_uint64, c_uint64, c_uint64, c_uint64, _I, _P]),
    "read": (c_double, [_I, _P, _P, _I, _P]),
}


@cache
def library() -> tuple[Any | None, str]:
    """The library, or None and why there is none."""
    named = (Path(__file__).with_name(f"_specpress{suffix}") for suffix in EXTENSION_SUFFIXES)
    found = next((path for path in named if path.is_file()), None)
    if found is None:
        return None, "the native kernels were not compiled when specpress was installed (no C++ compiler?)"
    try:
        loaded = ctypes.CDLL(str(found))
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(loaded, f"specpress_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, f"the native kernels cannot be loaded ({error}); install specpress again"
    sizes = (c_int64 * (len(_SIZES) + 2))()
    loaded.specpress_sizes(sizes)
    # A library that knows fewer kinds would jump into nothing where a new one is asked of it.
    if list(sizes) != [*(ctypes.sizeof(struct) for struct in _SIZES), len(KINDS), _VERSION]:
        return None, "the native kernels are of another version than this code; install specpress again"
    return loaded, ""


def usable(path: str) -> tuple[bool, str]:
    """Whether a path can run here, and why or why not."""
    loaded, why = library()
    if loaded is None:
        return False, why
    why = next((why for bit, why in _LACKS.items() if not loaded.specpress_path(PATHS[path]) & bit), "")
    return not why, why or "compiled, and this processor has the instructions"


@cache
def fastest() -> int | None:
    """The number of the fastest path that can run here; None where there is no library."""
    return next((number for path, number in PATHS.items() if usable(path)[0]), None)


def require() -> Any:
    """The library. Raises RuntimeError saying why there is none: callers have asked `usable` before."""
    loaded, why = library()
    if loaded is None:
        raise RuntimeError(why)
    return loaded


class Pool:
    """Kernel threads: the caller and `threads` − 1 others, which sleep while there is nothing to do."""

    def __init__(self, threads: int):
        self.threads = threads
        self.arena = Arena()  # where the weights of its models lie
        self.handle = require().specpress_pool_new(threads)
        weakref.finalize(self, require().specpress_pool_free, self.handle)


@cache
def pool(threads: int) -> Pool:
    """The one pool of this many threads. Every model that asks for as many shares it."""
    return Pool(threads)


@cache
def default_threads() -> int:
    """One for each physical core that this process may run on."""
    return cores()


def bandwidth_reader(threads: int, size: int = 1 << 28) -> Callable[[], float]:
    """Each call reads `size` bytes once, on `threads` threads, and gives the bytes per second.

    `size` is to be well above what the caches hold. Raises RuntimeError where the native library is missing.
    """
    data, kept = Arena().allocate(size).fill_(1), c_int64()
    own, read = pool(threads), require().specpress_read
    return lambda: float(read(fastest(), own.handle, data.data_ptr(), size, byref(kept)))
