"""From a checkpoint to the inputs that each layer has for itself, and what a block does with its own."""

from runtime.checkpoints.record import Architecture
from runtime.model.layers import LayerGate, LayerInputs
from runtime.model.tensor_reader import TensorReader


def layer_inputs(reader: TensorReader, a: Architecture) -> LayerInputs | None:
    """The table and the layer that the inputs of all blocks come from; None where the model has none.

    The table is read row by row and stays in its file's pages: it may be larger than all else, and of it a text reads
    only the rows of its tokens.
    """
    if not a.layer_input:
        return None
    names, whole = a.names, a.layers * a.layer_input
    norm = reader.norm(names.layer_norm, a.layer_input)
    assert norm is not None
    return LayerInputs(
        table=reader.table(f"{names.layer_table}.weight", (a.vocab, whole)),
        projection=reader.linear(names.layer_projection, (whole, a.hidden)),
        norm=norm,
    )


def layer_gate(reader: TensorReader, a: Architecture, prefix: str) -> LayerGate:
    """What the block `prefix` does with its own input."""
    names, size = a.names, a.layer_input
    norm = reader.norm(f"{prefix}.{names.layer_out_norm}")
    assert norm is not None
    return LayerGate(
        gate=reader.linear(f"{prefix}.{names.layer_gate}", (size, a.hidden)),
        out=reader.linear(f"{prefix}.{names.layer_out}", (a.hidden, size)),
        norm=norm,
    )
