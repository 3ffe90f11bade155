"""Which kernel runs a layer, and why. On a CPU: the fastest native path, else plain torch. On CUDA: Triton's, but for
layers of which library_choice.py knows a faster library; without Triton bitsandbytes or plain torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from runtime import native
from runtime.errors import UserError
from runtime.formats import dequantize
from runtime.formats.packed import PackedWeight
from runtime.formats.schemes import KINDS
from runtime.kernels import library_choice
from runtime.kernels.joined import Joined, Linear, share_inputs
from runtime.kernels.library_choice import IMPLEMENTATIONS, Capability, Choice
from runtime.kernels.plain_torch import tiled_linear
from runtime.kernels.reference import float_linear, packed_linear
from runtime.kernels.triton import usable

Weight = PackedWeight | Tensor
Weights = Sequence[Weight]
Biases = Sequence[Tensor | None]
# bitsandbytes by its name runs without Triton, too; in a table it is one product among Triton's.
_LIBRARIES = tuple(name for name in IMPLEMENTATIONS if name != "bitsandbytes")
_OTHERS = ("triton", "plain-torch", "reference", "bitsandbytes", "library")
NAMES: tuple[str, ...] = ("auto", *native.PATHS, *_OTHERS, *_LIBRARIES)


@dataclass(frozen=True)
class Backend:
    """How one family of kernels makes layers and runs a model.

    linear      the layer of a weight and, where it is float, its bias; `join`: several of one input, with the sizes of
                their outputs.
    decoder     "module:class" of the decoder over these layers (BaseDecoder); imported when a model is built.
    stack       "module:function" that makes the experts of a mixture into one; "": they stay as they are.
    stack_heads  likewise of the layers that latent attention's heads have (LatentHeads).
    has_planes  int8 layers can be read by their upper planes alone.
    repacks     weights are copied into blocks of its own, so that 4-bit codes are wanted as files have them, and no
                table of the file is kept.
    """

    linear: Callable[[Weight, Tensor | None, "Kernel"], Linear]
    join: Callable[[Weights, Biases, Sequence[int], "Kernel"], Joined]
    decoder: str
    stack: str = ""
    stack_heads: str = ""
    has_planes: bool = True
    repacks: bool = False


@dataclass(frozen=True)
class Kernel:
    """One set of kernels: whether it can run here, why or why not, and whether its bits are the same at every width.

    threads     those of the native kernels; 0 for kernels that use torch's.
    table       which layers run on a library's product beside Triton's kernels.
    everywhere  its bits are the same on every machine, too, and those of every other that says so.
    """

    name: str
    usable: bool
    why: str
    exact: bool
    threads: int = 0
    table: tuple[Choice, ...] = ()
    everywhere: bool = False

    @property
    def backend(self) -> Backend:
        """What makes its layers: libraries' products by their names stand beside Triton's."""
        if self.name in native.PATHS:
            return BACKENDS["native"]
        return BACKENDS["triton" if self.table else self.name]


def available(device: str = "cpu", threads: int | None = None, table: Sequence[Choice] | None = None) -> list[Kernel]:
    """What could run on a device; `auto` takes the first that is usable.

    `threads` of the native kernels; None: one per physical core. `table` of what was measured; None: choices.json.
    """
    has_bnb = find_spec("bitsandbytes") is not None
    bnb_why = "installed" if has_bnb else "not installed (pip install 'specpress[bnb]')"
    bnb = Kernel("bitsandbytes", has_bnb, f"bitsandbytes is {bnb_why}; nf4 and int8 only", exact=False)
    plain = Kernel("plain-torch", True, "torch's products, the same bits at every width on one machine", exact=True)
    meaning = Kernel(
        "reference", True, "plain torch, the same bits on every machine, slow", exact=True, everywhere=True
    )
    triton = Kernel("triton", *usable(device), exact=True)
    more = libraries(triton, _capability(device, triton), library_choice.packaged() if table is None else table)
    if device.startswith("cuda"):
        return [triton, *((bnb, plain) if has_bnb else (plain, bnb)), meaning, *more]
    count = native.default_threads() if threads is None else threads
    paths = [Kernel(path, *native.usable(path), exact=True, threads=count, everywhere=True) for path in native.PATHS]
    return [*paths, plain, meaning, *([triton, *more] if triton.usable else []), bnb]


def libraries(triton: Kernel, capability: Capability | None, table: Sequence[Choice]) -> list[Kernel]:
    """The sets in which libraries' products run beside Triton's kernels: only for who asks for them by name.

    capability  the device's; None: Triton's interpreter, where torch's operators for CPUs stand in.
    """
    measured = library_choice.counting(table, capability, exact=False)
    if not triton.usable:
        why = f"it runs beside Triton's kernels: {triton.why}"
        return [Kernel(name, False, why, exact=False) for name in ("library", *_LIBRARIES)]
    here = "here" if capability is None else f"on compute capability {capability[0]}.{capability[1]}"
    told = f"whatever was measured to be faster {here}, and Triton's kernels"
    if not measured:
        names = ", ".join(_LIBRARIES)
        told = f"nothing was measured {here} (python -m runtime.bench gpu kernels measures); or name one of {names}"
    found = [Kernel("library", bool(measured), told, exact=False, table=measured)]
    for name in _LIBRARIES:
        about = IMPLEMENTATIONS[name]
        if capability is not None and capability < about.least:
            why = f"{triton.why}, and {name} needs {about.least[0]}.{about.least[1]}"
            found.append(Kernel(name, False, why, about.exact))
        else:
            why = f"{', '.join(about.schemes)} only, inputs as {about.inputs}; Triton's kernels for the rest"
            found.append(Kernel(name, True, why, about.exact, table=library_choice.wanted(name)))
    return found


def choose(kernels: str, device: str, threads: int | None = None, table: Sequence[Choice] | None = None) -> Kernel:
    """The kernels to use; `threads` and `table` as `available` has them. Raises UserError for unknown or unusable ones.

    "auto" on CUDA takes from the table what kept its bits when it was measured; `linear` probes that again.
    """
    table = library_choice.packaged() if table is None else table
    options = available(device, threads, table)
    if kernels == "auto":
        first = next(option for option in options if option.usable)
        if first.name != "triton":
            return first
        return replace(first, table=library_choice.counting(table, _capability(device, first), exact=True))
    for option in options:
        if option.name == kernels:
            if not option.usable:
                raise UserError(f"kernels={kernels!r} cannot run here: {option.why}")
            return option
    if kernels in NAMES:
        wanted = "a CPU" if kernels in native.PATHS else "CUDA"
        raise UserError(f"kernels={kernels!r} run on {wanted}, and the device is {device}")
    raise UserError(f"kernels={kernels!r} is unknown; use one of {', '.join(NAMES)}")


def linear(weight: Weight, bias: Tensor | None, kernel: Kernel) -> Linear:
    """The layer y = x Wᵀ + b on the chosen kernels; `bias` is for float weights (packed ones carry theirs)."""
    return kernel.backend.linear(weight, bias, kernel)


def join(weights: Weights, biases: Biases, sizes: Sequence[int], kernel: Kernel) -> Joined:
    """Layers of one input as one, where they can be: all float, or packed with one scheme and input order.

    `sizes` are the outputs to split into; a layer fused on disk is one weight with several sizes.
    """
    return kernel.backend.join(weights, biases, sizes, kernel)


def _reference_linear(weight: Weight, bias: Tensor | None, kernel: Kernel) -> Linear:
    return float_linear(weight, bias) if isinstance(weight, Tensor) else packed_linear(weight)


def _plain_linear(weight: Weight, bias: Tensor | None, kernel: Kernel) -> Linear:
    if isinstance(weight, PackedWeight):
        if not KINDS[weight.scheme.kind].is_float:
            return packed_linear(weight)
        return tiled_linear(dequantize(weight), weight.bias)
    return tiled_linear(weight, bias)


def _torch_join(weights: Weights, biases: Biases, sizes: Sequence[int], kernel: Kernel) -> Joined:
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    plain = all(w.perm is None and w.offset is None and w.input_scale is None for w in packed)
    alike = len(packed) == len(weights) and plain and len({w.scheme for w in packed}) == 1
    if len(weights) == 1 or not packed or alike:
        return Joined((linear(*_merged(weights, biases), kernel),), tuple(sizes))
    return Joined(tuple(linear(w, b, kernel) for w, b in zip(weights, biases, strict=True)), tuple(sizes))


def _bitsandbytes_linear(weight: Weight, bias: Tensor | None, kernel: Kernel) -> Linear:
    from runtime.kernels.libraries import bitsandbytes_linear

    made = bitsandbytes_linear(weight) if isinstance(weight, PackedWeight) else None
    return _plain_linear(weight, bias, kernel) if made is None else made


def _native_linear(weight: Weight, bias: Tensor | None, kernel: Kernel) -> Linear:
    from runtime.kernels.native_linear import NativeLinear, native_weight
    from runtime.native.binding import pool

    threads = pool(kernel.threads)
    return NativeLinear(native_weight(weight, bias, threads), kernel.name, threads)


def _native_join(weights: Weights, biases: Biases, sizes: Sequence[int], kernel: Kernel) -> Joined:
    # The native decoder multiplies by all parts in one call, so nothing is copied together here: orders become what the
    # kernels take, so that they make no copies of their own.
    ready = [w if isinstance(w, Tensor) or w.perm is None else replace(w, perm=w.perm.to(torch.int32)) for w in weights]
    parts = zip(share_inputs(ready), biases, strict=True)
    return Joined(tuple(linear(w, b, kernel) for w, b in parts), tuple(sizes))


def _triton_linear(weight: Weight, bias: Tensor | None, kernel: Kernel) -> Linear:
    from runtime.kernels.triton.linear import triton_linear
    from runtime.kernels.triton.weights import gpu_weight
    from runtime.kernels.triton.with_libraries import mixed_linear

    own = triton_linear(gpu_weight(weight, bias, _device(weight)))
    return mixed_linear(own, weight, bias, kernel.table, kernel.exact)


def _triton_join(weights: Weights, biases: Biases, sizes: Sequence[int], kernel: Kernel) -> Joined:
    from runtime.kernels.triton.linear import TritonJoined, TritonLinear, triton_linear
    from runtime.kernels.triton.weights import concatenate, gpu_weight
    from runtime.kernels.triton.with_libraries import mixed_linear

    made = share_inputs([gpu_weight(w, b, _device(w)) for w, b in zip(weights, biases, strict=True)])
    whole = concatenate(made)
    if whole is not None:
        # What Triton's kernels take as one weight is one for everybody; only a library needs it as it was.
        made, pairs = [whole], [_merged(weights, biases) if kernel.table else (weights[0], None)]
    else:
        pairs = list(zip(weights, biases, strict=True))
    layers = tuple(
        mixed_linear(triton_linear(own), w, b, kernel.table, kernel.exact)
        for own, (w, b) in zip(made, pairs, strict=True)
    )
    joined = TritonJoined if all(isinstance(layer, TritonLinear) for layer in layers) else Joined
    return joined(layers, tuple(sizes))


BACKENDS = {
    "native": Backend(_native_linear, _native_join, "runtime.model.native:NativeDecoder", repacks=True),
    "triton": Backend(
        _triton_linear,
        _triton_join,
        "runtime.model.triton.decoder:TritonDecoder",
        stack="runtime.model.triton.experts:stacked",
        stack_heads="runtime.model.triton.latent:stacked",
    ),
    "reference": Backend(_reference_linear, _torch_join, "runtime.model.reference:LlamaDecoder"),
    "plain-torch": Backend(_plain_linear, _torch_join, "runtime.model.reference:PlainTorchDecoder"),
    "bitsandbytes": Backend(
        _bitsandbytes_linear, _torch_join, "runtime.model.reference:PlainTorchDecoder", has_planes=False
    ),
}


def _merged(weights: Weights, biases: Biases) -> tuple[Weight, Tensor | None]:
    """The rows of weights that read their inputs alike as one weight, and the bias of float ones."""
    if len(weights) == 1:
        return weights[0], biases[0]
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    if not packed:
        return torch.cat([w for w in weights if isinstance(w, Tensor)]), _join_biases(biases, weights)
    offsets = [w.offset for w in packed if w.offset is not None]
    merged = replace(
        packed[0],
        codes=torch.cat([w.codes for w in packed]),
        scale=torch.cat([w.scale for w in packed]),
        offset=torch.cat(offsets) if offsets else None,
        bias=_join_biases([w.bias for w in packed], weights),
        planes=all(w.planes for w in packed),
        tiles=None,
    )
    return merged, None


def _join_biases(biases: Biases, weights: Weights) -> Tensor | None:
    if all(b is None for b in biases):
        return None
    each = zip(biases, weights, strict=True)
    return torch.cat([torch.zeros(w.shape[0], device=_device(w)) if b is None else b.float() for b, w in each])


def _device(weight: Weight) -> torch.device:
    return weight.device if isinstance(weight, Tensor) else weight.codes.device


def _capability(device: str, triton: Kernel) -> Capability | None:
    return torch.cuda.get_device_capability(device) if triton.usable and device.startswith("cuda") else None
