"""What all benchmarks share: interleaved rounds, rows of results, and what the memory and the processor are."""

import os
import platform
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from runtime.kernels import native
from runtime.kernels.native.layers import NativeLinear
from runtime.kernels.reference import FloatLinear, GroupLinear, Int8Linear

ENGINE = "specpress"
# Rounds before those that count: the first touches memory and wakes the threads.
WARM_UP = 2
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Row:
    """One thing that was timed, at one width.

    what               "decode", "prefill", "draft", "chain", "tree", or a layer: "qkv", "o", "gate_up", "down", "head",
                       "all".
    ms_median, ms_min  of one forward or product, over the rounds.
    tokens_per_second  width over the median.
    gb_per_second      weight bytes that one forward or product reads, over the median; None where they are unknown.
    share_of_bandwidth those bytes per second over the memory's reading speed around them, the median over the rounds;
                       None where one of the two is unknown.
    over_width_1       the median over that of width 1; None where width 1 was not timed.
    """

    what: str
    engine: str
    scheme: str
    width: int
    ms_median: float
    ms_min: float
    tokens_per_second: float
    gb_per_second: float | None
    share_of_bandwidth: float | None
    over_width_1: float | None


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
    what: str,
    scheme: str,
    width: int,
    samples: Sequence[Sample],
    read: int | None,
    base: Sequence[Sample] | None,
) -> Row:
    """A row from the samples of all rounds.

    read  bytes of weights that are read in a sample's seconds.
    base  samples of the same at width 1.
    """
    seconds = [sample.seconds for sample in samples]
    middle = median(seconds)
    speed = None if read is None else read / middle
    shares = [read / s.seconds / s.bandwidth for s in samples if read is not None and s.bandwidth is not None]
    return Row(
        what=what,
        engine=ENGINE,
        scheme=scheme,
        width=width,
        ms_median=middle * 1e3,
        ms_min=min(seconds) * 1e3,
        tokens_per_second=width / middle,
        gb_per_second=None if speed is None else speed / 1e9,
        share_of_bandwidth=median(shares) if shares else None,
        over_width_1=None if base is None else middle / median(sample.seconds for sample in base),
    )


def bytes_read(layer: Any) -> int | None:
    """Bytes that one product of a layer reads; None for a library's layer, which does not say."""
    if isinstance(layer, NativeLinear):
        return layer.nbytes
    if isinstance(layer, FloatLinear | Int8Linear | GroupLinear):
        held = [getattr(layer, field.name) for field in fields(layer)]
        return sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
    return None


def layers_bytes(layers: Iterable[Any]) -> int | None:
    """Bytes that one product of each layer reads; None where one of them does not say."""
    total = 0
    for layer in layers:
        read = bytes_read(layer)
        if read is None:
            return None
        total += read
    return total


class Memory:
    """The memory's reading speed, measured as often as it is called: `readings` in bytes per second.

    Without the native library, which measures it, a call gives None.
    """

    def __init__(self, threads: int):
        self.readings: list[float] = []
        size = max(1 << 28, 4 * cache_bytes())
        self._read = native.bandwidth_reader(threads, size) if native.usable("portable")[0] else None

    def __call__(self) -> float | None:
        if self._read is None:
            return None
        self.readings.append(self._read())
        return self.readings[-1]


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
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system()}
