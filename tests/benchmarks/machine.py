"""The machine a benchmark ran on, and the memory that a call takes at its peak."""

import os
import platform
from collections.abc import Callable
from pathlib import Path

import psutil
import torch


def describe() -> dict[str, str | int | float]:
    """What a reader needs to judge the figures."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def peak_memory[T](action: Callable[[], T]) -> tuple[T, int]:
    """What the action returns, and by how many bytes this process grew at most meanwhile (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the mark of the peak
    before = _status("VmRSS")
    result = action()
    return result, max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    (line,) = [line for line in _lines("/proc/self/status") if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
