"""This processor: what it can do, `coterie bench`, growth over a decade, and the memory of a large step.

    python benchmarks/cpu.py [--quick] [--records 6666] [--json results.json] [--plot growth.png]

The limit is what one and two threads reach in a large matrix product and in the papers' second convolution.
`--records` takes a full-batch step of ResNet-18 on so many records in a process of its own and reports its
time and the most memory it ever held; without it, steps on 32 to 256 records show that memory does not grow.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from coterie.cli.bench import show
from coterie.data.records import Task
from coterie.engines.memory import keep_freed_memory
from coterie.experiment.bench import BenchResult, run_bench
from coterie.models import ModelSettings, build_model
from coterie.privacy import SecretKey
from coterie.training.clipping import clipped_sum
from coterie.training.learner import Batch, Learner

GROWING = (32, 64, 128, 256)
REPEATS = 20


def best(run: Callable[[], object]) -> float:
    """Least seconds of several attempts."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def limits() -> dict[str, float]:
    """Thousand millions of float32 operations a second, by what and by how many threads."""
    side = 1024
    left, right = torch.randn(side, side), torch.randn(side, side)
    images = torch.randn(32, 16, 14, 14).contiguous(memory_format=torch.channels_last)
    kernels = torch.randn(32, 16, 5, 5).contiguous(memory_format=torch.channels_last)
    found = {}
    before = torch.get_num_threads()
    for threads in sorted({1, before}):
        torch.set_num_threads(threads)
        found[f"matrix product, {threads} threads"] = 2e-9 * side**3 / best(lambda: left @ right)
        operations = 2 * 32 * 14 * 14 * 32 * 16 * 5 * 5
        seconds = best(lambda: functional.conv2d(images, kernels, padding=2))
        found[f"convolution, {threads} threads"] = 1e-9 * operations / seconds
    torch.set_num_threads(before)
    return found


PARTS = {
    "aten::convolution_backward": "input gradient and per-record weight gradients of the second layer",
    "aten::mkldnn_convolution": "convolution of the second layer",
    "aten::bmm": "per-record weight gradients of the first layer",
    "aten::baddbmm": "convolution of the first layer, as a product with patches",
    "aten::max_pool2d_with_indices": "max pooling, forwards",
    "aten::max_pool2d_with_indices_backward": "max pooling, backwards",
    "aten::copy_": "copies: patches, orders of memory, float64",
    "aten::linalg_vector_norm": "norms, in float64",
    "aten::mm": "clipped sums, in float64, and the dense layer",
}


def step_profile() -> dict[str, float]:
    """Milliseconds of one core in a step of the papers' CNN on 32 records, in its parts and in its noise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    task = Task(kind="classification", shape=(1, 28, 28), classes=10)
    learner = Learner(build_model(ModelSettings(name="cnn"), task, seed=0), task, torch.device("cpu"))
    batch, start = Batch(torch.randn(32, 1, 28, 28), torch.arange(32) % 10), learner.initial()
    stream = SecretKey.from_os().stream("noise", subject="", round=0, release="", input_hash="")
    whole = 1000 * best(lambda: clipped_sum(learner, start, batch, 1.0))
    noise = 1000 * best(lambda: stream.normal(len(start)))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(REPEATS):
            clipped_sum(learner, start, batch, 1.0)
    torch.set_num_threads(before)
    spent = {event.key: event.self_cpu_time_total / 1000 / REPEATS for event in recorded.key_averages()}
    found = {name: spent.get(key, 0.0) for key, name in PARTS.items()}
    found["everything else, and Python"] = max(0.0, whole - sum(found.values()))
    return {"step": whole, **found, "noise": noise}


def full_batch_step(records: int) -> dict[str, float]:
    """One full-batch gradient of ResNet-18 with clipping, on one core, in this process."""
    torch.set_num_threads(1)
    keep_freed_memory()
    task = Task(kind="classification", shape=(3, 32, 32), classes=10)
    learner = Learner(build_model(ModelSettings(name="resnet18"), task, seed=0), task, torch.device("cpu"))
    batch = Batch(torch.randn(records, 3, 32, 32), torch.arange(records) % 10)
    began = time.perf_counter()
    clipped_sum(learner, learner.initial(), batch, 1.0)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    table = batch.features.nbytes
    return {"records": records, "seconds": seconds, "peak_bytes": peak, "table_bytes": table}


def in_own_process(*options: str) -> dict[str, float]:
    """What this script prints with such options, in a process whose memory settings are its own."""
    command = [sys.executable, __file__, *options]
    answer: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return answer


def large_step(records: int) -> dict[str, float]:
    answer = in_own_process("--step", str(records))
    print(
        f"ResNet-18, one step on {records} records: {answer['seconds']:.1f} s, "
        f"at most {answer['peak_bytes'] / 2**20:.0f} MiB, {answer['table_bytes'] / 2**20:.0f} of them records"
    )
    return answer


def draw(result: BenchResult, path: Path) -> None:
    """Seconds against size in logarithms, one panel for each axis; the line grows in proportion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(result.scaling), 3.0), layout="constrained")
    panels: Sequence[Any] = figure.subplots(1, len(result.scaling))
    for panel, scaling in zip(panels, result.scaling, strict=True):
        first, seconds = scaling.sizes[0], scaling.seconds[0]
        panel.loglog(scaling.sizes, scaling.seconds, "o", color="#1f5fa8", label="measured")
        proportional = [seconds * size / first for size in scaling.sizes]
        panel.loglog(scaling.sizes, proportional, "--", color="#888888", label="in proportion")
        panel.set_xticks(scaling.sizes, [f"{size:,}" for size in scaling.sizes])
        panel.minorticks_off()
        panel.set_xlabel(scaling.axis)
        panel.set_title(f"exponent {scaling.exponent:.2f}", fontsize=10)
    panels[0].set_ylabel("seconds a round")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{result.machine}, torch {result.torch}", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, no growth")
    parser.add_argument("--records", type=int, help="records of the full-batch step of ResNet-18")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--plot", type=Path, help="draw the growth into this file")
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.profile:
        print(json.dumps(step_profile()))
        return
    if options.step:
        print(json.dumps(full_batch_step(options.step)))
        return
    found = limits()
    for what, speed in found.items():
        print(f"{what}: {speed:.0f} GFLOP/s")
    parts = in_own_process("--profile")
    for what, milliseconds in parts.items():
        print(f"{what}: {milliseconds:.2f} ms")
    steps = [large_step(size) for size in (GROWING if options.records is None else (options.records,))]
    result = run_bench(options.quick)
    show(result)
    if options.json:
        content = {**result.to_json(), "limits": found, "step": parts, "resnet18_full_batch": steps}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    if options.plot and result.scaling:
        draw(result, options.plot)


if __name__ == "__main__":
    main()
