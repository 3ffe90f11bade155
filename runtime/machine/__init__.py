"""What of the machine this process may use: processors and memory, and what a container allows of both.

The affinity of a process and /proc/meminfo do not show a container's limits: one of two processors on a host of 64 sees
64, and starts as many threads, which then wait for each other.
"""

import os
import re
from pathlib import Path

from runtime.machine import control_groups
from runtime.machine.control_groups import text

ROOT = Path("/")


def cores(root: Path = ROOT) -> int:
    """Physical cores that this process may run on, at least one: threads of one core share the units that kernels fill.

    root  of the file system whose /proc and /sys tell.
    """
    found = set()
    for cpu in _affinity():
        siblings = text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.add(siblings or str(cpu))
    share = cpu_share(root)
    return max(1, len(found) if share is None else min(len(found), int(share)))


def logical_cpus(root: Path = ROOT) -> int:
    """Logical processors that this process may run on, at least one; of a share that is no whole number, one more."""
    share = cpu_share(root)
    return max(1, len(_affinity()) if share is None else min(len(_affinity()), -int(-share // 1)))


def cpu_share(root: Path = ROOT) -> float | None:
    """Processors whose whole time a container, or a service, lets this process have; None: no limit."""
    return control_groups.cpu_share(root)


def total_memory(root: Path = ROOT) -> int | None:
    """Bytes of memory that this process may have at most, others' included; None where the system does not tell."""
    limits = [limit for limit, _ in control_groups.memory(root)]
    physical = _meminfo("MemTotal", root)
    if physical is None and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):  # not Linux
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return physical if physical is None else min([physical, *limits])


def free_memory(root: Path = ROOT) -> int | None:
    """Bytes of memory that can still be had, caches of files that can go included; None: the system does not tell."""
    free = _meminfo("MemAvailable", root)
    return free if free is None else max(0, min([free, *(limit - used for limit, used in control_groups.memory(root))]))


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _meminfo(key: str, root: Path) -> int | None:
    found = re.search(rf"^{key}:\s+(\d+) kB", text(root / "proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else None
