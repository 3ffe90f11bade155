"""What a model of transformers can do with its cache: six tokens tell, and no list of names.

Its logits for the whole text, without a cache, are the truth. A model that is given the same text in parts must come
to them, and must come to them again after its last tokens were taken out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from runtime.errors import UserError

# How a text that has begun goes on: several tokens in a forward, one in each, or all of the text once more.
Steps = Literal["several", "single", "anew"]
_LENGTH, _FIRST, _LEFT = 6, 3, 4
# Relative to their size, logits that only rounding sets apart stay below: in float32, and where layers round to
# 16 bits or round their inputs to codes. Whatever was forgotten or seen too early is above.
_NEAR, _NEAR_ROUNDED = 1e-3, 0.02
# Rounding sets several tokens in a forward apart about as much as single ones; a small model that forgets may be below
# the bound, but not near what single tokens come to.
_APART = 4.0


@dataclass(frozen=True)
class Capability:
    """How its cache serves, and why drafts cannot be verified ("" where they can)."""

    steps: Steps
    no_drafts: str = ""


def probe(
    name: str,
    vocab_size: int,
    run: Callable[[Tensor, Any, Steps], Tensor],
    empty: Callable[[Steps], Any],
    cut: Callable[[Any, int], Any],
    caches: bool,
    rounds: bool,
) -> Capability:
    """The capability of a model that is called `name` in sentences.

    run     (tokens, state, steps): logits of all the tokens, which it appends to the state.
    empty   a state before its first token; cut: a state's first tokens alone.
    caches  whether it takes a cache at all; rounds: whether its layers round more than float32 does.

    Raises UserError where the model does not run on tokens alone.
    """
    near = _NEAR_ROUNDED if rounds else _NEAR
    text = torch.tensor([(7 + 13 * i * i) % vocab_size for i in range(_LENGTH)])
    whole = run(text, empty("anew"), "anew")
    sees_ahead = not _near(run(text[:_FIRST], empty("anew"), "anew"), whole[:_FIRST], near)
    if sees_ahead:
        return Capability(
            "anew", f"{name} lets a token's logits depend on what follows it, so no draft can be verified"
        )
    # Both kinds of forwards for several: a class may have an own way for a single token, and that another fault.
    ways: tuple[tuple[Steps, list[int]], ...] = (
        ("several", [_FIRST, _LENGTH - _FIRST - 1, 1]),
        ("single", [_FIRST, 1, 1, 1]),
    )
    tried: dict[Steps, tuple[float, Any]] = {}
    for steps, parts in ways if caches else ():
        try:
            state = empty(steps)
            found = torch.cat([run(part, state, steps) for part in text.split(parts)])
        except UserError:
            continue
        tried[steps] = error, _ = _error(found, whole), state
        if error <= _NEAR:
            break
    for steps, (error, state) in tried.items():
        if error <= near and error <= max(_NEAR, _APART * min(other for other, _ in tried.values())):
            return Capability(steps, _roll_back(name, text, whole, state, steps, run, cut, near))
    return Capability("anew")


def _roll_back(
    name: str,
    text: Tensor,
    whole: Tensor,
    state: Any,
    steps: Steps,
    run: Callable[[Tensor, Any, Steps], Tensor],
    cut: Callable[[Any, int], Any],
    near: float,
) -> str:
    """Why a state does not come back as it was; "" where it does."""
    try:
        again = torch.cat([run(part, state, steps) for state in [cut(state, _LEFT)] for part in text[_LEFT:].split(1)])
    except UserError as error:
        return str(error)
    return "" if _near(again, whole[_LEFT:], near) else f"the cache of {name} does not come back as it was"


def _near(found: Tensor, expected: Tensor, near: float) -> bool:
    return _error(found, expected) <= near


def _error(found: Tensor, expected: Tensor) -> float:
    """Over the norm of what was expected; infinite where something is no number."""
    error = float((found - expected).norm() / expected.norm())
    return error if error == error else float("inf")
