"""How fast this machine trains many clients privately: ours against the peers that are installed.

Everyone does the same work (so many clients, steps and records a step, clipping and noise included; plain SGD
without both), in one run, in turns, and medians count: an absolute figure on a shared machine means little, a
ratio in one run does.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from coterie.algorithms.protocol import Select, Train, TrainJob
from coterie.bench.peers import Peer, installed_peers
from coterie.bench.rounds import RoundWork, compare_rounds
from coterie.bench.timing import OURS, WARM_UP, Timing, Watch, Way, machine_name, take_turns, timed
from coterie.bench.work import ROUNDS, RandomClients
from coterie.engines.local import LocalEngine
from coterie.privacy import Adjacency, PrivacyPlan, Unit
from coterie.privacy.plans import SELECTION, TRAINING, RecordReleases, plan_of
from coterie.training.learner import Batch

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
    def random(self) -> RandomClients:
        """Clients for whom an epoch has so many steps."""
        return RandomClients(self.model, self.clients, self.steps * self.batch, self.shape)

    @property
    def samples(self) -> int:
        return self.clients * self.steps * self.batch

    @property
    def plan(self) -> PrivacyPlan:
        own = RecordReleases(self.steps * self.batch, clip=CLIP)
        releases = [own.steps(TRAINING, ROUNDS, self.batch, NOISE), *own.selections(1.0, ROUNDS)]
        return plan_of(Unit.RECORD, Adjacency.ZERO_OUT, dict.fromkeys(self.random.names, releases))

    def engine(self, device: torch.device) -> AbstractContextManager[LocalEngine]:
        return self.random.engine(self.plan, LR, device)

    def request(self) -> Train:
        """Every client trains once, from the same start."""
        start = self.random.start()
        return Train(TRAINING, tuple(TrainJob(name, start) for name in self.random.names))


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
            rows += compare_records(work, device, repeats, watch, warm_up)
    if "rounds" in parts:
        work_of_rounds = RoundWork(200, 20) if quick else RoundWork(1000, 100)
        rows += compare_rounds(work_of_rounds, device, repeats=3, warm_up=1, watch=watch)
    scaling = tuple(_scale(device, watch)) if "growth" in parts else ()
    return BenchResult(machine_name(), torch.__version__, device.type, tuple(rows), scaling)


# --- ours and theirs --------------------------------------------------------------------------------


def compare_records(
    work: Work, device: torch.device, repeats: int, watch: Watch, warm_up: int = WARM_UP
) -> list[Timing]:
    """Ours and every installed peer on the same steps."""
    with work.engine(device) as engine:
        request, rounds = work.request(), iter(range(1, ROUNDS))

        def ours() -> int:
            engine.answer(request, next(rounds))
            return work.samples

        ways: dict[str, Way] = {OURS: ours}
        for name, peer in installed_peers().items():
            ways[name] = _loop(work, device, peer)
        return take_turns(work.model, ways, device, repeats, watch, warm_up)


def _loop(work: Work, device: torch.device, peer: Peer) -> Way:
    """A peer's round: one client after the other, torch's threads inside."""
    clients = work.random.federation().clients
    steps = [peer(work.random.build().to(device), LR, CLIP, NOISE) for _ in clients]
    batches = [Batch.of(client.train, device) for client in clients]

    def run() -> int:
        for step, records in zip(steps, batches, strict=True):
            for batch in records.split(work.batch):
                step(batch.features, batch.targets)
        return work.samples

    return run


# --- growth -----------------------------------------------------------------------------------------


def _scale(device: torch.device, watch: Watch) -> Iterator[Scaling]:
    """A decade along each axis; the rest stays as it is."""
    sizes = (2, 5, 10, 20)
    yield grow("clients", sizes, lambda size: Work("cnn", clients=size, steps=2), device, watch)
    yield grow(
        "records of a client",
        [32 * size for size in sizes],
        lambda size: Work("cnn", clients=2, steps=size // 32),
        device,
        watch,
    )
    yield grow(
        "parameters",
        [10 * (width + 1) for width in (4000, 10_000, 20_000, 40_000)],
        lambda size: Work("softmax", clients=2, steps=10, shape=(size // 10 - 1,)),
        device,
        watch,
    )
    yield _grow_models(sizes, device, watch)


def grow(
    axis: str,
    sizes: Sequence[int],
    work_of: Callable[[int], Work],
    device: torch.device,
    watch: Watch,
) -> Scaling:
    """Our time for works of growing size."""
    seconds = []
    for size in sizes:
        watch(f"growth with {axis}: {size}")
        work = work_of(size)
        with work.engine(device) as engine:
            seconds.append(_median_answer(engine, work.request(), device))
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
    start, names = work.random.start(), work.random.names
    seconds = []
    with work.engine(device) as engine:
        for size in sizes:
            watch(f"growth with clusters: {size}")
            request = Select(SELECTION, names, np.stack([start] * size))
            seconds.append(_median_answer(engine, request, device))
    return Scaling("clusters", tuple(sizes), tuple(seconds))
