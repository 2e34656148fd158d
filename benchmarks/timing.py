"""Timing of jobs that take turns, as ratios to the first of them, and their peak memory."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Jobs = Mapping[str, Callable[[], object]]


def in_turn(jobs: Jobs, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of every job in every round, after one that does not count.

    The order is drawn anew in every round, always from one seed: a job leaves caches and memory as it likes them, and
    no other is to run behind it more often than the rest.
    """
    found: dict[str, list[float]] = {name: [] for name in jobs}
    drawn = random.Random(0)
    for number in range(rounds + 1):
        for name in drawn.sample(list(jobs), len(jobs)):
            took = _seconds(jobs[name], device)
            if number:
                found[name].append(took)
    return found


def ratios(seconds: Mapping[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Median against median and fastest against fastest, in units of the first job."""
    own = next(iter(seconds.values()))
    return {
        name: (statistics.median(work) / statistics.median(own), min(work) / min(own)) for name, work in seconds.items()
    }


def peak_memory(make: Callable[[str], Jobs], names: list[str]) -> dict[str, float]:
    """By how many MiB each job raises the peak of a process that has run the first job; each in a process of its own.

    Args:
        make: builds the jobs for a device; importable, because it runs in the new processes.
        names: which jobs.
    """
    context = multiprocessing.get_context("spawn")
    found = {}
    for name in names:
        with context.Pool(1) as pool:
            found[name] = pool.apply(_raised, (make, name))
    return found


def _raised(make: Callable[[str], Jobs], name: str) -> float:
    jobs = make("cpu")
    next(iter(jobs.values()))()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far is forgotten
    before = _kibibytes("VmRSS")
    jobs[name]()
    return (_kibibytes("VmHWM") - before) / 1024


def _kibibytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}; memory is measured on Linux only")


def _seconds(job: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    job()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started
