"""How fast this machine trains many clients privately: ours against the peers that are installed.

Everyone does the same work (so many clients, steps and records a step, clipping and noise included; plain SGD
without both), in one run, in turns, and medians count: an absolute figure on a shared machine means little, a
ratio in one run does.
"""

import math
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.algorithms.protocol import Select, Train, TrainJob
from coterie.bench.peers import Peer, installed_peers
from coterie.bench.rounds import ROUNDS, RoundWork, compare_rounds
from coterie.bench.timing import OURS, WARM_UP, Timing, Watch, Way, machine_name, take_turns, timed
from coterie.data import Client, Federation, Records, Task
from coterie.engines.local import LocalEngine, coin_key
from coterie.models import ModelSettings, build_model
from coterie.privacy import (
    Adjacency,
    Budget,
    Ledger,
    PlannedRelease,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    SecretKey,
    ThreatModel,
    Unit,
    UnitPlan,
)
from coterie.training.learner import Batch, Learner
from coterie.training.parameters import flatten

LR, CLIP, NOISE = 0.1, 1.0, 1.0


@dataclass(frozen=True)
class Work:
    """One round that everybody does."""

    model: str
    clients: int
    steps: int
    batch: int = 32
    shape: tuple[int, ...] = (1, 28, 28)

    @property
    def task(self) -> Task:
        return Task(kind="classification", shape=self.shape, classes=10)

    @property
    def records(self) -> int:
        """Records of a client: an epoch of so many steps."""
        return self.steps * self.batch

    @property
    def samples(self) -> int:
        return self.clients * self.steps * self.batch


@dataclass(frozen=True)
class Scaling:
    """How our time grows along one axis."""

    axis: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """Slope in logarithms between the ends: 1 is linear, below 1 is better."""
        growth = math.log(self.seconds[-1] / self.seconds[0])
        return growth / math.log(self.sizes[-1] / self.sizes[0])


@dataclass(frozen=True)
class BenchResult:
    """Everything that was measured, on which machine."""

    machine: str
    torch: str
    device: str
    rows: tuple[Timing, ...]
    scaling: tuple[Scaling, ...]

    @property
    def ratios(self) -> Mapping[str, float]:
        """Our speed over each peer's, the first time that it appears (on the papers' network)."""
        found: dict[str, float] = {}
        for row in self.rows:
            if row.ratio is not None:
                found.setdefault(row.way, row.ratio)
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "torch": self.torch,
            "device": self.device,
            "ratios": dict(self.ratios),
            "rows": [asdict(row) for row in self.rows],
            "scaling": [{**asdict(scaling), "exponent": scaling.exponent} for scaling in self.scaling],
        }


PARTS = ("cnn", "softmax", "resnet18", "rounds", "growth")
QUICK_PARTS = ("cnn", "rounds")


def run_bench(
    quick: bool, watch: Watch = lambda text: None, parts: Collection[str] | None = None
) -> BenchResult:
    """Measure; the quick way takes about a minute, the other one several.

    Args:
        parts: some of `PARTS` alone.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = parts if parts is not None else QUICK_PARTS if quick else PARTS
    works = (
        Work("cnn", clients=21, steps=3),
        Work("softmax", clients=21, steps=10, batch=24, shape=(1, 8, 8)),
        Work("resnet18", clients=2, steps=1, shape=(3, 32, 32)),
    )
    rows: list[Timing] = []
    for work in works:
        if work.model in parts:
            large = work.model == "resnet18"
            repeats, warm_up = 5 if quick or large else 9, 1 if large else WARM_UP
            rows += _compare(work, device, repeats, watch, warm_up)
    if "rounds" in parts:
        work_of_rounds = RoundWork(200, 20) if quick else RoundWork(1000, 100)
        rows += compare_rounds(work_of_rounds, device, repeats=3, warm_up=1, watch=watch)
    scaling = tuple(_scale(device, watch)) if "growth" in parts else ()
    return BenchResult(machine_name(), torch.__version__, device.type, tuple(rows), scaling)


# --- ours and theirs --------------------------------------------------------------------------------


def _compare(
    work: Work, device: torch.device, repeats: int, watch: Watch, warm_up: int = WARM_UP
) -> list[Timing]:
    with _our_engine(work, device) as engine:
        start = flatten(build_model(ModelSettings(name=work.model), work.task, seed=0))
        request = Train("training", tuple(TrainJob(name, start) for name in _names(work)))
        rounds = iter(range(1, ROUNDS))

        def ours() -> int:
            engine.answer(request, next(rounds))
            return work.samples

        ways: dict[str, Way] = {OURS: ours}
        for name, peer in installed_peers().items():
            ways[name] = _loop(work, device, peer)
        return take_turns(work.model, ways, device, repeats, watch, warm_up)


def _loop(work: Work, device: torch.device, peer: Peer) -> Way:
    """A peer's round: one client after the other, torch's threads inside."""
    steps, batches = [], []
    for client in _federation(work).clients:
        model = build_model(ModelSettings(name=work.model), work.task, seed=0).to(device)
        steps.append(peer(model, LR, CLIP, NOISE))
        batches.append(Batch.of(client.train, device))

    def run() -> int:
        for step, records in zip(steps, batches, strict=True):
            for batch in records.split(work.batch):
                step(batch.features, batch.targets)
        return work.samples

    return run


@contextmanager
def _our_engine(work: Work, device: torch.device) -> Iterator[LocalEngine]:
    """The engine of a run, with ledger and everything."""
    model = build_model(ModelSettings(name=work.model), work.task, seed=0)
    plan = _plan(work)
    key = SecretKey.from_os()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        with Ledger.open(path, plan, budget=Budget(math.inf, 1e-5), accountant="rdp") as ledger:
            learner = Learner(model, work.task, device)
            engine = LocalEngine(
                _federation(work), learner, LR, plan, ledger, key, coin_key(key, 0), public_seed=0
            )
            try:
                yield engine
            finally:
                engine.close()


def _names(work: Work) -> list[str]:
    return [f"client-{index}" for index in range(work.clients)]


def _federation(work: Work) -> Federation:
    rng = np.random.default_rng(0)
    clients = []
    for name in _names(work):
        features = rng.normal(size=(work.records, *work.shape)).astype(np.float32)
        records = Records(features, rng.integers(10, size=work.records))
        clients.append(Client(name, records, records.take(slice(0, 0)), records.take(slice(0, 1))))
    return Federation(tuple(clients), work.task)


def _plan(work: Work) -> PrivacyPlan:
    steps = PoissonSteps(
        clip=CLIP,
        noise_multiplier=NOISE,
        records=work.records,
        batch=work.batch,
        epochs=1,
        adjacency=Adjacency.ZERO_OUT,
    )
    releases = (
        PlannedRelease("training", steps, ROUNDS),
        PlannedRelease("selection", PrivateSelection(1.0, Adjacency.ZERO_OUT), ROUNDS),
    )
    return PrivacyPlan(
        unit=Unit.RECORD,
        adjacency=Adjacency.ZERO_OUT,
        threat=ThreatModel("nobody", "timings of random records"),
        units=tuple(UnitPlan(name, releases) for name in _names(work)),
    )


# --- growth -----------------------------------------------------------------------------------------


def _scale(device: torch.device, watch: Watch) -> Iterator[Scaling]:
    """A decade along each axis; the rest stays as it is."""
    sizes = (2, 5, 10, 20)
    yield _grow("clients", sizes, lambda size: Work("cnn", clients=size, steps=2), device, watch)
    yield _grow(
        "records of a client",
        [32 * size for size in sizes],
        lambda size: Work("cnn", clients=2, steps=size // 32),
        device,
        watch,
    )
    yield _grow(
        "parameters",
        [10 * (width + 1) for width in (4000, 10_000, 20_000, 40_000)],
        lambda size: Work("softmax", clients=2, steps=10, shape=(size // 10 - 1,)),
        device,
        watch,
    )
    yield _grow_models(sizes, device, watch)


def _grow(
    axis: str,
    sizes: Sequence[int],
    work_of: Callable[[int], Work],
    device: torch.device,
    watch: Watch,
) -> Scaling:
    seconds = []
    for size in sizes:
        watch(f"growth with {axis}: {size}")
        work = work_of(size)
        with _our_engine(work, device) as engine:
            start = flatten(build_model(ModelSettings(name=work.model), work.task, seed=0))
            request = Train("training", tuple(TrainJob(name, start) for name in _names(work)))
            seconds.append(_median_answer(engine, request, device))
    return Scaling(axis, tuple(sizes), tuple(seconds))


def _median_answer(engine: LocalEngine, request: Train | Select, device: torch.device) -> float:
    def answer(number: int) -> int:
        engine.answer(request, number)
        return 0

    times = [timed(partial(answer, number), device)[1] for number in range(1, 7)]
    return statistics.median(times[1:])  # the first one warms up


def _grow_models(sizes: Sequence[int], device: torch.device, watch: Watch) -> Scaling:
    """Choosing between more and more models: what a larger number of clusters costs."""
    work = Work("cnn", clients=4, steps=8)
    start = flatten(build_model(ModelSettings(name=work.model), work.task, seed=0))
    seconds = []
    with _our_engine(work, device) as engine:
        for size in sizes:
            watch(f"growth with clusters: {size}")
            request = Select("selection", tuple(_names(work)), np.stack([start] * size))
            seconds.append(_median_answer(engine, request, device))
    return Scaling("clusters", tuple(sizes), tuple(seconds))
