"""Where a report was measured. No name of the host."""

import os

import torch

from compress.report.schema import Machine
from runtime.bench.measure import machine


def describe(device: torch.device, kernels: str) -> Machine:
    """CPU model, cores that this process may use, the kernels that decode, device."""
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        cpu=machine()["cpu"],
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        instruction_path=kernels,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )
