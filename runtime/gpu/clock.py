"""The device's time between two moments of its work, without waiting for either."""

from time import perf_counter

import torch


class Clock:
    """What device_rounds.DeviceRounds says of time, for something on a device; without CUDA the host's time."""

    device: torch.device

    def mark(self) -> object:
        """See device_rounds.DeviceRounds."""
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, first: object, second: object) -> float:
        """See device_rounds.DeviceRounds."""
        if isinstance(first, float) and isinstance(second, float):
            return second - first
        return first.elapsed_time(second) / 1000  # type: ignore[attr-defined]
