"""What ingress, engine and all else on a machine spend of its cores while a server is measured."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter, sleep

from runtime.bench.fleet_ask import place_of, silent
from runtime.errors import UserError

_PROCESSES = Path("/proc")
_REST = 3.0  # seconds


@dataclass(frozen=True)
class Shared:
    """The machine that server and client share: its engine's process, and what the machine spends at rest.

    background  seconds of a core in a second, of whatever runs while nothing is asked for.
    """

    engine: int
    background: float

    @classmethod
    def find(cls, read_prompts: Callable[[], None]) -> "Shared":
        """The engine is the process that spends most while prompts are read; then the machine rests.

        Raises UserError on a system that does not tell what its processes do.
        """
        before = _each()
        read_prompts()
        spent = {pid: seconds - before.get(pid, 0.0) for pid, seconds in _each().items()}
        began, machine = perf_counter(), _machine_seconds()
        sleep(_REST)
        background = (_machine_seconds() - machine) / (perf_counter() - began)
        return cls(max(spent, key=spent.__getitem__), background)


@dataclass(frozen=True)
class Spent:
    """Seconds of cores so far: of the process that speaks HTTP, of all others but the engine, and when that was."""

    ingress: float
    others: float
    when: float

    @classmethod
    def now(cls, address: str, machine: Shared | None) -> "Spent":
        """Read now; None: the server has its own machine, and others' seconds are not asked for."""
        ingress = _ingress_seconds(address)
        others = 0.0 if machine is None else _machine_seconds() - ingress - _seconds_of(machine.engine)
        return cls(ingress, others, perf_counter())

    def since(self, address: str, machine: Shared | None) -> tuple[float, float]:
        """(of the ingress, of all others but the engine, beyond what is always spent) since then."""
        now = self.now(address, machine)
        others = now.others - self.others
        if machine is not None:
            others -= machine.background * (now.when - self.when)
        return now.ingress - self.ingress, max(0.0, others)


def _ingress_seconds(address: str) -> float:
    """Of a core, that the process which speaks HTTP has used. Raises UserError where it does not tell."""
    host, port = place_of(address)
    connection = HTTPConnection(host, port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    except OSError as error:
        raise silent(address, error) from None
    finally:
        connection.close()
    told = [line.split()[1] for line in lines if line.startswith("process_cpu_seconds_total ")]
    if not told:
        raise UserError(f"{address}: /metrics has no process_cpu_seconds_total: give a server or cluster of Specpress")
    return float(told[0])


def _machine_seconds() -> float:
    """Of all cores, that were spent on something. Raises UserError on a system that does not tell."""
    try:
        told = (_PROCESSES / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        raise UserError("--cores: this system does not tell what its cores do: measure on Linux") from None
    user, nice, system, _, _, interrupts, soft = map(int, told[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _each() -> dict[int, float]:
    """Seconds of cores of each process that runs. Raises UserError on a system that does not tell."""
    _machine_seconds()
    found = {}
    for entry in _PROCESSES.iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = _seconds_of(int(entry.name))
            except UserError:
                continue  # it has just ended
    return found


def _seconds_of(pid: int) -> float:
    """Of all of a process' threads. Raises UserError where it has ended."""
    try:
        told = (_PROCESSES / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        raise UserError("the engine that is measured has ended meanwhile: see the server's log") from None
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")
