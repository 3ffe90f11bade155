"""What states know of their text: tokens that were told, and those that lie on a device until they are asked for."""

import random

import pytest
import torch

from runtime.cache import states
from runtime.cache.states import States


@pytest.mark.parametrize("most", [1, 5, 1000])
def test_tokens_that_are_read_late(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolled back, kept or copied at any time, they are those of a list that knows them at once."""
    monkeypatch.setattr(states, "_MOST_UNREAD", most)
    dice, memory = random.Random(most), States(3, torch.device("cpu"))
    text: list[int] = []
    for _ in range(300):
        fed, drafted = dice.randrange(3), torch.randint(9, (dice.randrange(1, 5),))
        memory.extend([7] * fed + [0] * len(drafted), 4)
        memory.learn(len(text) + fed, drafted)
        text += [7] * fed + drafted.tolist()
        assert len(memory.tokens) == len(text)
        step = dice.randrange(4)
        if step == 0:
            length = len(text) - dice.randrange(len(drafted) + 1)
            memory.truncate(length)
            del text[length:]
        elif step == 1 and len(drafted) > 2:
            length = len(text) - len(drafted)
            memory.keep(length, [0, 2])
            text[length:] = [text[length], text[length + 2]]
        elif step == 2:
            memory = memory.copy()
        assert len(memory._unread) <= most
        if dice.randrange(20) == 0:
            memory.restart()
            assert memory.tokens == text
            memory.restarted()
    assert len(text) > 300
