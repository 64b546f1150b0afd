"""How fast this machine trains many clients privately: ours against the peers that are installed.

Everyone does the same work (so many clients, steps and records a step, clipping and noise included; plain SGD
without both), in one run, in turns, and medians count: an absolute figure on a shared machine means little, a
ratio in one run does.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from coterie.algorithms.protocol import Select, Train
from coterie.bench.peers import Peer, installed_peers, installed_round_peers
from coterie.bench.timing import OURS, WARM_UP, Timing, Watch, Way, machine_name, take_turns, timed
from coterie.bench.work import CLIP, LR, NOISE, ROUNDS, RoundWork, Work, our_round
from coterie.training.learner import Batch


@dataclass(frozen=True)
class Scaling:
    """How our time grows along one axis."""

    axis: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """Slope in logarithms between the ends: 1 is linear, below 1 is better."""
        return math.log(self.seconds[-1] / self.seconds[0]) / math.log(self.sizes[-1] / self.sizes[0])


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
        scaling = [{**asdict(each), "exponent": each.exponent} for each in self.scaling]
        return {**asdict(self), "ratios": dict(self.ratios), "scaling": scaling}


PARTS = ("cnn", "softmax", "head", "resnet18", "rounds", "growth")
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
    works = {
        "cnn": Work(clients=21, records=96),
        "softmax": Work(model="softmax", clients=21, records=240, batch=24, shape=(1, 8, 8)),
        # On scattering features of colour images of 32 x 32 pixels.
        "head": Work(model="softmax", clients=4, records=1024, batch=256, shape=(243, 8, 8)),
        "resnet18": Work(model="resnet18", clients=2, records=96, shape=(3, 32, 32)),
    }
    rows: list[Timing] = []
    for part, work in works.items():
        if part in parts:
            large = part in ("resnet18", "head")
            repeats, warm_up = 5 if quick or large else 9, 2 if large else WARM_UP
            rows += compare_records(work, device, repeats, watch, warm_up, part)
    if "rounds" in parts:
        sampled = 20 if quick else 100
        rows += compare_rounds(
            RoundWork(clients=10 * sampled, sampled=sampled), device, repeats=3, warm_up=1, watch=watch
        )
    scaling = tuple(_scale(device, watch)) if "growth" in parts else ()
    return BenchResult(machine_name(), torch.__version__, device.type, tuple(rows), scaling)


# --- ours and theirs --------------------------------------------------------------------------------


def compare_records(
    work: Work,
    device: torch.device,
    repeats: int,
    watch: Watch,
    warm_up: int = WARM_UP,
    name: str | None = None,
) -> list[Timing]:
    """Ours and every installed peer on the same steps."""
    with work.private_engine(device) as engine:
        request, rounds = work.request(), iter(range(1, ROUNDS))

        def ours() -> int:
            engine.answer(request, next(rounds))
            return work.samples

        ways = {OURS: ours, **{name: _loop(work, device, peer) for name, peer in installed_peers().items()}}
        return take_turns(name or work.model, ways, device, repeats, watch, warm_up)


def _loop(work: Work, device: torch.device, peer: Peer) -> Way:
    """A peer's round: one client after the other, torch's threads inside."""
    clients = work.federation().clients
    steps = [peer(work.build().to(device), LR, CLIP, NOISE) for _ in clients]
    batches = [Batch.of(client.train, device) for client in clients]

    def run() -> int:
        for step, records in zip(steps, batches, strict=True):
            for batch in records.split(work.batch):
                step(batch.features, batch.targets)
        return work.samples

    return run


def compare_rounds(
    work: RoundWork, device: torch.device, repeats: int, warm_up: int, watch: Watch
) -> list[Timing]:
    """Ours and every installed peer on the same round."""
    trained = {client.name: client.train for client in work.federation().clients}
    records = {name: (own.features, own.targets) for name, own in trained.items()}
    with our_round(work, device) as ours:
        ways: dict[str, Way] = {OURS: ours}
        for name, peer in installed_round_peers().items():
            run = peer(work.build().to(device), records, work.sampled, work.lr, work.epochs, work.batch)
            ways[name] = lambda run=run: work.samples(run())  # type: ignore[misc]
        name = f"{work.model}, {work.sampled} of {work.clients} clients, client-level"
        return take_turns(name, ways, device, repeats, watch, warm_up)


# --- growth -----------------------------------------------------------------------------------------


def _scale(device: torch.device, watch: Watch) -> Iterator[Scaling]:
    """A decade along each axis; the rest stays as it is."""
    decade = (2, 5, 10, 20)
    numbers = tuple(10 * (width + 1) for width in (4000, 10_000, 20_000, 40_000))
    axes: dict[str, tuple[Sequence[int], Callable[[int], Work]]] = {
        "clients": (decade, lambda size: Work(clients=size, records=64)),
        "records of a client": ([32 * size for size in decade], lambda size: Work(clients=2, records=size)),
        "parameters": (
            numbers,
            lambda size: Work(model="softmax", clients=2, records=320, shape=(size // 10 - 1,)),
        ),
    }
    for axis, (sizes, work_of) in axes.items():
        yield grow(axis, sizes, work_of, device, watch)
    # Choosing between more and more models: what a larger number of clusters costs.
    yield grow("clusters", decade, lambda size: Work(clients=4, records=256), device, watch, Work.choice)


def grow(
    axis: str,
    sizes: Sequence[int],
    work_of: Callable[[int], Work],
    device: torch.device,
    watch: Watch,
    request_of: Callable[[Work, int], Train | Select] = lambda work, size: work.request(),
) -> Scaling:
    """Our time for works, or requests, of growing size."""
    seconds = []
    for size in sizes:
        watch(f"growth with {axis}: {size}")
        work = work_of(size)
        request = request_of(work, size)
        with work.private_engine(device) as engine:
            times = [timed(partial(engine.answer, request, turn), device)[1] for turn in range(1, 7)]
        seconds.append(statistics.median(times[1:]))  # the first one warms up
    return Scaling(axis, tuple(sizes), tuple(seconds))
