"""The original's weights by the names of the checked model's, which may have taken experts apart or renamed them."""

import re
from collections.abc import Mapping

from torch import Tensor

from compress.check.layers import by_weight, read, whole
from compress.check.opening import Opened
from runtime.errors import UserError

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_PREFIXES = ("model.", "language_model.", "model.language_model.", "transformer.", "base_model.model.")
# Mixtral's old names of an expert's layers.
_OLD = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
# Multi-token prediction, EAGLE and Medusa.
DRAFT = re.compile(r"(^|[._])(mtp|nextn|eagle\d?|medusa)(_\w+)?[.\d]", re.IGNORECASE)
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


class Originals:
    """Weights of the original."""

    def __init__(self, opened: Opened):
        self.opened = opened
        self.names: Mapping[str, tuple[str, ...]] = by_weight(opened.tensors)
        self.embedding = find_embedding(self.names)

    def has(self, name: str) -> bool:
        """Whether it has a weight of this name, or one that stands for it."""
        return self._place(name) is not None

    def get(self, name: str) -> Tensor | None:
        """The weight, plain; None where it has none of this name, or none that can be read."""
        found = self._place(name)
        if found is None:
            return None
        held, expert, part = found
        try:
            weight = whole(read(self.opened, held)) if len(self.names[held]) > 1 else self._plain(held)
        except UserError:
            return None
        if expert is None:
            return weight
        if weight.ndim != 3 or expert >= weight.shape[0]:
            return None
        one = weight[expert]
        if part == "down_proj":
            return one
        half = one.shape[0] // 2
        return one[:half] if part == "gate_proj" else one[half:]

    def _plain(self, name: str) -> Tensor:
        weight = read(self.opened, name)
        return weight if isinstance(weight, Tensor) else whole(weight)

    def _place(self, name: str) -> tuple[str, int | None, str] | None:
        if (direct := self._renamed(name)) is not None:
            return direct, None, ""
        match = _EXPERT.fullmatch(name)
        if match:
            old = self._renamed(f"{match[1]}.{match[2]}.{_OLD[match[3]]}.weight")
            if old is not None:
                return old, None, ""
            fused = "down_proj" if match[3] == "down_proj" else "gate_up_proj"
            if (held := self._renamed(f"{match[1]}.{fused}")) is not None:
                return held, int(match[2]), match[3]
        if name in HEADS and self.embedding is not None:
            return self.embedding, None, ""
        return None

    def _renamed(self, name: str) -> str | None:
        if name in self.names:
            return name
        for prefix in _PREFIXES:
            if prefix + name in self.names:
                return prefix + name
            if name.startswith(prefix) and name.removeprefix(prefix) in self.names:
                return name.removeprefix(prefix)
        return None


def find_embedding(names: Mapping[str, object]) -> str | None:
    """The table of token embeddings among a checkpoint's weights."""
    return next((name for ending in _EMBEDDINGS for name in names if f".{name}".endswith(f".{ending}")), None)
