"""What all benchmarks share: the device and its clock, interleaved rounds, rows of results, and the memory's speed."""

import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch

from runtime import native
from runtime.devices import explained, resolve
from runtime.errors import UserError
from runtime.kernels.triton import usable
from runtime.machine import logical_cpus
from runtime.model.layers import Mixture, linears, mlp_linears

ENGINE = "specpress"
# Rounds before those that count: the first touches memory and wakes the threads.
WARM_UP = 2
# Bytes of a copy that tells the memory's speed: beyond every GPU's caches, and little on a CPU, where it means nothing.
_COPIED = {"cuda": 1 << 30, "cpu": 1 << 24}
Key = TypeVar("Key", bound=Hashable)


Row = dict[str, Any]
"""What the tables show and the JSON files hold of one thing that was timed: `row`'s keys, and each command's own."""


@dataclass(frozen=True)
class Sample:
    """Seconds of one task, and the memory's speed around it in bytes per second; None where nothing measures it."""

    seconds: float
    bandwidth: float | None


def interleaved(
    tasks: Mapping[Key, Callable[[], float]], rounds: int, read: Callable[[], float | None]
) -> dict[Key, list[Sample]]:
    """What each task took in each round. A round runs all tasks once, so that a slow minute hits all alike.

    Memory's speed changes within seconds on shared machines: `read` measures it between any two tasks, and the better
    of the readings before and after a task is the one that the task is held against.
    """
    samples: dict[Key, list[Sample]] = {key: [] for key in tasks}
    for number in range(WARM_UP + rounds):
        before = read()
        for key, task in tasks.items():
            taken = task()
            after = read()
            if number >= WARM_UP:
                samples[key].append(Sample(taken, fastest(before, after)))
            before = after
    return samples


def row(
    what: str, scheme: str, width: int, samples: Sequence[Sample], read: int, base: Sequence[Sample] | None, **more: Any
) -> Row:
    """One thing that was timed at one width, from the samples of all rounds.

    what  "decode", "prefill", "draft", "chain", "tree", or a layer: "qkv", "o", "gate_up", "down", "head", "all".
    read  bytes of weights that one forward or product reads, and of states that a forward reads and writes:
          gb_per_second is of these, and share_of_bandwidth over the memory's speed around each sample, the median over
          the rounds; None where that is unknown.
    base  samples of the same at width 1, for over_width_1; None: they were not taken.
    more  keys beside these.
    """
    seconds = [sample.seconds for sample in samples]
    middle = median(seconds)
    shares = [read / s.seconds / s.bandwidth for s in samples if s.bandwidth is not None]
    return {
        "what": what,
        "engine": ENGINE,
        "scheme": scheme,
        "width": width,
        "ms_median": middle * 1e3,
        "ms_min": min(seconds) * 1e3,
        "tokens_per_second": width / middle,
        "bytes_read": read,
        "gb_per_second": read / middle / 1e9,
        "share_of_bandwidth": median(shares) if shares else None,
        "over_width_1": None if base is None else middle / median(sample.seconds for sample in base),
    } | more


def read_bytes(decoder: Any, experts: int | None = None) -> int:
    """Bytes of weights that a forward reads, of all linear layers, as the kernels (ours) hold them.

    experts  how many experts it reads, in all layers; None: of each mixture those of one row.
    """
    mixtures = [block.mlp for block in decoder.parts.blocks if isinstance(block.mlp, Mixture)]
    held = sum(layer.nbytes for layer in linears(decoder.parts))
    if not mixtures:
        return held
    each = [sum(layer.nbytes for layer in mlp_linears(mlp)) for mixture in mixtures for mlp in mixture.experts]
    count = sum(mixture.how.per_token for mixture in mixtures) if experts is None else experts
    return held - sum(each) + count * sum(each) // len(each)


class Bandwidth:
    """The memory's speed, measured as often as it is called: `readings` in bytes per second.

    read  one measurement; None where nothing can measure it: a call then gives None.
    """

    def __init__(self, read: Callable[[], float] | None):
        self.readings: list[float] = []
        self._read = read

    def __call__(self) -> float | None:
        if self._read is None:
            return None
        self.readings.append(self._read())
        return self.readings[-1]


def reading_speed(threads: int) -> Bandwidth:
    """How fast a CPU's threads read memory. Unknown without the native library, which measures it."""
    if not native.usable("portable")[0]:
        return Bandwidth(None)
    return Bandwidth(native.bandwidth_reader(threads, max(1 << 28, 4 * cache_bytes())))


def fastest(*speeds: float | None) -> float | None:
    """The highest of the speeds that were measured."""
    return max((speed for speed in speeds if speed is not None), default=None)


def cache_bytes() -> int:
    """Size of the largest cache of a processor; 64 MiB where the system does not say."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdecimal() and text[-1] in "KM":
            largest = max(largest, int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return largest or 64 << 20


def machine() -> dict[str, Any]:
    """Processor, cores and system; no name of the machine."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8", errors="replace").splitlines() if listing.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": logical_cpus(), "system": platform.system()}


@dataclass(frozen=True)
class Place:
    """A device by its name."""

    device: torch.device
    name: str

    @property
    def is_gpu(self) -> bool:
        """Whether it is a CUDA device. On a CPU Triton's kernels are interpreted: no time means a GPU's speed."""
        return self.device.type == "cuda"

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability. Raises as torch where it is none."""
        return torch.cuda.get_device_capability(self.device)

    def measured_on(self) -> str:
        """The device and what its kernels come from, in a line."""
        triton = version("triton") if find_spec("triton") is not None else "none"
        return f"{self.name}, torch {torch.__version__}, Triton {triton}"

    def seconds(self, call: Callable[[], Any]) -> float:
        """What a call takes, from its first work on the host until the device has finished."""
        if self.device.type == "cpu":
            since = perf_counter()
            call()
            return perf_counter() - since
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            call()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def task(
        self, call: Callable[[], Any], before: Callable[[], Any] | None = None, calls: int = 1
    ) -> Callable[[], float]:
        """A task for `interleaved`: seconds of `call` over the `calls` that it makes; `before` runs outside of them."""

        def run() -> float:
            if before is not None:
                before()
            return self.seconds(call) / calls

        return run

    def repeated(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The same work with as little of the host in it as can be: a CUDA graph of it, captured after a warm-up.

        Raises RuntimeError where it cannot be captured; on a CPU the call itself.
        """
        if not self.is_gpu:
            return call
        with torch.cuda.device(self.device):
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                call()
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
        return _Replay(graph, call)

    def require_triton(self, command: str) -> None:
        """Raises UserError where Triton's kernels, which `command` measures, cannot run."""
        can, why = usable(str(self.device))
        if not can:
            raise UserError(f"gpu {command} measures Triton's kernels, which cannot run here: {why}")

    def release(self) -> None:
        """Gives memory that nothing holds back to the device."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    def facts(self) -> dict[str, Any]:
        """For the JSON: device, versions, and whether its times are speed."""
        found: dict[str, Any] = machine() | {
            "device": self.name,
            "interpreted": not self.is_gpu,
            "torch": str(torch.__version__),
        }
        if self.is_gpu:
            about = torch.cuda.get_device_properties(self.device)
            found |= {
                "capability": ".".join(map(str, self.capability)),
                "memory_bytes": about.total_memory,
                "processors": about.multi_processor_count,
                "cuda": torch.version.cuda,
            }
        return found


@dataclass(frozen=True, eq=False)
class _Replay:
    """A graph, and the call that it was captured from: the graph reads the memory that the call holds."""

    graph: torch.cuda.CUDAGraph
    captured: Callable[[], Any]

    def __call__(self) -> None:
        self.graph.replay()


# For tasks on the host alone.
CPU = Place(torch.device("cpu"), "cpu")


def find(device: str) -> Place:
    """The place named by "cuda", "cuda:N", "cpu" or "auto". Raises UserError where there is no such device."""
    where = resolve(device)
    return Place(where, torch.cuda.get_device_name(where) if where.type == "cuda" else machine()["cpu"])


@dataclass
class Bench:
    """One benchmark on a device: its rounds, the speed of its memory, and what it finds.

    rows      of the table and of the JSON file.
    left_out  what was not timed, each with its `why`.
    say       takes a line of progress.
    """

    place: Place
    rounds: int
    kernels: str = "auto"
    say: Callable[[str], None] = print
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def bandwidth(self) -> Bandwidth:
        """Bytes read and written of a copy on the device, over its seconds."""
        source = torch.ones(_COPIED[self.place.device.type], dtype=torch.uint8, device=self.place.device)
        target = torch.empty_like(source)
        return Bandwidth(lambda: 2 * source.nbytes / self.place.seconds(lambda: target.copy_(source)))

    def samples(self, tasks: Mapping[Key, Callable[[], float]]) -> dict[Key, list[Sample]]:
        """`interleaved` over this benchmark's rounds."""
        return interleaved(tasks, self.rounds, self.bandwidth)

    def leave_out(self, error: Exception, **what: Any) -> None:
        """Notes why something was not timed: what CUDA's errors mean, a UserError's sentence, or the error itself."""
        text = error if isinstance(error, UserError) else explained(error)
        why = str(text) if text is not None else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self.left_out.append({**what, "why": why})
