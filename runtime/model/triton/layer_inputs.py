"""The inputs that each layer has for itself (Gemma 3n, Gemma 4), on the device."""

from torch import Tensor

from runtime.checkpoints.record import Architecture
from runtime.kernels.triton.elementwise import embed, rms_norm
from runtime.model.layers import Parts


def layer_inputs(parts: Parts, a: Architecture, token: Tensor, x: Tensor) -> Tensor | None:
    """Each block's own input, (T, layers, size) float32, of tokens (T,) int32 and their embedding x (T, hidden).

    None where the model has none.
    """
    own = parts.layer_inputs
    if own is None:
        return None
    made = (own.projection(x) * a.hidden**-0.5).view(-1, a.layer_input)
    made = rms_norm(made, own.norm.weight, a.norm_eps)
    rows = embed(token, own.table, a.layer_input**0.5).view(made.shape)
    return ((made + rows) * 2**-0.5).view(len(x), a.layers, a.layer_input)
