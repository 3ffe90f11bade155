"""The limits of Linux' control groups, in which containers and services run, on processors and memory.

Docker's `--cpus` and `--memory`, Kubernetes' limits and systemd's are kept by them. Files of both versions are read, as
https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html there describe them.
"""

from collections.abc import Iterator
from pathlib import Path


def cpu_share(root: Path) -> float | None:
    """Processors whose whole time this process and its group may take; None: no limit.

    root  of the file system whose /proc and /sys tell.
    """
    shares = []
    for folder in _folders("cpu", root):
        second, first = folder / "cpu.max", [folder / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
        told = (text(second) or " ".join(text(file) or "" for file in first)).split()
        quota, period = told if len(told) == 2 else ("max", "")
        if quota.isdecimal() and period.isdecimal() and int(period):
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def memory(root: Path) -> list[tuple[int, int]]:
    """Limit and use, in bytes, of each group above this process that has a limit."""
    found = []
    for folder in _folders("memory", root):
        limit = text(folder / "memory.max") or text(folder / "memory.limit_in_bytes") or "max"
        used = text(folder / "memory.current") or text(folder / "memory.usage_in_bytes") or "0"
        if limit.isdecimal() and used.isdecimal():
            stat = dict(line.split() for line in (text(folder / "memory.stat") or "").splitlines())
            # The first version counts the groups below apart from the group's own.
            kept = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            found.append((int(limit), max(0, int(used) - kept)))
    return found


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, which limit it as well.

    Within a container the mounted tree may begin at the container's own group while the path is the host's; so what is
    not there is passed over, and the tree's top is always among them.
    """
    for line in (text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            bases = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in names.split(","):
            bases = [root / "sys/fs/cgroup" / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for base in bases:
            inside = [] if ".." in parts else parts
            yield from (base.joinpath(*inside[:length]) for length in range(len(inside), -1, -1))


def text(file: Path) -> str | None:
    """What a file of the system says; None where it is not there."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
