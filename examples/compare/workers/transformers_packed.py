"""transformers: `generate` on a quantised checkpoint, with the kernels of the library that wrote it; nothing drafts.

In the environment of that library. GPTQModel is imported for its kernels, and refuses two cores unless it is told a
number of workers.
"""

import os
from typing import Any, ClassVar

import torch

from workers.generation import Options, serve
from workers.transformers_generate import Transformers


class Packed(Transformers):
    """The checkpoint as transformers loads it by default, in the float type that its config names."""

    loading: ClassVar[dict[str, Any]] = {"dtype": "auto", "device_map": "cpu"}

    def __init__(self, options: Options):
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "4")
        super().__init__(options)
        # Libraries set it as they are imported.
        torch.set_num_threads(options.threads)

    def describe(self) -> dict[str, str]:
        """Versions, precision and the class of the layers that run."""
        layer: Any = self.model.model.layers[0].mlp.down_proj
        return super().describe() | {"layers": f"{type(layer).__module__}.{type(layer).__name__}"}


if __name__ == "__main__":
    serve(Packed)
