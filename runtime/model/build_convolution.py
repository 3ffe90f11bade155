"""From a checkpoint to what a block has in attention's place: a short convolution."""

from runtime.checkpoints.record import Architecture
from runtime.model.layers import ShortConvolution
from runtime.model.tensor_reader import TensorReader


def short_convolution(reader: TensorReader, a: Architecture, prefix: str) -> ShortConvolution:
    """The convolution of the block `prefix`, of as many channels as the model is wide."""
    how, channels = a.convolution, a.hidden
    assert how is not None
    filtered = f"{prefix}.{how.filter}"
    weight = reader.table(f"{filtered}.weight", (channels, 1, how.taps)).float()
    return ShortConvolution(
        qkv=reader.join([f"{prefix}.{how.into}"], [channels] * 3, channels),
        out=reader.linear(f"{prefix}.{how.out}", (channels, channels)),
        taps=weight.view(channels, how.taps).t().contiguous(),
        bias=reader.bias(filtered, channels),
    )
