"""Ways of doing the same work, timed in turns: what else happens on the machine meets everyone alike."""

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

WARM_UP = 4  # turns before those that are timed: kernels are made for every size of batch that comes up
PAUSE = 0.2  # seconds of rest before each turn: threads of the one before stop spinning
OURS = "ours"

T = TypeVar("T")
Watch = Callable[[str], None]
Way = Callable[[], int]
"""Does the work once and returns how many records went through a model."""


@dataclass(frozen=True)
class Timing:
    """One way of doing the work; `ratio` is our samples per second over its own, None for ours."""

    model: str
    way: str
    samples_per_second: float
    ratio: float | None


def take_turns(
    model: str,
    ways: Mapping[str, Way],
    device: torch.device,
    repeats: int,
    watch: Watch,
    warm_up: int = WARM_UP,
) -> list[Timing]:
    """Median speed of each way, in turns, to and fro."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    turns = warm_up + repeats
    for turn in range(turns):
        for name, run in list(ways.items())[:: 1 if turn % 2 else -1]:
            watch(f"{model}: {name}, {turn} of {turns}")
            samples, seconds = timed(run, device)
            if turn >= warm_up:
                speeds[name].append(samples / seconds)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return [
        Timing(model, name, speed, None if name == OURS else medians[OURS] / speed)
        for name, speed in medians.items()
    ]


def timed(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a call returns, and the seconds it took."""
    time.sleep(PAUSE)
    began = time.perf_counter()
    found = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return found, time.perf_counter() - began


def machine_name() -> str:
    """Processor, cores and GPU of this machine, as one line."""
    facts = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", facts.read_text() if facts.exists() else "", re.MULTILINE)
    name = model[1] if model else platform.processor() or platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {os.cpu_count()} cores{gpu}"
