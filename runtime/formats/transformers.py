"""transformers loads models in our own formats once this module is imported: it registers their `quant_method`s there.

    import runtime.formats.transformers
    model = AutoModelForCausalLM.from_pretrained("runs/trellis-3/model")

A trellis' sequences of bits and ternary-1.25's patterns stay as they are and are decoded whenever a layer is called:
small in memory, and slow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from runtime.formats import three_of_four
from runtime.formats.trellis import METHOD, STATES, TILE, check, decode


def _replace(model: PreTrainedModel, key: str, name: str, made: Callable[[nn.Linear], nn.Module]) -> None:
    """Puts `made` of the layer `name` in its place. Raises ValueError for a `key` that names no linear one."""
    try:
        linear = model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"quantization_config.{key} names {name}, which {type(model).__name__} lacks") from error
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"quantization_config.{key} names {name}, which is no nn.Linear but {type(linear).__name__}")
    model.set_submodule(name, made(linear))


@register_quantization_config(METHOD)
class TrellisConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a trellis model; the arguments are its keys. Raises UserError as `check` does."""

    def __init__(
        self,
        bits: dict[str, int] | None = None,
        version: int = 1,
        modules_to_not_convert: list[str] | None = None,
        **kwargs: Any,
    ):
        check({"bits": bits, "version": version})
        self.quant_method = METHOD
        self.bits, self.version = bits or {}, version
        self.modules_to_not_convert = modules_to_not_convert or []


class TrellisLinear(nn.Module):
    """y = x Wᵀ + b; its buffers are the file's tensors."""

    weight_tiles: Tensor
    weight_levels: Tensor
    weight_scale: Tensor

    def __init__(self, linear: nn.Linear, bits: int):
        super().__init__()
        (n, k), where = linear.weight.shape, linear.weight.device
        sequences = torch.empty(-(-n // TILE), -(-k // TILE), 32 * bits, dtype=torch.uint8, device=where)
        self.bits, self.out_features, self.in_features = bits, n, k
        self.register_buffer("weight_tiles", sequences)
        self.register_buffer("weight_levels", torch.empty(STATES // 2, dtype=torch.int8, device=where))
        self.register_buffer("weight_scale", torch.empty(n, 1, dtype=linear.weight.dtype, device=where))
        self.register_buffer("weight_shape", torch.empty(2, dtype=torch.int64, device=where))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """(N, K) in the type of the scales."""
        codes = decode(self.weight_tiles, self.weight_levels, self.bits, (self.out_features, self.in_features))
        return (codes.float() * self.weight_scale.float()).to(self.weight_scale.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


@register_quantizer(METHOD)
class TrellisQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts `TrellisLinear` where the configuration says that a layer has sequences."""

    requires_calibration = True
    quantization_config: TrellisConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for name, bits in self.quantization_config.bits.items():
            _replace(model, "bits", name, partial(TrellisLinear, bits=bits))

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


@register_quantization_config(three_of_four.METHOD)
class TernaryConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a ternary-1.25 model; the arguments are its keys. Raises UserError as `check` does."""

    def __init__(
        self,
        layers: list[str] | None = None,
        version: int = 1,
        modules_to_not_convert: list[str] | None = None,
        **kwargs: Any,
    ):
        three_of_four.check({"layers": layers, "version": version})
        self.quant_method = three_of_four.METHOD
        self.layers, self.version = layers or [], version
        self.modules_to_not_convert = modules_to_not_convert or []


class TernaryLinear(nn.Module):
    """y = x Wᵀ + b; its buffers are the file's tensors."""

    weight_patterns: Tensor
    weight_scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        (n, k), where = linear.weight.shape, linear.weight.device
        self.out_features, self.in_features = n, k
        patterns = torch.empty(n, three_of_four.row_bytes(k), dtype=torch.uint8, device=where)
        self.register_buffer("weight_patterns", patterns)
        self.register_buffer("weight_scale", torch.empty(n, 1, dtype=linear.weight.dtype, device=where))
        self.register_buffer("weight_shape", torch.empty(2, dtype=torch.int64, device=where))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """(N, K) in the type of the scales."""
        patterns = three_of_four.unpack_patterns(self.weight_patterns, self.in_features)
        return three_of_four.decode(patterns, self.in_features) * self.weight_scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


@register_quantizer(three_of_four.METHOD)
class TernaryQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts `TernaryLinear` where the configuration says that a layer has patterns."""

    requires_calibration = True
    quantization_config: TernaryConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for name in self.quantization_config.layers:
            _replace(model, "layers", name, TernaryLinear)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False
