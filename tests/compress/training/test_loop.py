"""The training loop: it learns, repeats itself bit for bit, goes on after a kill, and shares work over processes."""

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.artifact import TRAINING
from compress.errors import UserError
from compress.recipe.training import Budget, Settings
from compress.training import data, loop
from compress.training.contract import Loss
from compress.training.data import PackedBatches
from compress.training.loop import train
from compress.training.parallel import World

ROOT = Path(__file__).parents[3]
DRIVER = ROOT / "tests/compress/training/training_driver.py"


def _driver() -> Any:
    spec = importlib.util.spec_from_file_location("training_driver", DRIVER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


driver = _driver()
STEPS = 30
BUDGET = Budget(tokens=STEPS * driver.SETTINGS.tokens_per_step)


def bits(weights: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


def test_it_learns_and_says_how(tmp_path: Path) -> None:
    notes: list[str] = []
    task = driver.Toy()
    trained = driver.run(task, tmp_path / "t", BUDGET, notes=notes)
    assert trained.steps == STEPS and trained.tokens == STEPS * 48
    assert trained.before == pytest.approx(2.9, abs=0.3)
    assert trained.best < trained.before - 0.3
    assert task.evaluate() == trained.best
    assert [point.step for point in trained.curve] == list(range(STEPS + 1))
    held_out = {point.step: point.held_out for point in trained.curve if point.held_out is not None}
    assert list(held_out) == [0, 5, 10, 15, 20, 25, 30]
    assert held_out[trained.best_step] == min(held_out.values()) == trained.best
    assert "30 steps" in notes[0] and "held-out" in notes[-1] and "entropy" in notes[-1]


@pytest.mark.parametrize("muon", [False, True])
def test_equal_runs_are_equal_bits_and_seeds_matter(tmp_path: Path, muon: bool) -> None:
    runs = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        task = driver.Toy(muon=muon)
        driver.run(task, tmp_path / name, BUDGET, replace(driver.SETTINGS, seed=seed))
        runs.append(bits(task.state()))
    assert runs[0] == runs[1] != runs[2]


def test_the_best_weights_win_over_the_last(tmp_path: Path) -> None:
    task = driver.Toy()
    trained = driver.run(
        task, tmp_path, BUDGET, replace(driver.SETTINGS, learning_rate=30.0, schedule="wsd", min_lr_ratio=1.0)
    )
    assert trained.best_step < trained.steps
    assert task.evaluate() == trained.best <= trained.before


def test_what_was_never_better_stays_as_it_was(tmp_path: Path) -> None:
    """The beginning counts as a candidate."""
    task, fresh = driver.Toy(), driver.Toy()
    settings = replace(driver.SETTINGS, learning_rate=10.0, weight_decay=0.0, min_lr_ratio=1.0, warmup=0.0)
    trained = driver.run(task, tmp_path, BUDGET, settings)
    assert trained.best_step == 0
    assert bits(task.state()) == bits(fresh.state())


@pytest.mark.parametrize("muon", [False, True])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path: Path, muon: bool) -> None:
    task = driver.Toy(broken_at=0.55, muon=muon)
    with pytest.raises(UserError, match="finite loss, found none at step 18"):
        driver.run(task, tmp_path, BUDGET)
    # The last checkpoint, of step 14, is whole: with the cause gone the run goes on from it.
    mended, straight = driver.Toy(muon=muon), driver.Toy(muon=muon)
    notes: list[str] = []
    driver.run(mended, tmp_path, BUDGET, notes=notes)
    driver.run(straight, tmp_path / "straight", BUDGET)
    assert notes[0] == "training goes on after step 14 of 30"
    assert bits(mended.state()) == bits(straight.state())


def test_a_finished_run_gives_its_result_again(tmp_path: Path) -> None:
    first, again = driver.Toy(), driver.Toy()
    trained = driver.run(first, tmp_path, BUDGET)
    assert driver.run(again, tmp_path, BUDGET) == trained
    assert bits(first.state()) == bits(again.state())


def test_minutes_become_a_fixed_number_of_steps_without_changing_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only the steps move, a second each."""
    now, step = [0.0], [1.0]

    class Timed(driver.Toy):
        def loss(self, batch: Tensor, progress: float) -> Loss:
            now[0] += step[0]
            return super().loss(batch, progress)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    task = Timed()
    trained = driver.run(task, tmp_path / "minutes", Budget(minutes=0.5))
    assert 20 < trained.steps < 30
    # The same number of steps asked for in tokens gives the same weights: timing left no trace.
    other = driver.Toy()
    settings = driver.SETTINGS
    driver.run(other, tmp_path / "tokens", Budget(tokens=trained.steps * settings.tokens_per_step))
    assert bits(task.state()) == bits(other.state())
    # A resumed run keeps the number, however fast the machine is then.
    step[0] = 7.0
    assert driver.run(Timed(), tmp_path / "minutes", Budget(minutes=0.5)).steps == trained.steps


@pytest.mark.parametrize(("minutes", "measured"), [(50.0, 22), pytest.param(160.0, 65, marks=pytest.mark.slow)])
def test_minutes_count_the_steps_that_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, measured: int
) -> None:
    """By a clock that only the steps move: one in five takes six times as long, and the first one twenty."""
    now, taken = [0.0], [0]

    class Uneven(driver.Toy):
        def loss(self, batch: Tensor, progress: float) -> Loss:
            taken[0] += 1
            now[0] += 20.0 if taken[0] == 1 else 6.0 if taken[0] % 5 == 4 else 1.0
            return super().loss(batch, progress)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    steps = driver.run(Uneven(), tmp_path / "run", Budget(minutes=minutes)).steps
    assert taken[0] - steps == measured
    assert now[0] == pytest.approx(minutes * 60, rel=0.05)


def test_minutes_are_not_spent_on_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long steps are tried three times, very long ones once beside the first."""
    now, taken = [0.0], [0]

    class Slow(driver.Toy):
        def loss(self, batch: Tensor, progress: float) -> Loss:
            taken[0] += 1
            now[0] += 60.0
            return super().loss(batch, progress)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for minutes, trials, steps in ((60.0, 4, 56), (10.0, 2, 8)):
        taken[0] = 0
        assert driver.run(Slow(), tmp_path / str(minutes), Budget(minutes=minutes)).steps == steps
        assert taken[0] == steps + trials


def test_minutes_end_at_the_most_tokens(tmp_path: Path) -> None:
    step = driver.SETTINGS.tokens_per_step

    def steps(most: int | None, minutes: float = 0.02) -> int:
        return driver.run(driver.Toy(), tmp_path / str(most), Budget(minutes=minutes, most_tokens=most)).steps

    assert (steps(3 * step + 1), steps(1)) == (3, 1) and steps(None) > 3
    with pytest.raises(ValueError, match="most_tokens: expected at least 1, with minutes"):
        Budget(tokens=step, most_tokens=step)


def test_budgets_that_are_too_small(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least the 48 tokens of one step, found 47"):
        driver.run(driver.Toy(), tmp_path / "a", Budget(tokens=47))
    with pytest.raises(UserError, match="time for one step at least"):
        driver.run(driver.Toy(), tmp_path / "b", Budget(minutes=1e-9))
    for wrong in ({}, {"tokens": 1, "minutes": 1.0}):
        with pytest.raises(UserError, match="either tokens or minutes"):
            Budget(**wrong)
    with pytest.raises(UserError, match="more than 0"):
        Budget(minutes=0.0)
    assert driver.run(driver.Toy(), tmp_path / "c", Budget(tokens=48)).steps == 1


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    driver.run(driver.Toy(), tmp_path, BUDGET)
    with pytest.raises(UserError, match=r"settings\.learning_rate was 0\.01 and is 0\.02"):
        driver.run(driver.Toy(), tmp_path, BUDGET, replace(driver.SETTINGS, learning_rate=0.02))
    with pytest.raises(UserError, match=r"budget\.tokens was 1440 and is 2880"):
        driver.run(driver.Toy(), tmp_path, Budget(tokens=2880))
    [weights] = tmp_path.glob("checkpoint-*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"checkpoint-00000030\.safetensors is damaged"):
        driver.run(driver.Toy(), tmp_path, BUDGET)
    content[-3] ^= 1
    weights.write_bytes(content)
    described = tmp_path / TRAINING
    described.write_bytes(described.read_bytes().replace(b'"step": 30', b'"step": 29'))
    with pytest.raises(UserError, match=r"training\.json is damaged"):
        driver.run(driver.Toy(), tmp_path, BUDGET)


def drive(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(DRIVER), str(folder), json.dumps(job)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text()) | {"errors": done.stderr}
    return found


def check_kills(folder: Path, points: list[int]) -> None:
    found = drive(folder, {"steps": 15, "points": points})
    assert [kill["status"] for kill in found["kills"]] == [-signal.SIGKILL] * len(points)
    for point, kill in zip(points, found["kills"], strict=True):
        assert kill["outcome"] == found["straight"], f"killed before step {point} of making files last"


def test_killed_and_gone_on_with_is_the_same_bytes(tmp_path: Path) -> None:
    check_kills(tmp_path, [2, 13, 22, 34])


@pytest.mark.slow
def test_killed_at_every_write_boundary(tmp_path: Path) -> None:
    check_kills(tmp_path, list(range(1, 48)))


def check_processes(found: dict[str, Any]) -> None:
    one, first, second = found["straight"], found["first"], found["second"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["weights"] == second["weights"]
    curves = [[point["loss"] for point in run["trained"]["curve"][1:]] for run in (one, first)]
    assert curves[0] == pytest.approx(curves[1], abs=1e-3)
    assert curves[0][-1] < curves[0][0] - 0.3
    assert first["weights"]["0.weight"] == pytest.approx(one["weights"]["0.weight"], abs=1e-3)


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    check_processes(drive(tmp_path, {"steps": STEPS, "no_dropout": True, "processes": 2}))


def test_rows_are_dealt_out_to_the_processes_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(driver.SETTINGS, batch=4)
    alone = PackedBatches(driver.stream(), settings).take(3, 0)
    for rank in (0, 1):
        monkeypatch.setattr(data, "current", lambda rank=rank: World(rank, 2))
        assert torch.equal(PackedBatches(driver.stream(), settings).take(3, 0), alone[rank::2])


def test_a_batch_that_processes_cannot_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "current", lambda: World(0, 3))
    with pytest.raises(UserError, match="expected a multiple of the 3 processes, found 4"):
        train(driver.Toy(), driver.batches(), BUDGET, driver.SETTINGS, tmp_path, driver.silent, print)


@pytest.mark.slow
def test_torchrun_starts_two_processes(tmp_path: Path) -> None:
    job = {"steps": STEPS, "no_dropout": True}
    straight = drive(tmp_path, {**job, "points": []})["straight"]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += [str(DRIVER), str(tmp_path), json.dumps({**job, "as_it_is": True})]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in (0, 1))
    check_processes({"straight": straight, "first": first, "second": second})


def test_batches_are_a_function_of_the_step() -> None:
    settings = Settings(batch=4, gradient_accumulation_steps=2, length=9, seed=5)
    text = torch.arange(1000)
    batches, again = PackedBatches(text, settings), PackedBatches(text.numpy().astype("uint16"), settings)
    later = again.take(40, 1)
    assert later.shape == (4, 10) and later.dtype == torch.int64
    assert (later[:, 1:] - later[:, :-1] == 1).all()
    for step in (0, 40, 3):
        for micro in (0, 1):
            assert torch.equal(batches.take(step, micro), again.take(step, micro))
    # An epoch reads every window once.
    count = batches.windows // 4
    starts = [int(row[0]) for i in range(count) for row in batches.take(i // 2, i % 2)]
    assert len(set(starts)) == len(starts)
    gaps = {after - before for before, after in itertools.pairwise(sorted(starts))}
    assert min(gaps) == 9 and all(gap % 9 == 0 for gap in gaps)


def test_a_text_shorter_than_one_window_is_refused() -> None:
    settings = Settings(batch=2, length=9)
    with pytest.raises(UserError, match="it has 9 tokens, and one window needs 10"):
        PackedBatches(torch.arange(9), settings)
    assert torch.equal(PackedBatches(torch.arange(10), settings).take(7, 0), torch.arange(10).expand(2, 10))
