"""Where a report was measured. No name of the host."""

import torch

from compress.report.schema import Machine
from runtime.bench.measure import machine


def describe(device: torch.device, kernels: str) -> Machine:
    """CPU model, cores that this process may use, the kernels that decode, device."""
    told = machine()
    return Machine(
        cpu=told["cpu"],
        cores=told["cores"],
        instruction_path=kernels,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )
