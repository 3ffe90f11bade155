"""What a model of transformers can do with its cache, told by pretended ones that forget or round."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.model.hf_probe import Capability, Steps, probe

VOCABULARY = 50


def pretended(forgets: float, rounds: float, alone: float = 0.0) -> Capability:
    """Of a model whose logits are sums over the text: several tokens in a forward leave out a part `forgets` of what
    came before, single ones a part `alone`, and whatever goes on from a state is `rounds` off."""
    table = torch.randn(VOCABULARY, 40, generator=torch.Generator().manual_seed(1))
    draws = torch.Generator().manual_seed(2)

    def run(tokens: Tensor, state: list[int], steps: Steps) -> Tensor:
        before = table[state].sum(0) if state else torch.zeros(40)
        if state:
            before = before * (1 - (forgets if len(tokens) > 1 else alone))
        found = before + table[tokens].cumsum(0)
        noise = torch.randn(found.shape, generator=draws) * found.std() * rounds * bool(state)
        state += tokens.tolist()
        return found + noise

    def cut(state: list[int], length: int) -> list[int]:
        return state[:length]

    given: Any = (VOCABULARY, run, lambda steps: [], cut, True)
    return probe("Pretended", *given, rounds=True)


@pytest.mark.parametrize(
    ("forgets", "rounds", "steps"), [(0.0, 0.0, "several"), (0.0, 0.006, "several"), (0.02, 0.0, "single")]
)
def test_what_forgets_a_little_is_told_from_what_rounds(forgets: float, rounds: float, steps: str) -> None:
    """A packed model's small state may be forgotten and yet change logits by less than rounding may."""
    assert pretended(forgets, rounds) == Capability(steps)  # type: ignore[arg-type]


def test_what_forgets_much_is_no_question() -> None:
    assert pretended(0.9, 0.006).steps == "single"


def test_single_tokens_may_forget_where_several_do_not() -> None:
    """As those of transformers' Mamba 2, which leave out the limits of its steps: then all of a text is read anew."""
    assert pretended(0.0, 0.0, alone=0.5).steps == "anew"
    assert pretended(0.5, 0.0, alone=0.0).steps == "single"
