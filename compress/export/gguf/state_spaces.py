"""What a GGUF file says of state spaces (Mamba-2)."""

from typing import Any

from runtime.checkpoints.architecture import Architecture
from runtime.checkpoints.gguf.state_spaces import LEAST_STEP
from runtime.checkpoints.mixers import Mamba


def state_space(a: Architecture, how: Mamba) -> dict[str, Any]:
    """The keys of a model's state spaces."""
    out: dict[str, Any] = {
        "ssm.conv_kernel": how.taps,
        "ssm.inner_size": how.values,
        "ssm.state_size": how.state,
        "ssm.time_step_rank": how.heads,
        "ssm.group_count": how.groups,
    }
    if a.model_type == "granitemoehybrid":
        # llama.cpp's switch of rotation.
        out["rope.scaling.finetuned"] = None not in a.rotations
    if a.model_type == "nemotron_h":
        # llama.cpp wants it, and norms by the other.
        out["attention.layer_norm_epsilon"] = float(a.norm_eps)
        if how.limits[0]:
            out[LEAST_STEP] = float(how.limits[0])
    return out
