"""bitsandbytes NF4 through transformers: an eager forward with its dynamic cache."""

from collections import Counter
from importlib.metadata import version

import numpy as np
import torch
from bitsandbytes.nn import Params4bit
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from workers.protocol import Description, Options, Tokens, serve


class BitsAndBytes:
    """A saved 4-bit checkpoint; everything beside the packed layers is bfloat16."""

    def __init__(self, options: Options):
        torch.set_num_threads(options.threads)
        self.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        self.weight_bytes = _weight_bytes(self.model)
        self.clear()

    def describe(self) -> Description:
        """Counted before the first forward, which lays the layers out anew."""
        kinds = Counter(
            type(module).__name__ if isinstance(module.weight, Params4bit) else str(module.weight.dtype)
            for module in self.model.modules()
            if isinstance(module, torch.nn.Linear)
        )
        facts = {
            "version": f"bitsandbytes {version('bitsandbytes')}, transformers {version('transformers')},"
            f" torch {torch.__version__}",
            "threads": str(torch.get_num_threads()),
            "matrices": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        }
        return Description(self.weight_bytes, facts)

    def restore(self, context: Tokens, width: int) -> None:
        """Crops the cache; a negative count is what transformers drops."""
        if self.held[: len(context)] != context.tolist():
            self.clear()
            self.forward(context, len(context) - 1)
        if surplus := len(self.held) - len(context):
            self.cache.crop(-surplus)
            del self.held[len(context) :]

    def clear(self) -> None:
        """A new cache."""
        self.cache = DynamicCache()
        self.held: list[int] = []

    @torch.inference_mode()
    def forward(self, tokens: Tokens, logits_from: int) -> NDArray[np.floating]:
        """One forward of the model."""
        keep = len(tokens) - logits_from
        out = self.model(
            input_ids=torch.from_numpy(tokens)[None], past_key_values=self.cache, use_cache=True, logits_to_keep=keep
        )
        self.held += tokens.tolist()
        return out.logits[0].float().numpy()


def _weight_bytes(model: PreTrainedModel) -> int:
    """Parameters and block scales without the embedding table, unless the head shares it."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    total = 0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name and not tied:
            continue
        total += parameter.numel() * parameter.element_size()
        if isinstance(parameter, Params4bit):
            absmax = parameter.quant_state.absmax
            total += absmax.numel() * absmax.element_size()
    return total


if __name__ == "__main__":
    serve(BitsAndBytes)
