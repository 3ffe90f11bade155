"""transformers: `generate` on a quantised checkpoint, with the kernels of the library that wrote it; nothing drafts.

In the environment of that library. GPTQModel is imported for its kernels, and refuses two cores unless it is told a
number of workers.
"""

import os
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from workers.generation import Options, serve


class Packed:
    """The checkpoint as transformers loads it by default, in the float type that its config names."""

    def __init__(self, options: Options):
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "4")
        transformers.logging.set_verbosity_error()
        self.model = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto", device_map="cpu").eval()
        # Libraries set it as they are imported.
        torch.set_num_threads(options.threads)
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def describe(self) -> dict[str, str]:
        """Versions, precision and the class of the layers that run."""
        layer: Any = self.model.model.layers[0].mlp.down_proj
        return {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "precision": str(self.model.dtype).removeprefix("torch."),
            "layers": f"{type(layer).__module__}.{type(layer).__name__}",
            "threads": str(torch.get_num_threads()),
        }

    @torch.inference_mode()
    def generate(self, prompt: list[int], new_tokens: int, draft_length: int | None) -> list[int]:
        """Greedy, with the library's dynamic cache."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens
        )
        return out[0, len(prompt) :].tolist()


if __name__ == "__main__":
    serve(Packed)
