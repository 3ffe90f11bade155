"""Processors and memory that a process may use: what the files of Linux' control groups say of it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime import devices, machine, native
from runtime.errors import UserError
from runtime.serve import engines
from runtime.serve.settings import ModelSettings

GIB = 1 << 30
NO_LIMIT = "9223372036854771712"  # as the first version of control groups says it


def written(root: Path, **files: str) -> Path:
    """A system's files by their paths; of 64 GiB of memory 32 are free."""
    meminfo = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {32 * GIB // 1024} kB"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


SECOND = {
    "proc/self/cgroup": "0::/",
    "sys/fs/cgroup/cpu.max": "150000 100000",
    "sys/fs/cgroup/memory.max": str(8 * GIB),
    "sys/fs/cgroup/memory.current": str(5 * GIB),
    "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {GIB}\nfile 9",
}
SERVICE = {  # the group above allows less than the process's own
    "proc/self/cgroup": "0::/pods.slice/one.scope",
    "sys/fs/cgroup/pods.slice/cpu.max": "250000 100000",
    "sys/fs/cgroup/pods.slice/memory.max": str(6 * GIB),
    "sys/fs/cgroup/pods.slice/memory.current": str(2 * GIB),
    "sys/fs/cgroup/pods.slice/one.scope/cpu.max": "max 100000",
    "sys/fs/cgroup/pods.slice/one.scope/memory.max": "max",
}
FIRST = {  # a container's view: the path is the host's, the tree begins at the container
    "proc/self/cgroup": "4:memory:/docker/0a1b\n3:cpu,cpuacct:/docker/0a1b\n2:cpuset:/\n0::/docker/0a1b",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}",
}
FREE = {
    "proc/self/cgroup": "3:cpu:/\n4:memory:/\n0::/../..",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/cpu.max": "max 100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(40 * GIB),
}


@pytest.mark.parametrize(
    ("files", "share", "total", "free"),
    [
        pytest.param(SECOND, 1.5, 8, 4, id="container, version 2"),
        pytest.param(SERVICE, 2.5, 6, 4, id="service, version 2"),
        pytest.param(FIRST, 0.5, 2, 1.5, id="container, version 1"),
        pytest.param(FREE, None, 64, 32, id="no limits"),
        pytest.param({}, None, 64, 32, id="no control groups"),
    ],
)
def test_limits_of_groups(
    files: dict[str, str], share: float | None, total: float, free: float, tmp_path: Path
) -> None:
    root = written(tmp_path, **files)
    assert machine.cpu_share(root) == share
    assert machine.total_memory(root) == total * GIB
    assert machine.free_memory(root) == free * GIB


@pytest.mark.parametrize(("quota", "cores", "logical"), [("50000", 1, 1), ("250000", 2, 3), ("1600000", 4, 8)])
def test_threads_are_those_of_the_share(
    quota: str, cores: int, logical: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four cores of two threads each, and a share of them."""
    siblings = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(8)
    }
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert (machine.cores(written(tmp_path, **siblings)), machine.logical_cpus(tmp_path)) == (4, 8)
    written(tmp_path, **{"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    assert (machine.cores(tmp_path), machine.logical_cpus(tmp_path)) == (cores, logical)


def test_this_machine_tells_sensible_figures() -> None:
    free, total = machine.free_memory(), machine.total_memory()
    assert 1 <= machine.cores() <= machine.logical_cpus() <= (os.cpu_count() or 1)
    assert total is not None and total > GIB // 4
    assert free is None or 0 < free < total
    assert native.default_threads() == machine.cores()


def test_torch_keeps_to_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        for share, count in ((None, 7), (9.0, 7), (2.5, 2), (0.2, 1)):
            monkeypatch.setattr(devices, "cpu_share", lambda share=share: share)
            devices.keep_to_share()
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_a_server_refuses_what_its_container_cannot_hold(
    tiny_packed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ModelSettings("tiny", str(tiny_packed("int8")))
    assert engines.opened(settings)[2]["pages"] > 0
    monkeypatch.setattr(engines, "free_memory", lambda: 1000)
    with pytest.raises(UserError, match="of memory are free"):
        engines.opened(settings)
