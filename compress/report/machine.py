"""Where a report was measured. No name of the host."""

import os
import platform
import re
from pathlib import Path

import torch

from compress.report.schema import Machine


def describe(device: torch.device, kernels: str) -> Machine:
    """CPU model, cores that this process may use, the kernels that decode, device."""
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        cpu=_cpu_name(),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        instruction_path=kernels,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown"
