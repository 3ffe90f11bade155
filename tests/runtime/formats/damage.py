"""What can be wrong with a layer's tensors, for tests of what readers say of it."""

from collections.abc import Callable

from torch import Tensor

Damage = Callable[[dict[str, Tensor]], None]


def without(name: str) -> Damage:
    """A tensor is missing."""
    return lambda tensors: tensors.__delitem__(name)


def changed(name: str, value: Callable[[Tensor], Tensor]) -> Damage:
    """A tensor is another one."""
    return lambda tensors: tensors.update({name: value(tensors[name])})
