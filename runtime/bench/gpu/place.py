"""Where a benchmark runs: the device, how time is taken there, and how fast its memory copies."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch

from runtime.bench.rounds import machine
from runtime.devices import resolve

# Bytes of a copy that tells the memory's speed: beyond every GPU's caches, and little on a CPU, where it means nothing.
_COPIED = {"cuda": 1 << 30, "cpu": 1 << 24}


@dataclass(frozen=True)
class Place:
    """A device. `interpreted`: a CPU, where Triton's kernels are interpreted, so that no time means a GPU's speed."""

    device: torch.device
    name: str
    interpreted: bool

    @property
    def is_gpu(self) -> bool:
        """Whether it is a CUDA device."""
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
        if not self.is_gpu:
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

    def task(self, call: Callable[[], Any], before: Callable[[], Any] | None = None) -> Callable[[], float]:
        """A task for `rounds.interleaved`; `before` runs outside of its time."""

        def run() -> float:
            if before is not None:
                before()
            return self.seconds(call)

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
        return graph.replay

    def peak_bytes(self) -> int | None:
        """The most memory that torch has held since `forget_peak`; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else None

    def forget_peak(self) -> None:
        """Counts the peak anew."""
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def release(self) -> None:
        """Gives memory that nothing holds back to the device."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    def facts(self) -> dict[str, Any]:
        """For the JSON: device, versions, and whether its times are speed."""
        found: dict[str, Any] = machine() | {
            "device": self.name,
            "interpreted": self.interpreted,
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


def find(device: str) -> Place:
    """The place named by "cuda", "cuda:N", "cpu" or "auto". Raises UserError where there is no such device."""
    where = resolve(device)
    if where.type == "cuda":
        return Place(where, torch.cuda.get_device_name(where), interpreted=False)
    return Place(where, machine()["cpu"], interpreted=True)


@dataclass
class Copies:
    """The memory's speed, measured as often as it is called: bytes read and written of a copy over its seconds."""

    place: Place
    readings: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = _COPIED[self.place.device.type]
        self._source = torch.ones(size, dtype=torch.uint8, device=self.place.device)
        self._target = torch.empty_like(self._source)

    def __call__(self) -> float:
        taken = self.place.seconds(lambda: self._target.copy_(self._source))
        self.readings.append(2 * self._source.nbytes / taken)
        return self.readings[-1]
