"""What a stage of a recipe is to a block."""

from collections.abc import Mapping
from typing import Protocol

from calib.moments import Wants
from compress.calibration.activations import Inputs
from compress.model.block import Block, Statistics


class BlockStage(Protocol):
    """One stage of a recipe, block after block."""

    def wants(self, block: Block) -> Mapping[str, Wants]:
        """What it needs to know of the inputs of which linear layers, by path. Empty: nothing, it looks at no text."""

    def apply(self, block: Block, statistics: Statistics, inputs: Inputs | None) -> None:
        """Changes the block, and the statistics with it where it changes what goes into a layer.

        statistics  of every layer that a stage of the recipe wanted, taken before the first stage; layers that read the
                    same input share one. Those that a layer's last stage no longer needs may be deleted.
        inputs      what goes into the block; None where no stage wanted anything.
        """
