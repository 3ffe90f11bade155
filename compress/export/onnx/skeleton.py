"""A model with its buffers and without its weights, for the tracer: parameters have shapes and no memory."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.errors import UserError
from compress.skeleton import make_buffers

# Attention that a growing pair of keys and values is the whole state of.
_ATTENTION = {"full_attention", "sliding_attention"}


def empty_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model that `folder`/config.json describes, its parameters fake tensors of `dtype` on the CPU.

    Raises UserError for layers whose state is more than keys and values.
    """
    from torch._subclasses import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds <= _ATTENTION:
        raise UserError(
            f"{folder.name}/config.json: expected layers whose state is keys and values, found"
            f" {', '.join(sorted(kinds - _ATTENTION))}: export this model to another form"
        )
    # Of transformers' ways through a mixture the one with no loop over experts and no shape that depends on the text.
    options = {"experts_implementation": "batched_mm"} if _has_experts(config) else {}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype, **options).eval()
    for module in model.modules():
        make_buffers(model, module)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                with fake:
                    blank = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    made[id(parameter)] = nn.Parameter(blank, requires_grad=False)
            module._parameters[name] = made[id(parameter)]
    return model


def _has_experts(config: Any) -> bool:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return any(isinstance(getattr(config, name, None), int) for name in names)
