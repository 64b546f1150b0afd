"""This processor: what it can do, `coterie bench`, growth over a decade, and the memory of a large step.

    python benchmarks/cpu.py [--quick] [--only PART ...] [--records 6666] [--json FILE] [--plot FILE]

The limit is what one and two threads reach in a large matrix product and in the papers' second convolution.
`--records` takes a full-batch step of ResNet-18 on so many records in a process of its own and reports its
time and the most memory it ever held; without it, steps on 32 to 256 records show that memory does not grow.
`--only` measures some parts alone and leaves the others as they are in the file.
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
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from coterie.bench.records import PARTS, BenchResult, run_bench
from coterie.cli.bench import show
from coterie.data.records import Task
from coterie.engines.memory import keep_freed_memory
from coterie.models import ModelSettings, build_model
from coterie.privacy import SecretKey
from coterie.training import cpu_kernels
from coterie.training.clipping import clipped_sum
from coterie.training.cpu_kernels import PooledConvolution
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


OPERATIONS = {
    "aten::mkldnn_convolution": "convolution of the second layer",
    "aten::max_pool2d_with_indices": "its max pooling",
    "aten::mm": "dense layer",
    "aten::addmm": "dense layer",
    "aten::bmm": "dense layer",
}
KERNELS: dict[str, tuple[Any, str]] = {
    "convolution of the first layer and its max pooling, a kernel": (PooledConvolution, "forward"),
    "per-record weight gradients of both layers, a kernel": (PooledConvolution, "weight_rows"),
    "input gradient of the second layer, a kernel": (PooledConvolution, "input_gradient"),
    "norms, in float64, a kernel": (cpu_kernels, "squared_norms"),
    "clipped sums, in float64, a kernel": (cpu_kernels, "scaled_sum"),
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

    def step() -> Tensor:
        return clipped_sum(learner, start, batch, 1.0)

    whole = 1000 * best(step)
    # Many at a time: a stream makes some ahead, which a single call may find ready.
    noise = 1000 / REPEATS * best(lambda: stream.normal(REPEATS * len(start)))
    found: dict[str, float] = {}
    for name, (owner, function) in KERNELS.items():
        found[name] = 1000 * time_within(owner, function, step)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(REPEATS):
            step()
    torch.set_num_threads(before)
    for event in recorded.key_averages():
        if event.key in OPERATIONS:
            name = OPERATIONS[event.key]
            found[name] = found.get(name, 0.0) + event.self_cpu_time_total / 1000 / REPEATS
    found["everything else, and Python"] = max(0.0, whole - sum(found.values()))
    return {"step": whole, **found, "noise": noise}


def time_within(owner: Any, name: str, work: Callable[[], object]) -> float:
    """Seconds that a piece of work spends in one function, the least of several attempts."""
    original = getattr(owner, name)
    spent = 0.0

    def timed(*arguments: Any, **options: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        result = original(*arguments, **options)
        spent += time.perf_counter() - began
        return result

    setattr(owner, name, timed)
    try:
        times = []
        for _ in range(REPEATS):
            spent = 0.0
            work()
            times.append(spent)
    finally:
        setattr(owner, name, original)
    return min(times)


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
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "step", "memory"), help="these parts alone")
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
    only = options.only or (*PARTS, "step", "memory")
    content: dict[str, Any] = {}
    if "step" in only:
        content["limits"] = limits()
        for what, speed in content["limits"].items():
            print(f"{what}: {speed:.0f} GFLOP/s")
        content["step"] = in_own_process("--profile")
        for what, milliseconds in content["step"].items():
            print(f"{what}: {milliseconds:.2f} ms")
    if "memory" in only or options.records:
        sizes = GROWING if options.records is None else (options.records,)
        content["resnet18_full_batch"] = [large_step(size) for size in sizes]
    result = run_bench(options.quick, parts=options.only)
    show(result)
    if options.json:
        write(options.json, content, result)
    if options.plot and result.scaling:
        draw(result, options.plot)


def write(path: Path, content: dict[str, Any], result: BenchResult) -> None:
    """Everything that was measured, beside what the file holds of other parts."""
    before = json.loads(path.read_text()) if path.exists() else {}
    measured = result.to_json()
    rows = {
        model: [row for row in part["rows"] if row["model"] == model]
        for part in ({"rows": before.get("rows", [])}, measured)
        for model in dict.fromkeys(row["model"] for row in part["rows"])
    }
    order = sorted(rows, key=lambda model: PARTS.index(model) if model in PARTS else len(PARTS))
    measured["rows"] = [row for model in order for row in rows[model]]
    measured["ratios"] = {row["way"]: row["ratio"] for row in reversed(measured["rows"]) if row["ratio"]}
    measured["scaling"] = measured["scaling"] or before.get("scaling", [])
    path.write_text(json.dumps({**before, **measured, **content}, indent=2) + "\n")


if __name__ == "__main__":
    main()
