"""Hidden states that heads learn from: collected, stopped and gone on with."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import UserError
from compress.medusa import frozen, hidden_states
from compress.medusa.hidden_states import CHUNK, HiddenStates, Source, collect
from compress.recipe.training import Settings
from compress.recipe.training_stages import Medusa
from compress.training.data import ShuffledNumbers
from compress.training.parallel import World
from runtime import Model, Speculator
from runtime.checkpoints.drafter_files import weights_digest
from runtime.contract import Rows
from runtime.speculative.drafters.medusa import load_heads
from tests.compress.medusa.packing import silent, windows


def test_kept_states_are_those_of_the_kernels(target: Model, tmp_path: Path) -> None:
    source = Source(windows(CHUNK + 3), "greedy", (6,))
    found = collect(target, source, tmp_path, {}, None, silent)
    assert len(found) == CHUNK + 3 and found.chunks == 2
    tokens, states = found.read([CHUNK + 1, 5])
    for row, number in enumerate((CHUNK + 1, 5)):
        prompt = source.windows[number, :6].tolist()
        assert tokens[row, :6].tolist() == prompt
        assert tokens[row, 6:].tolist() == Speculator(target).generate([prompt], 18, stop=())[0].tokens
        cache = target.decoder.new_cache()
        expected = target.decoder.forward(tokens[row], Rows.chains([(cache.open(24), 0, 24)]), cache).hidden
        assert torch.equal(states[row], expected.half().float())
    assert torch.equal(found.tokens()[[CHUNK + 1, 5]], tokens)
    assert torch.equal(torch.cat([block for block, _ in found.blocks(10)]), found.tokens())


def test_text_may_stand_as_it_is_or_be_drawn(target: Model, tmp_path: Path) -> None:
    plain, drawn_, again, other = (
        collect(target, Source(windows(4), kind, (6,), seed), tmp_path / name, {}, None, silent).tokens()
        for kind, seed, name in (("none", 0, "a"), ("sampled", 0, "b"), ("sampled", 0, "c"), ("sampled", 9, "d"))
    )
    assert torch.equal(plain, windows(4)) and torch.equal(drawn_, again)
    assert not torch.equal(drawn_, other) and torch.equal(drawn_[:, :6], plain[:, :6])
    part = collect(target, Source(windows(4), "greedy", (6,), 0, 0.5), tmp_path / "e", {}, None, silent).tokens()
    greedy = collect(target, Source(windows(4), "greedy", (6,)), tmp_path / "f", {}, None, silent).tokens()
    assert torch.equal(part[:2], plain[:2]) and torch.equal(part[2:], greedy[2:])
    assert not torch.equal(greedy, plain)


def test_collecting_goes_on_where_it_was_stopped(
    target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(windows(3 * CHUNK, 12), "greedy", (4,))
    whole = collect(target, source, tmp_path / "whole", {}, None, silent)
    calls = 0

    def stopping(model: Any, *options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return Speculator(model, *options)

    with monkeypatch.context() as patch:
        patch.setattr(hidden_states, "Speculator", stopping)
        with pytest.raises(KeyboardInterrupt):
            collect(target, source, tmp_path / "cut", {}, None, silent)
    assert HiddenStates(tmp_path / "cut").chunks == 1
    found = collect(target, source, tmp_path / "cut", {}, None, silent)
    for name in ("states", "tokens"):
        for number in range(3):
            file = f"{name}-{number:05d}.npy"
            assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert len(found) == len(whole)
    with pytest.raises(UserError, match="those of another"):
        collect(target, source, tmp_path / "cut", {"target": "x"}, None, silent)


def test_time_stops_collecting_once_and_for_all(target: Model, tmp_path: Path) -> None:
    source = Source(windows(3 * CHUNK, 12), "none", (4,))
    first = collect(target, source, tmp_path / "a", {}, 0.0, silent)
    again = collect(target, source, tmp_path / "a", {}, 1000.0, silent)
    assert first.chunks == again.chunks == 1 and first.seconds == again.seconds > 0
    assert collect(target, source, tmp_path / "b", {}, 1000.0, silent).chunks == 3


def test_batches_are_every_window_once_an_epoch() -> None:
    settings = Settings(batch=4, gradient_accumulation_steps=2, seed=3)
    batches = ShuffledNumbers(12, settings)
    rows = [batches.take(step, micro).flatten().tolist() for step in range(3) for micro in range(2)]
    first, second = list(chain(*rows[:3])), list(chain(*rows[3:]))
    assert sorted(first) == sorted(second) == list(range(12)) and first != second
    assert ShuffledNumbers(12, settings).take(2, 1).flatten().tolist() == rows[5]
    parts = [ShuffledNumbers(12, settings, World(rank, 2)).take(1, 0).flatten().tolist() for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(rows[2]) and parts[0] == rows[2][0::2]


@pytest.mark.parametrize("shared", [True, False])
def test_new_heads_are_the_target_s_own(target: Model, packed: Path, tmp_path: Path, shared: bool) -> None:
    stage = Medusa(heads=2, layers=2, projection="shared" if shared else "own")
    heads = frozen.new_heads(stage, packed / "model")
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for logits in heads(hidden):
        assert torch.allclose(logits, hidden @ heads.table.T, atol=1e-5)
    with torch.no_grad():
        for number, parameter in enumerate(heads.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    heads.save(tmp_path, heads.describe(((0,), (1,), (0, 0)), weights_digest(packed / "model")))
    read = load_heads(tmp_path, target).logits(hidden)
    for number, logits in enumerate(heads(hidden)):
        assert (read[:, number] - logits).norm() < 0.01 * logits.norm()
    assert {
        parameter.shape for group in heads.groups("muon") if group.optimizer == "muon" for parameter in group.parameters
    } == {(64, 64)}
    counted = [id(parameter) for group in heads.groups("adamw") for parameter in group.parameters]
    assert sorted(counted) == sorted(map(id, heads.parameters()))
