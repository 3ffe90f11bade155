"""A model with fewer blocks: those that stay move up, and all that speaks of blocks by number moves with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from compress.model.plan import Plan
from compress.prune import depth
from compress.records import LayerRecord


@dataclass(frozen=True)
class Shortening:
    """Blocks that go, by number; `blocks_at` is the module that holds the blocks. Without any, nothing changes."""

    dropped: frozenset[int]
    blocks_at: str

    def renamed(
        self, tensors: dict[str, Tensor], records: Sequence[LayerRecord]
    ) -> tuple[dict[str, Tensor], list[LayerRecord]]:
        """A block's tensors and records by their new names."""
        names = self._names([*tensors, *(record.name for record in records)])
        return (
            {names[name]: tensor for name, tensor in tensors.items()},
            [replace(record, name=names[record.name]) for record in records],
        )

    def plan(self, plan: Plan) -> Plan:
        """The plan of what stays. Layers keep the names of the tensors that they are read from."""
        tensors = [*plan.layers, *(name for name, _ in plan.left), *(name for _, names in plan.parts for name in names)]
        names = self._names([*tensors, *plan.skipped, *(layer.module for layer in plan.layers.values())])
        return Plan(
            layers={
                name: replace(layer, module=names[layer.module]) for name, layer in plan.layers.items() if name in names
            },
            left=tuple((names[name], why) for name, why in plan.left if name in names),
            skipped=tuple(names[name] for name in plan.skipped if name in names),
            parts=tuple((part, kept) for part, kept in plan.parts if kept[0] in names),
        )

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What config.json has to say otherwise."""
        if not self.dropped:
            return {}
        short = depth.shorten_config(dict(config), self.dropped)
        return {key: value for key, value in short.items() if key not in config or config[key] != value}

    def names(self, names: Sequence[str]) -> list[str]:
        """New names of tensors or modules of blocks that stay."""
        return list(self._names(names).values())

    def _names(self, names: Sequence[str]) -> dict[str, str]:
        return depth.renumber(names, self.blocks_at, self.dropped)
