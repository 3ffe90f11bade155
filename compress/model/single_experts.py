"""Experts that transformers loads as single layers beside quantised ones, though the checkpoint holds them fused.

So it is with Llama 4: gate_up_proj (E, H, 2I) and down_proj (E, I, H). Here such a checkpoint is read as if each
expert's layers were tensors of their own, and the model is built as the quantised loaders build it.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from runtime.checkpoints.safetensors import Entry, Shards

_FUSED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")
_SINGLE = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def loaded_apart(model: nn.Module) -> dict[str, Any]:
    """By path, the class that quantised loaders put in the place of a module of fused experts."""
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

    table = {name: found["module_name"] for name, found in MODULES_TO_PATCH_FOR_QUANTIZATION.items()}
    return {path: table[type(m).__name__] for path, m in model.named_modules() if type(m).__name__ in table}


def take_apart(model: Any) -> None:
    """Replaces those modules, on the device that is torch's default meanwhile."""
    for path, kind in loaded_apart(model).items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, kind(model.config.get_text_config()))


class SingleExperts(Shards):
    """A checkpoint's tensors, fused experts among them as single layers (N, K)."""

    def __init__(self, shards: Shards):
        self.directory, self.files, self._fused = shards.directory, shards.files, shards
        self._entries: dict[str, Entry] = {}
        for name in shards:
            entry, match = shards.entry(name), _FUSED.match(name)
            if match is None or len(entry.shape) != 3:
                self._entries[name] = entry
                continue
            count, inputs, outputs = entry.shape
            kinds = ("down",) if match[2] == "down_proj" else ("gate", "up")
            for kind in kinds:
                shape = (outputs // len(kinds), inputs)
                for number in range(count):
                    self._entries[f"{match[1]}.{number}.{kind}_proj.weight"] = Entry(entry.file, entry.dtype, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        match = _SINGLE.match(name)
        if match is None or name in self._fused:
            return self._fused[name]
        entry, kind = self.entry(name), match[3]
        fused = f"{match[1]}.{'down_proj' if kind == 'down' else 'gate_up_proj'}"
        with safe_open(entry.file, framework="pt") as file:
            # Of this expert alone: a layer's experts together may be larger than all else of a block.
            weight: Tensor = file.get_slice(fused)[int(match[2])]
        rows = entry.shape[0]
        part = {"gate": weight[:, :rows], "up": weight[:, rows:], "down": weight}[kind]
        return part.T.contiguous()
