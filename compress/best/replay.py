"""A model's forwards over again from a block on: what the blocks before it put out is kept."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.logits import kl_rows, log_probabilities

# Rows of logits that are compared in float64 at a time.
_ROWS = 256


@dataclass(frozen=True)
class Output:
    """What a block puts out, and by argument what it leaves for later ones (Gemma 4: keys and values)."""

    out: Any
    left: Mapping[str, Mapping[Any, Any]]


def recorded(model: Any, blocks: Sequence[nn.Module], tokens: Tensor) -> tuple[list[Output], Tensor]:
    """Every block's output, and the logits (rows, vocabulary)."""
    outputs: list[Output] = []

    def seen(block: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        left = {name: dict(value) for name, value in named.items() if isinstance(value, MutableMapping)}
        outputs.append(Output(out, left))

    hooks = [block.register_forward_hook(seen, with_kwargs=True) for block in blocks]
    try:
        logits = model(tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return outputs, logits.flatten(0, 1)


@contextmanager
def replayed(blocks: Sequence[nn.Module], outputs: Sequence[Output]) -> Iterator[None]:
    """Lets blocks put out what they did before, without computing. Everything else about them stays in sight."""

    def again(output: Output) -> Callable[..., Any]:
        def forward(*given: Any, **named: Any) -> Any:
            for name, left in output.left.items():
                named[name].update(left)
            return output.out

        return forward

    for block, output in zip(blocks, outputs, strict=False):
        block.forward = again(output)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """The sum over rows of KL(reference ‖ logits), nats, float64."""
    total = torch.zeros((), dtype=torch.float64)
    for p, q in zip(reference.split(_ROWS), logits.split(_ROWS), strict=True):
        total += kl_rows(log_probabilities(p), log_probabilities(q)).sum()
    return total
