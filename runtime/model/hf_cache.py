"""transformers' caches as they have to be rolled back: far enough, and exactly, or not at all.

Layers of a sliding window and convolutions keep more than they read, so that what a draft added can be taken out
again. States of a recurrence hold all of the text in one: they never come back. Nor do layers of a model's own class
that add something to transformers' and do not say how it is taken out, as DeepSeek-V4's compressed keys.
"""

from dataclasses import dataclass
from typing import Any

from runtime.errors import UserError

# Tokens beyond what a layer reads that it keeps; twice as many before it lets go of the older ones.
_KEPT = 256
_OWN = "transformers.cache_utils"


@dataclass
class State:
    """A request's cache (where the model takes none, its tokens), and how many: recurrent states cannot count them."""

    cache: Any
    tokens: int = 0


def begin(cache: Any) -> Any:
    """A new cache whose windows keep what they will have to give back."""
    for layer in cache.layers:
        if _is_window(layer):
            layer.activate_past_recording()
    return cache


def settle(cache: Any) -> None:
    """After a forward: lets go of what no draft will take back, and has convolutions keep their past from now on."""
    for layer in getattr(cache, "layers", ()):
        if _is_window(layer) and layer.is_initialized:
            reads = layer.sliding_window - 1
            if layer.keys.shape[-2] > reads + 2 * _KEPT:
                layer.keys = layer.keys[..., -(reads + _KEPT) :, :].clone()
                layer.values = layer.values[..., -(reads + _KEPT) :, :].clone()
        if _is_convolution(layer):
            layer.activate_past_recording()
            for number, held in layer.conv_states.items():
                reads = layer.conv_kernel_size[number]
                if held is not None and held.shape[-1] > reads + 2 * _KEPT:
                    layer.conv_states[number] = held[..., -(reads + _KEPT) :].clone()


def crop(cache: Any, remove: int, model: str) -> None:
    """Takes the last `remove` tokens out. Raises UserError, naming the model, where that cannot be."""
    why = f"the cache of {model} cannot be rolled back"
    if not getattr(cache, "is_croppable", True):
        raise UserError(f"{why}: it holds a state of the whole text and no part of it can be taken out")
    try:
        for layer in cache.layers:
            if not _says_how(layer):
                raise UserError(f"{why}: its {type(layer).__name__} does not say how what it adds is taken out")
            if _is_window(layer):
                _crop_window(layer, remove, why)
            elif _is_convolution(layer):
                _crop_convolution(layer, remove, why)
            else:
                layer.crop(-remove)
    except (NotImplementedError, AttributeError, ValueError, RuntimeError) as error:
        raise UserError(f"{why}: {error}") from error


def _crop_window(layer: Any, remove: int, why: str) -> None:
    if not layer.is_initialized:
        return
    left = layer.cumulative_length - remove
    if layer.keys.shape[-2] - remove < min(left, layer.sliding_window - 1):
        raise UserError(f"{why} by {remove} tokens: its window has let go of what came before them")
    layer.keys, layer.values = layer.keys[..., :-remove, :], layer.values[..., :-remove, :]
    layer.cumulative_length = left


def _crop_convolution(layer: Any, remove: int, why: str) -> None:
    for number, held in layer.conv_states.items():
        if held is None:
            continue
        if held.shape[-1] - remove < layer.conv_kernel_size[number]:
            raise UserError(f"{why} by {remove} tokens: its convolution has let go of what came before them")
        layer.conv_states[number] = held[..., :-remove]


def _says_how(layer: Any) -> bool:
    """Whether its class is transformers' own, or takes tokens out itself."""
    first = next((one for one in type(layer).__mro__ if one.__module__ == _OWN or "crop" in vars(one)), None)
    return first is not None and (first is type(layer) or first.__module__ != _OWN)


def _is_window(layer: Any) -> bool:
    """Whether it is a layer of keys and values of a sliding window, and nothing besides."""
    return hasattr(layer, "cumulative_length") and hasattr(layer, "record_past") and not hasattr(layer, "conv_states")


def _is_convolution(layer: Any) -> bool:
    """Whether it is a layer that holds inputs of a convolution alone, which a first forward has shown."""
    return (
        hasattr(layer, "conv_states")
        and not hasattr(layer, "keys")
        and any(layer.is_conv_states_initialized.values())
        and not any(layer.is_recurrent_states_initialized.values())
    )
