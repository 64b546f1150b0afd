"""Many clients on one GPU: is the stacked step right there, how fast is it, and where does its time go?

    python benchmarks/gpu.py [--only resnet18] [--seconds 230] [--json results.json]

Prints one line per variant as it finishes, then a table. Every variant does the same work: DP-SGD with
Poisson batches of 32 on average (heads on features: 256, a row of ResNet-18: 128; peers: batches of exactly
so many), coins, clipping, noise and the step included; a figure is useful sample gradients per second,
padding not counted. A variant that fails prints its exception and the rest goes on; variants that no longer
fit the time are skipped by name. `--device cpu --tiny` tries the script itself.
"""

import argparse
import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.privacy import Adjacency, PoissonSteps
from coterie.training import philox
from coterie.training.clipping import MARGIN, clip_rows, clip_scales
from coterie.training.learner import Batch, Learner, precision
from coterie.training.local_sgd import LocalJob, LocalSGD, LocalTrainer, train_one
from coterie.training.parameters import flatten
from coterie.training.stacked import StackedJob, StackedTrainer

LARGE_BATCHES = "resnet18, batches of 128"
SHAPES = {"cnn": (1, 28, 28), "resnet18": (3, 32, 32), "lstm": (80,), "head": (243, 8, 8)}
TINY_SHAPES = {"cnn": (1, 8, 8), "resnet18": (3, 8, 8), "lstm": (6,), "head": (9, 3, 3)}
CHARACTERS = 77
MODELS = {"head": "softmax", LARGE_BATCHES: "resnet18"}
"""What is called otherwise here: a head is a softmax on scattering features of colour images, 32 x 32."""
BATCH = 32
BATCHES = {"head": 256, LARGE_BATCHES: 128}
"""Of models that are trained on larger batches."""
CLIP = 1.0
NOISE = 1.0
LR = 0.1


@dataclass
class Bench:
    """What was measured, and how much time is left."""

    device: torch.device
    tiny: bool
    deadline: float
    only: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any]) -> float:
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def variant(self, name: str, needs: float, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run one variant if its time is left; keep what it returns, or why it failed."""
        left = self.deadline - time.perf_counter()
        row: dict[str, Any] = {"variant": name}
        if self.only not in name:
            return row
        if left < needs and not self.tiny:
            row["skipped"] = f"{left:.0f} s left, needs about {needs:.0f}"
        else:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            try:
                row.update(run())
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
                traceback.print_exc(limit=-4)
            row["total_seconds"] = round(time.perf_counter() - began, 1)
            if self.device.type == "cuda":
                row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        torch._dynamo.reset()
        return row


def task_of(model: str) -> Task:
    if model == "lstm":
        return Task("classification", SHAPES[model], classes=CHARACTERS, vocabulary=CHARACTERS)
    return Task(kind="classification", shape=SHAPES[model.partition(",")[0]], classes=10)


def build(name: str, seed: int = 0) -> nn.Module:
    return build_model(ModelSettings(name=MODELS.get(name, name)), task_of(name), seed)


def batch_of(bench: Bench, name: str) -> int:
    return 4 if bench.tiny else BATCHES.get(name, BATCH)


def setup(bench: Bench, name: str, clients: int, records: int) -> tuple[Learner, list[Batch], Tensor]:
    task = task_of(name)
    model = build(name)
    start = torch.from_numpy(flatten(model)).to(bench.device)
    generator = torch.Generator(bench.device).manual_seed(1)
    here = {"device": bench.device, "generator": generator}

    def features() -> Tensor:
        if task.vocabulary is not None:
            return torch.randint(task.vocabulary, (records, *task.shape), **here)
        return torch.rand(records, *task.shape, **here)

    data = [Batch(features(), torch.randint(task.outputs, (records,), **here)) for _ in range(clients)]
    return Learner(model, task, bench.device), data, start


def trainer_of(learner: Learner, data: list[Batch], **options: Any) -> StackedTrainer:
    table = Batch(torch.cat([b.features for b in data]), torch.cat([b.targets for b in data]))
    return StackedTrainer(learner, table, [len(b) for b in data], **options)


def poisson(records: int, batch: int) -> PoissonSteps:
    return PoissonSteps(
        clip=CLIP,
        noise_multiplier=NOISE,
        records=records,
        batch=batch,
        epochs=1,
        adjacency=Adjacency.ZERO_OUT,
    )


# --- is it right ------------------------------------------------------------------------------------


def check(bench: Bench, name: str, tile: int) -> dict[str, Any]:
    """A few steps of three clients against torch.func, client by client, with the same coins and noise."""
    learner, data, start = setup(bench, name, 3, 40)
    slow = Learner(build(name), task_of(name), bench.device, fast=False)
    plan = poisson(40, 10)
    jobs = [StackedJob(w, start, plan, LR, noise_key=11 + w, coin_key=2**62 + w) for w in range(3)]
    trainer = trainer_of(learner, data, tile=tile, tf32=False)
    found = trainer.train(jobs)
    worst = 0.0
    torch.backends.cudnn.allow_tf32 = False  # the twin computes in full precision
    for which, job in enumerate(jobs):
        keys = [philox.split_keys([key], bench.device) for key in (job.coin_key, job.noise_key)]
        rate = torch.tensor([plan.rate], dtype=torch.float64, device=bench.device)
        steps = torch.arange(plan.steps, device=bench.device)
        coins = philox.coins(keys[0], rate, steps, philox.places(40, 4, bench.device))[:, 0, :40]
        parameters = start.double()
        for step in range(plan.steps):
            rows = slow.gradients(parameters.float(), data[which].take(coins[step]))
            total = clip_rows(rows, CLIP).sum(dim=0)
            at = torch.tensor([step], device=bench.device)
            pairs = philox.places(len(total), 2, bench.device)
            total += plan.noise_std * philox.normals(keys[1], at, pairs)[0, : len(total)]
            parameters = parameters - LR * total / plan.denominator
        expected = parameters - start.double()
        worst = max(worst, float((found[which] - expected).norm() / expected.norm()))
    torch.backends.cudnn.allow_tf32 = True  # torch's default, which the peers get
    return {"relative_error": worst, "ok": worst < 1e-4, "own_kernels": trainer.own_kernels}


# --- ours -------------------------------------------------------------------------------------------


def ours(
    bench: Bench,
    name: str,
    clients: int,
    records: int,
    *,
    profile: bool = False,
    **options: Any,
) -> dict[str, Any]:
    learner, data, start = setup(bench, name, clients, records)
    plan = poisson(records, batch_of(bench, name))
    jobs = [StackedJob(w, start, plan, LR, noise_key=3 + w, coin_key=5 + w) for w in range(clients)]
    began = time.perf_counter()
    trainer = trainer_of(learner, data, **options)
    trainer.train(jobs)
    bench.synchronize()
    first_round = time.perf_counter() - began
    seconds = min(bench.timed(lambda: trainer.train(jobs)) for _ in range(3))
    program = next(iter(trainer._programs.values()))
    draw = partial(program.draw, 0, plan.steps, int(program.sizes.max()))
    drawn = draw()[1].shape[1]
    coins = bench.timed(draw)
    result = {
        "samples_per_second": round(drawn / seconds),
        "microseconds_per_step": round(1e6 * seconds / plan.steps),
        "of_which_coins": round(1e6 * coins / plan.steps),
        "slots_per_sample": round(program.tiles * trainer.tile * plan.steps / drawn, 3),
        "first_round_seconds": round(first_round, 1),
        "own_kernels": trainer.own_kernels,
    }
    if profile and bench.device.type == "cuda":
        result["kernels"] = kernels(lambda: trainer.train(jobs), plan.steps)
    return result


def kernels(work: Callable[[], Any], steps: int) -> list[str]:
    """Where the microseconds of a step go: the kernels that take most."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    lines = [f"{total / steps:8.1f} us a step in all kernels"]
    for event in events[:28]:
        each = event.self_device_time_total / steps
        lines.append(f"{each:8.1f} us  x{event.count / steps:5.1f}  {event.key[:110]}")
    print("\n".join(lines), flush=True)
    return lines


# --- peers ------------------------------------------------------------------------------------------


def loop(
    bench: Bench, name: str, clients: int, step: Callable[[nn.Module], Callable[[Tensor, Tensor], None]]
) -> dict[str, Any]:
    """A Python loop over clients, each with its own model; `step` prepares one client's training step."""
    size = batch_of(bench, name)
    _, data, _ = setup(bench, name, clients, size)
    models = [build(name, seed=w).to(bench.device) for w in range(clients)]
    steps = [step(model) for model in models]

    def round_of_steps() -> None:
        for one, batch in zip(steps, data, strict=True):
            one(batch.features[:size], batch.targets[:size])

    for _ in range(2):
        round_of_steps()
    times = [bench.timed(round_of_steps) for _ in range(3 if name == "resnet18" else 8)]
    return {"samples_per_second": round(clients * size / sorted(times)[len(times) // 2])}


def plain_step(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)

    def step(features: Tensor, targets: Tensor) -> None:
        optimiser.zero_grad()
        functional.cross_entropy(model(features), targets).backward()
        optimiser.step()

    return step


def opacus_step(mode: str) -> Callable[[nn.Module], Callable[[Tensor, Tensor], None]]:
    def prepare(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
        from opacus import GradSampleModule
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer
        from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        common = {"noise_multiplier": NOISE, "max_grad_norm": CLIP, "expected_batch_size": BATCH}
        if mode == "hooks":
            wrapped = GradSampleModule(model)
            optimiser = DPOptimizer(torch.optim.SGD(wrapped.parameters(), lr=LR), **common)

            def step(features: Tensor, targets: Tensor) -> None:
                optimiser.zero_grad()
                functional.cross_entropy(wrapped(features), targets).backward()
                optimiser.step()

        else:
            wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP, use_ghost_clipping=True)
            optimiser = DPOptimizerFastGradientClipping(
                torch.optim.SGD(wrapped.parameters(), lr=LR), **common
            )
            criterion = DPLossFastGradientClipping(wrapped, optimiser, nn.CrossEntropyLoss(reduction="mean"))

            def step(features: Tensor, targets: Tensor) -> None:
                optimiser.zero_grad()
                criterion(wrapped(features), targets).backward()
                optimiser.step()

        return step

    return prepare


def vmapped(bench: Bench, name: str, clients: int, compiled: bool) -> dict[str, Any]:
    """torch.func over clients and samples at once, with clipping, noise and step; fixed batches."""
    size = batch_of(bench, name)
    _, data, _ = setup(bench, name, clients, size)
    models = [build(name, seed=w).to(bench.device) for w in range(clients)]
    weights, _ = stack_module_state(models)
    weights = {key: value.detach() for key, value in weights.items()}
    skeleton = models[0].to("meta")
    features = torch.stack([batch.features[:size] for batch in data])
    targets = torch.stack([batch.targets[:size] for batch in data])

    def loss(parameters: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(skeleton, parameters, (record[None],)), target[None])

    per_record = vmap(vmap(grad(loss), in_dims=(None, 0, 0)))

    def step(parameters: dict[str, Tensor], features: Tensor, targets: Tensor) -> dict[str, Tensor]:
        rows = per_record(parameters, features, targets)
        squares = sum(value.flatten(2).double().square().sum(2) for value in rows.values())
        scales = clip_scales(squares.sqrt(), CLIP * MARGIN).float()
        moved = {}
        for key, value in rows.items():
            total = torch.einsum("cs,cs...->c...", scales, value)
            total = total + NOISE * CLIP * torch.randn_like(total)
            moved[key] = parameters[key] - LR * total / size
        return moved

    one = torch.compile(step, dynamic=False) if compiled else step
    for _ in range(3):
        one(weights, features, targets)
    times = [bench.timed(lambda: one(weights, features, targets)) for _ in range(8)]
    return {"samples_per_second": round(clients * size / sorted(times)[len(times) // 2])}


# --- a round of client-level learning -----------------------------------------------------------------


def check_local(bench: Bench) -> dict[str, Any]:
    """Clients that learn as one program against each of them alone, on the same records in the same order."""
    learner, data, start = setup(bench, "cnn", 5, 23)
    rule = LocalSGD(epochs=2, batch=10, lr=LR, momentum=0.5)
    batches = [rule.batches(23, seed) for seed in range(5)]
    job = LocalJob(lambda: start.expand(5, -1).clone(), data, batches, rule, wave=5)
    # In full precision: a few steps of rounding to ten bits already tell two ways apart by some percent.
    trainer = LocalTrainer(learner, tf32=False)
    twice = [trainer.train([job])[0] for _ in range(2)]
    with precision(tf32=False):
        alone = torch.stack(
            [train_one(learner, start, own, o, rule) for own, o in zip(data, batches, strict=True)]
        )
    worst = float(((twice[1] - alone).norm(dim=1) / alone.norm(dim=1)).max())
    program = next(iter(trainer._programs.values()))
    return {
        "relative_error": worst,
        "ok": worst < 1e-2 and torch.equal(*twice),
        "own_kernels": program.own_kernels,
        "captured": program.captured,
    }


def round_work(bench: Bench) -> Any:
    from coterie.bench.work import RoundWork  # here: it needs more packages than the rest

    shape = SHAPES["cnn"]
    if bench.tiny:
        return RoundWork(clients=6, sampled=3, records=8, epochs=2, shape=shape)
    return RoundWork(clients=1000, sampled=100, shape=shape)


def our_client_level_round(bench: Bench) -> dict[str, Any]:
    """Sampled, charged, trained, clipped, noised: the round of the engine that runs experiments."""
    from coterie.bench.work import our_round

    work = round_work(bench)
    with our_round(work, bench.device) as run:
        first = bench.timed(run)
        speeds = [round_speed(bench, run) for _ in range(5)]
        result = {"samples_per_second": round(sorted(speeds)[2]), "first_round_seconds": round(first, 1)}
        if bench.device.type == "cuda":
            result["kernels"] = kernels(run, work.epochs * math.ceil(work.records / work.batch))
    return result


def plain_client_level_round(bench: Bench) -> dict[str, Any]:
    from coterie.bench.peers import plain_round

    work = round_work(bench)
    model = work.build().to(bench.device)
    records = {c.name: (c.train.features, c.train.targets) for c in work.federation().clients}
    loop_over_clients = plain_round(model, records, work.sampled, work.lr, work.epochs, work.batch)

    def run() -> int:
        return work.samples(loop_over_clients())

    run()
    return {"samples_per_second": round(sorted(round_speed(bench, run) for _ in range(3))[1])}


def round_speed(bench: Bench, run: Callable[[], int]) -> float:
    """Records a second of one round, which returns how many went through a model."""
    samples: list[int] = []
    seconds = bench.timed(lambda: samples.append(run()))
    return samples[0] / seconds


# --- all of it --------------------------------------------------------------------------------------


def measure(bench: Bench) -> None:
    few, many, records = (21, 84, 2000) if not bench.tiny else (3, 4, 40)
    peers = few if not bench.tiny else 2

    def cnn(label: str, needs: float, clients: int = few, **options: Any) -> None:
        bench.variant(
            f"cnn {clients} clients: {label}",
            needs,
            lambda: ours(bench, "cnn", clients, records if clients == few else records // 2, **options),
        )

    def large(name: str, label: str, needs: float, **options: Any) -> None:
        size = 6 * batch_of(bench, name) if not bench.tiny else 8
        bench.variant(
            f"{name} {few} clients: {label}",
            needs,
            lambda: ours(bench, name, few if not bench.tiny else 2, size, **options),
        )

    resnet, lstm = partial(large, "resnet18"), partial(large, "lstm")

    def head(label: str, needs: float, **options: Any) -> None:
        size = 6666 if not bench.tiny else 8
        bench.variant(
            f"head {few} clients: {label}", needs, lambda: ours(bench, "head", few, size, **options)
        )

    bench.variant("check cnn, own kernels", 10, lambda: check(bench, "cnn", 4))
    bench.variant("cnn peer: plain PyTorch loop", 5, lambda: loop(bench, "cnn", peers, plain_step))
    bench.variant("cnn peer: Opacus hooks loop", 5, lambda: loop(bench, "cnn", peers, opacus_step("hooks")))
    cnn("tile 4, own kernels, graph, tf32", 15, profile=True)
    cnn("tile 8, own kernels, graph, tf32", 10, tile=8)
    cnn("tile 2, own kernels, graph, tf32", 10, tile=2)
    cnn("tile 4, own kernels, graph", 10, tf32=False)
    cnn("tile 4, own kernels, graph, tf32", 10, many)
    bench.variant("cnn peer: vmap compiled", 40, lambda: vmapped(bench, "cnn", peers, True))
    bench.variant("check resnet18, own kernels", 20, lambda: check(bench, "resnet18", 4))
    resnet("tile 8, own kernels, graph, tf32", 20, tile=8, profile=True)
    resnet("tile 4, own kernels, graph, tf32", 15)
    large(LARGE_BATCHES, "tile 4, own kernels, graph, tf32", 20, profile=True)
    bench.variant("resnet18 peer: plain PyTorch loop", 8, lambda: loop(bench, "resnet18", peers, plain_step))
    bench.variant(
        "resnet18 peer: Opacus ghost loop", 15, lambda: loop(bench, "resnet18", peers, opacus_step("ghost"))
    )
    bench.variant("check lstm, own kernels", 20, lambda: check(bench, "lstm", 4))
    lstm("tile 4, own kernels, graph, tf32", 20, profile=True)
    lstm("tile 4, torch's kernels, graph, tf32", 20, own_kernels=False)
    bench.variant("check client-level, own kernels", 10, lambda: check_local(bench))
    bench.variant("client-level round, 100 of 1,000: ours", 10, lambda: our_client_level_round(bench))
    bench.variant("client-level round, 100 of 1,000: plain loop", 25, lambda: plain_client_level_round(bench))
    bench.variant("check head, own kernels", 10, lambda: check(bench, "head", 16))
    head("own kernels, graph, tf32", 15, profile=True)
    head("torch's kernels, graph, tf32", 15, own_kernels=False)
    for label, step in (("plain PyTorch", plain_step), ("Opacus ghost", opacus_step("ghost"))):
        bench.variant(f"head peer: {label} loop", 8, partial(loop, bench, "head", peers, step))
    resnet("tile 8, torch's kernels, graph", 15, tile=8, own_kernels=False, tf32=False)
    cnn("tile 4, torch's kernels, graph, tf32", 10, own_kernels=False)
    bench.variant("cnn peer: vmap eager", 10, lambda: vmapped(bench, "cnn", peers, False))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'variant':52} {'samples/s':>12} {'us/step':>9} {'slots':>6} {'GiB':>6} {'first s':>8}"]
    for row in rows:
        if "samples_per_second" not in row:
            note = (
                row.get("skipped") or row.get("failed") or f"relative error {row.get('relative_error'):.1e}"
            )
            lines.append(f"{row['variant']:52} {note[:60]}")
            continue
        lines.append(
            f"{row['variant']:52} {row['samples_per_second']:>12,} {row.get('microseconds_per_step', ''):>9} "
            f"{row.get('slots_per_sample', ''):>6} {row.get('peak_gib', ''):>6} "
            f"{row.get('first_round_seconds', ''):>8}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=230.0, help="start no variant that would end later")
    parser.add_argument("--tiny", action="store_true", help="sizes that only try the script")
    parser.add_argument("--only", default="", help="only variants with this in their name")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.tiny:
        SHAPES.update(TINY_SHAPES)
    device = torch.device(chosen.device)
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    )
    print(f"{name}, torch {torch.__version__}", flush=True)
    bench = Bench(device, chosen.tiny, time.perf_counter() + chosen.seconds, chosen.only)
    measure(bench)
    print(table(bench.rows))
    if chosen.json is not None:
        content = {"machine": name, "torch": torch.__version__, "batch": BATCH, "rows": bench.rows}
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
