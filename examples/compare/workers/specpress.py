"""Specpress: the decoder and the cache that `runtime.load` gives."""

import json
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray

from runtime import load
from runtime.contract import Rows
from workers.protocol import Description, Options, Tokens, serve


class Specpress:
    """An artifact's `model/` directory."""

    def __init__(self, options: Options):
        self.path, self.kernels = options.model, options.kernels
        self.decoder = load(options.model, threads=options.threads, kernels=options.kernels).decoder
        self.cache = self.decoder.new_cache()
        self.capacity = max(options.prefill, options.context + 64)
        self.request = self.cache.open(self.capacity)
        self.held: list[int] = []

    def describe(self) -> Description:
        """The file's tensors without the embedding table, of which a forward reads a few rows."""
        sizes: dict[str, int] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            header.pop("__metadata__", None)
            sizes |= {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}
        if any(name.startswith("lm_head.") for name in sizes):
            sizes.pop("model.embed_tokens.weight")
        facts = {"version": f"specpress {version('specpress')}", "decoder": type(self.decoder).__name__}
        facts["kernels"] = self.kernels
        return Description(sum(sizes.values()), facts)

    def restore(self, context: Tokens, width: int) -> None:
        """Truncates to the context."""
        if self.held[: len(context)] != context.tolist():
            self.clear()
            self.forward(context, len(context) - 1)
        self.cache.truncate(self.request, len(context))
        del self.held[len(context) :]

    def clear(self) -> None:
        """Truncates to nothing."""
        self.cache.truncate(self.request, 0)
        self.held.clear()

    def forward(self, tokens: Tokens, logits_from: int) -> NDArray[np.floating]:
        """One forward of a chain."""
        logits_at = torch.arange(logits_from, len(tokens)) if logits_from else None
        rows = Rows.chains([(self.request, len(self.held), len(tokens))])
        logits = self.decoder.forward(torch.from_numpy(tokens), rows, self.cache, logits_at).logits
        self.held += tokens.tolist()
        return logits.numpy()


if __name__ == "__main__":
    serve(Specpress)
