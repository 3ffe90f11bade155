"""Where transformers puts the tensors of a checkpoint: it renames many, and makes some parameters of several tensors.

Which tensors, it says itself: the same conversions are asked here with which it loads a model.
"""

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from runtime.errors import fault_of

_NUMBER = re.compile(r"\.(\d+)(?=\.)")
# Parameters of fused experts, and the layers of each expert that they are made of, in order (experts.py).
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs.

    name     the parameter or buffer that it is, or is a part of; the tensor's own name where the model has none.
    is_part  whether several tensors make the parameter, or one makes several.
    expert   the linear layer of one expert that it is the weight of, as experts.py has it apart; None for any other.
    """

    name: str
    is_part: bool
    expert: str | None


class Names:
    """A model's conversions, and the names that were asked for."""

    def __init__(self, model: Any) -> None:
        """model: of transformers, on any device."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        conversions = get_model_conversion_mapping(model)
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._model = model
        self._prefix = str(model.base_model_prefix)
        self._known = model.state_dict()
        self._places: dict[str, Place] = {}

    def place(self, tensor: str) -> Place:
        """Where the loader would put a tensor of a checkpoint, by its name there."""
        if tensor not in self._places:
            self._places[tensor] = self._find(tensor)
        return self._places[tensor]

    def survives(self, tensor: str, suffixes: Collection[str]) -> bool:
        """Whether the tensors that a packed weight becomes go where the weight itself goes.

        suffixes  theirs, in place of "weight". Some conversions know a layer by its plain weight alone.
        """
        place, prefix = self.place(tensor), tensor.removesuffix("weight")
        module = place.name.removesuffix("weight")
        return all(self._renamed(prefix + suffix)[0] == module + suffix for suffix in suffixes)

    def make(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters that transformers makes of tensors that are parts of them, by name.

        tensors  by their names in the checkpoint; all parts of a parameter. Raises UserError where they do not fit.
        """
        found: dict[str, Any] = {}
        for tensor in sorted(tensors):
            name, pattern = self._renamed(tensor)
            if pattern is None:
                raise ValueError(f"{tensor} is a parameter by itself")
            converter = next(c for c in self._converters if pattern in c.source_patterns)
            found.setdefault(name, copy.deepcopy(converter)).add_tensor(name, tensor, pattern, tensors[tensor])
        out: dict[str, Tensor] = {}
        for name, converter in found.items():
            with fault_of(f"tensor {name}", "transformers cannot make it of the checkpoint's tensors"):
                made = converter.convert(name, model=self._model, config=self._model.config)
            out |= {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        return out

    def _find(self, tensor: str) -> Place:
        name, pattern = self._renamed(tensor)
        if pattern is None:
            return Place(name, False, None)
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        number = _NUMBER.findall(tensor)
        owner, _, leaf = name.rpartition(".")
        merges = any(type(operation).__name__ == "MergeModulelist" for operation in converter.operations)
        parts = _FUSED.get(leaf, ())
        if not merges or not number or len(parts) != len(converter.source_patterns):
            return Place(name, True, None)
        return Place(name, True, f"{owner}.{number[-1]}.{parts[converter.source_patterns.index(pattern)]}")

    def _renamed(self, tensor: str) -> tuple[str, str | None]:
        """The name of a tensor in the model, and the conversion's pattern where it is a part."""
        from transformers.core_model_loading import rename_source_key

        found: tuple[str, str | None] = rename_source_key(
            tensor, self._renamings, self._converters, self._prefix, self._known
        )
        if found[0] not in self._known and tensor in self._known:
            return tensor, None
        return found
