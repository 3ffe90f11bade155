"""A Ray cluster of several nodes on this machine for tests, on loopback, and its processes to kill."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.serving import ROOT, Running

_OBJECTS = 200_000_000  # bytes of each node's object store
# Ray's own settings of when a silent node is dead: within 5 s and not 20.
_DEATHS = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 4}
_ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class _Outside:
    """In place of a server's process: the cluster's are not ours to ask."""

    def poll(self) -> None:
        """See subprocess.Popen."""


@dataclass
class Nodes:
    """The nodes beside the head, each with room for one engine and one task. `port`: of Ray's one HTTP proxy."""

    cluster: Any
    port: int
    workers: list[Any] = field(default_factory=list)

    def add(self, **resources: float) -> None:
        """One more; it has `engine` and `machine` of its own."""
        node = {"engine": 1, "machine": 1} | resources
        self.workers.append(self.cluster.add_node(num_cpus=1, resources=node, object_store_memory=_OBJECTS))

    def kill(self, place: int = 0) -> None:
        """A node goes, and all that it runs with it, without a word."""
        self.cluster.remove_node(self.workers.pop(place), allow_graceful=False)

    def place_of(self, worker: int) -> int:
        """Which of `workers` runs this process: Ray's worker processes are children of their node's raylet."""
        parent = int((Path("/proc") / str(worker) / "stat").read_text().rpartition(")")[2].split()[1])
        [place] = [at for at, node in enumerate(self.workers) if parent in _raylets(node)]
        return place

    def server(self, told: Any, log: Path) -> Running:
        """The application's HTTP interface, ready."""
        from runtime.serve.ray_command import run_application

        run_application(told)
        found = Running(_Outside(), told.port, log)  # type: ignore[arg-type]
        found.wait_ready()
        return found


@contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """A cluster of a head, where the ingress is, and so many nodes; this process is connected to it."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 1, "object_store_memory": _OBJECTS, "include_dashboard": False, "_system_config": _DEATHS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        found = Nodes(cluster, _free_port())
        for _ in range(count):
            found.add()
        ray.init(cluster.address, runtime_env={"env_vars": _ENVIRONMENT}, log_to_driver=False, logging_level="ERROR")
        yield found
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def _raylets(node: Any) -> list[int]:
    return [one.process.pid for one in node.all_processes["raylet"]]


def _free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return int(end.getsockname()[1])


def processes(title: str) -> list[int]:
    """Descendants of this process whose command line begins so, as Ray names its workers."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except (OSError, IndexError):
                continue  # it has just ended
    ours, before = {os.getpid()}, 0
    while len(ours) != before:
        before = len(ours)
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    return sorted(pid for pid in ours if titles.get(pid, "").startswith(title))


def wait_for(title: str, count: int) -> list[int]:
    """So many of them, once they are there."""
    end = time.monotonic() + 60
    while len(found := processes(title)) < count:
        assert time.monotonic() < end, (title, found)
        time.sleep(0.1)
    return found
