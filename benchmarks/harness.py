"""What every benchmark shares: timing in turns, memory in a process of its own, bars."""

from __future__ import annotations

import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "bar",
    "bars_as_text",
    "in_turns",
    "machine",
    "own_peak",
    "peak_memory",
    "per_second",
    "processor_seconds",
    "use_threads",
    "versions",
]


def use_threads(count: int) -> None:
    """Hold all libraries, and those of child processes, to `count` threads.

    JAX has a pool of its own that no setting holds back: the process is confined to so many cores.
    """
    torch.set_num_threads(count)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-count:])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, the core packages and the named peers (absent ones are said so)."""
    found = {"python": platform.python_version()}
    for name in ("subbayes", "torch", "numpy", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Processor, its vectors, cores, and the load at the end, which tells a busy machine."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def in_turns(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run the cases one after another, `rounds` times, so that drift meets all of them.

    Args:
        cases: by name, a function that does one measurement and returns its figure.
        rounds: how often each is measured.
    """
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, measure in cases.items():
            figures[name].append(measure())
    return figures


def summary(values: list[float]) -> dict[str, float]:
    """Median, least and largest of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bar(what: str, measured: float, limit: float, better: str = "higher") -> dict[str, Any]:
    """A figure beside the bar it is held to."""
    holds = measured >= limit if better == "higher" else measured <= limit
    return {
        "what": what,
        "measured": round(measured, 4),
        "bar": limit,
        "better": better,
        "holds": bool(holds),
    }


def bars_as_text(bars: list[dict[str, Any]]) -> str:
    """A line per bar."""
    signs = {"higher": ">=", "lower": "<="}
    return "\n".join(
        f"{'holds ' if b['holds'] else 'MISSED'}  {b['what']}: {b['measured']:g} "
        f"{signs[b['better']]} {b['bar']:g}"
        for b in bars
    )


def peak_memory(code: str) -> float:
    """Peak resident memory in MiB of a fresh process that runs `code`."""
    line = code + "\nfrom benchmarks.harness import own_peak\nprint(own_peak())"
    out = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    return float(out.stdout.split()[-1])


def seconds(work: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def per_second(work: Callable[[], Any], at_least: float = 0.2) -> float:
    """Calls per second, of as many as fill `at_least` seconds after a first one."""
    work()
    calls = 0
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < at_least:
        work()
        calls += 1
    return calls / spent


def processor_seconds(work: Callable[[], Any], repeats: int = 1) -> float:
    """Processor time of one call, which other processes disturb less than the clock."""
    start = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - start) / repeats


def own_peak() -> float:
    """Peak resident memory of this process so far, in MiB.

    On Linux what the kernel notes of the program itself: `getrusage` counts the process it was
    forked from too, which may be larger.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
