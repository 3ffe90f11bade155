"""What processes spend of a machine's cores, as Linux tells it."""

import os
import time
from pathlib import Path

import pytest

from runtime.bench import fleet_spent
from runtime.bench.fleet_spent import Shared, Spent
from runtime.errors import UserError

TICKS = os.sysconf("SC_CLK_TCK")


def _tell(folder: Path, machine: float, processes: dict[int, tuple[float, float]]) -> None:
    """Files as /proc has them: seconds of all cores, and of processes by number, in user and system mode."""
    (folder / "stat").write_text(f"cpu  {machine * TICKS:.0f} 0 0 99 99 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    for pid, (user, system) in processes.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        times = f"{user * TICKS:.0f} {system * TICKS:.0f}"
        (folder / str(pid) / "stat").write_text(f"{pid} (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 {times} 0 0 20 0 1 0 9\n")


def test_the_engine_is_who_spends_most_and_all_but_it_and_ingress_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_spent, "_PROCESSES", tmp_path)
    ingress = [5.0]
    monkeypatch.setattr(fleet_spent, "_ingress_seconds", lambda address: ingress[0])
    _tell(tmp_path, 100.0, {7: (50.0, 4.0), 8: (1.0, 0.0), 9: (2.0, 0.0)})
    rests = iter([lambda: _tell(tmp_path, 104.1, {})])
    monkeypatch.setattr(fleet_spent, "sleep", lambda seconds: next(rests)())
    clock = iter([10.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr(fleet_spent, "perf_counter", lambda: next(clock))
    # 7 has spent most in all, 8 most meanwhile, half of it in system mode.
    machine = Shared.find(lambda: _tell(tmp_path, 104.0, {7: (50.5, 4.0), 8: (2.5, 1.5), 10: (0.2, 0.0)}))
    assert machine.engine == 8 and machine.background == pytest.approx(0.05)
    before = Spent.now("", machine)
    ingress[0] = 6.0
    _tell(tmp_path, 110.1, {8: (4.5, 1.5)})
    # Of 6 seconds 1 of the ingress, 2 of the engine, and 0.25 that are always spent.
    assert before.since("", machine) == pytest.approx((1.0, 2.75))


def test_linux_tells_what_a_process_spends() -> None:
    before, began = fleet_spent._seconds_of(os.getpid()), time.process_time()
    while time.process_time() - began < 0.3:
        pass
    assert fleet_spent._seconds_of(os.getpid()) - before == pytest.approx(0.3, abs=0.05)
    assert fleet_spent._each()[os.getpid()] >= before and fleet_spent._machine_seconds() > 0
    with pytest.raises(UserError, match="the engine that is measured has ended"):
        fleet_spent._seconds_of(2**22 + 1)
