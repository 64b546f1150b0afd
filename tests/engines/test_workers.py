"""Worker processes compute what one process computes, and never outlive it."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from coterie.algorithms.protocol import (
    Choice,
    Choices,
    Cohort,
    CohortJob,
    Count,
    Histogram,
    LocalTraining,
    Opened,
    Select,
    Sum,
    Sums,
    Train,
    TrainJob,
    Updates,
)
from coterie.data import Client, Federation, Records, Task
from coterie.engines import clients
from coterie.engines.clients import processes_for
from coterie.engines.local import LocalEngine, coin_key
from coterie.engines.workers import WorkerError, WorkerPool
from coterie.models import ModelSettings, build_model
from coterie.privacy import (
    POPULATION,
    Adjacency,
    Budget,
    CohortSums,
    FullBatchSketch,
    Ledger,
    PlannedRelease,
    PoissonSample,
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

TASK = Task(kind="classification", shape=(1, 8, 8), classes=3)
NAMES = ("a", "b", "c")
MODEL = build_model(ModelSettings(name="cnn"), TASK, seed=0)
START = flatten(MODEL)


def federation() -> Federation:
    clients = []
    for index, name in enumerate(NAMES):
        rng = np.random.default_rng(index)
        size = 30 + 7 * index
        records = Records(rng.normal(size=(size, 1, 8, 8)).astype(np.float32), rng.integers(3, size=size))
        clients.append(Client(name, records, records.take(slice(0, 0)), records.take(slice(0, 10))))
    return Federation(tuple(clients), TASK)


def plan(times: int = 3) -> PrivacyPlan:
    def releases(records: int) -> tuple[PlannedRelease, ...]:
        common = {"clip": 1.0, "records": records, "adjacency": Adjacency.ZERO_OUT}
        return (
            PlannedRelease("sketch", FullBatchSketch(noise_multiplier=4.0, dimensions=6, **common), times),  # type: ignore[arg-type]
            PlannedRelease(
                "training",
                PoissonSteps(noise_multiplier=1.0, batch=8, epochs=1, **common),  # type: ignore[arg-type]
                times,
            ),
            PlannedRelease("selection", PrivateSelection(0.5, Adjacency.ZERO_OUT), times),
        )

    return PrivacyPlan(
        unit=Unit.RECORD,
        adjacency=Adjacency.ZERO_OUT,
        threat=ThreatModel("the server", "everything"),
        units=tuple(UnitPlan(name, releases(30 + 7 * index)) for index, name in enumerate(NAMES)),
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(
        tmp_path / "ledger.jsonl", plan(), budget=Budget(500.0, 1e-3), accountant="rdp"
    ) as opened:
        yield opened


def engine_on(ledger: Ledger, workers: int | None, model: nn.Module = MODEL) -> LocalEngine:
    learner = Learner(model, TASK, torch.device("cpu"))
    key = SecretKey.from_seed(1)
    return LocalEngine(
        federation(), learner, 0.1, plan(), ledger, key, coin_key(key, 0), public_seed=0, workers=workers
    )


def answers(engine: LocalEngine) -> tuple[list[np.ndarray], list[int]]:
    vectors = []
    for release in ("sketch", "training"):
        reply = engine.answer(Train(release, tuple(TrainJob(name, START) for name in NAMES)), 1)
        assert isinstance(reply, Updates)
        vectors += [reply.by_client[name].value for name in NAMES]
    models = np.stack([START, START + 0.1, START - 0.1])
    choices = engine.answer(Select("selection", NAMES, models), 1)
    assert isinstance(choices, Choices)
    return vectors, [choices.by_client[name].value for name in NAMES]


def test_any_number_of_workers_gives_the_same_bits(ledger: Ledger) -> None:
    vectors, choices = answers(engine_on(ledger, workers=1))
    engine = engine_on(ledger, workers=2)
    found, found_choices = answers(engine)
    assert engine.clients.pool is not None
    assert len(engine.clients.pool._processes) == 2
    engine.close()
    assert found_choices == choices
    for one, other in zip(vectors, found, strict=True):
        assert one.tobytes() == other.tobytes()


def test_no_more_workers_are_started_than_there_are_clients(ledger: Ledger) -> None:
    engine = engine_on(ledger, workers=1000)
    answers(engine)
    assert engine.clients.pool is not None
    assert len(engine.clients.pool._processes) == len(NAMES)
    engine.close()
    cores = len(os.sched_getaffinity(0))
    assert processes_for(1000, 1000) == 4 * cores
    assert processes_for(1, 1000) == 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not tell what is open")
def test_a_worker_takes_few_of_the_files_that_a_process_may_open(ledger: Ledger) -> None:
    """A thousand by default, on machines of a hundred cores as on others."""
    large = build_model(ModelSettings(name="mlp", hidden=300), TASK, seed=0)
    train = Train("training", tuple(TrainJob(name, flatten(large)) for name in NAMES))
    opened = []
    for workers in (2, 3):
        before = len(os.listdir("/proc/self/fd"))
        engine = engine_on(ledger, workers, model=large)
        for round in (1, 2):
            engine.answer(train, round)
        opened.append(len(os.listdir("/proc/self/fd")) - before)
        engine.close()
    assert opened[1] - opened[0] <= 3


def client_level_plan() -> PrivacyPlan:
    mechanism = CohortSums(1.0, 1.5, PoissonSample(0.9), Adjacency.ADD_REMOVE, histogram_ratio=2.0)
    unit = UnitPlan(POPULATION, (PlannedRelease("sums", mechanism, 3),))
    threat = ThreatModel("whoever", "everything")
    return PrivacyPlan(Unit.CLIENT, Adjacency.ADD_REMOVE, threat, (unit,))


def test_any_number_of_workers_gives_the_same_sums_of_a_cohort(tmp_path: Path) -> None:
    learner, key, planned = (
        Learner(MODEL, TASK, torch.device("cpu")),
        SecretKey.from_seed(1),
        client_level_plan(),
    )
    training = LocalTraining(epochs=2, batch=7, lr=0.1, momentum=0.5)
    job = CohortJob(NAMES, np.stack([START, START + 0.1]), training, Choice.LOWEST_LOSS)
    found = []
    for workers in (1, 2):
        path = tmp_path / f"ledger-{workers}.jsonl"
        with Ledger.open(path, planned, budget=Budget(500.0, 1e-3), accountant="rdp") as opened:
            engine = LocalEngine(
                federation(), learner, 0.1, planned, opened, key, key, public_seed=0, workers=workers
            )
            for round in (1, 2):  # before and after the workers are there
                cohort = engine.answer(Cohort("sums", job), round)
                assert isinstance(cohort, Opened)
                counted, added = engine.answer(Count(cohort), round), engine.answer(Sum(cohort), round)
                assert isinstance(counted, Histogram)
                assert isinstance(added, Sums)
                found.append(counted.counts.value.tobytes() + added.rows.value.tobytes())
            assert (engine.clients.pool is not None) == (workers > 1)
            engine.close()
    assert found[:2] == found[2:]


def test_a_killed_worker_is_one_clear_line(ledger: Ledger) -> None:
    engine = engine_on(ledger, workers=2)
    train = Train("training", tuple(TrainJob(name, START) for name in NAMES))
    engine.answer(train, 1)
    assert engine.clients.pool is not None
    os.kill(engine.clients.pool._processes[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"client . ended \(SIGKILL\); --resume continues"):
        engine.answer(train, 2)
    assert all(process.poll() is not None for process in engine.clients.pool._processes)
    with pytest.raises(WorkerError, match="the workers have ended; --resume starts them again"):
        engine.answer(train, 3)  # and writes to no file that has taken the place of theirs


def test_what_goes_wrong_in_a_worker_is_reported_here(ledger: Ledger) -> None:
    engine = engine_on(ledger, workers=2)
    with pytest.raises(WorkerError, match="client a failed: RuntimeError"):
        engine.answer(Train("training", (TrainJob("a", START[:5]),)), 1)


def test_a_call_that_cannot_be_read_in_a_worker_is_reported_here(ledger: Ledger) -> None:
    class Local(str):
        """Known to this function only."""

        __module__, __qualname__ = "__main__", "Local"

    engine = engine_on(ledger, workers=2)
    engine.answer(Train("training", (TrainJob("a", START),)), 1)
    assert engine.clients.pool is not None
    main = sys.modules["__main__"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "Local", Local, raising=False)
        with pytest.raises(WorkerError, match=r"client a failed: it cannot read .* AttributeError: .*Local"):
            engine.clients.pool.run({"a": ("score", (Local("a"), START[None]))})


def test_a_call_that_cannot_be_sent_is_reported_with_its_client(ledger: Ledger) -> None:
    engine = engine_on(ledger, workers=2)
    engine.answer(Train("training", (TrainJob("a", START),)), 1)
    assert engine.clients.pool is not None
    with pytest.raises(WorkerError, match=r"client b cannot be handed to a worker process: .*lambda"):
        engine.clients.pool.run({"b": ("score", (lambda: 1,))})


class Unsendable:
    """Its answers cannot travel."""

    def __init__(self, table: Batch) -> None: ...

    def local(self) -> object:
        return lambda: "a record"

    def large(self) -> np.ndarray:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, 2**10))
        return np.zeros(2**17)


@pytest.mark.parametrize("method", ["local", "large"])
def test_an_answer_that_cannot_be_sent_is_reported_here_without_its_text(
    method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = WorkerPool(1, Unsendable, Batch(torch.zeros(3, 2), torch.zeros(3)))
    with pytest.raises(WorkerError, match=r"client a failed: \w+ at \S*parcels.py:\d+$"):
        pool.run({"a": (method, ())})
    assert capfd.readouterr().err == ""


def test_a_worker_that_cannot_receive_ends_instead_of_waiting(ledger: Ledger) -> None:
    """As where it has no memory for a message."""
    engine = engine_on(ledger, workers=2)
    train = Train("training", tuple(TrainJob(name, START) for name in NAMES))
    engine.answer(train, 1)
    assert engine.clients.pool is not None
    engine.clients.pool._links[0].send_bytes(b"no pickle")
    assert engine.clients.pool._processes[0].wait(timeout=20) == 1
    with pytest.raises(WorkerError, match=r"client . ended \(exit code 1\); --resume continues"):
        engine.answer(train, 2)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def useful_workers(engine: LocalEngine) -> int:
    return engine.clients._useful_workers(engine._gradients)


def test_workers_start_only_when_the_plan_repays_it(
    ledger: Ledger, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(2)
    assert useful_workers(engine_on(ledger, None)) == 1
    monkeypatch.setattr(clients, "WORKERS_FROM_SECONDS", 0.0)
    assert useful_workers(engine_on(ledger, None)) == 2
    threads(1)
    assert useful_workers(engine_on(ledger, None)) == 1


def test_training_leaves_the_number_of_threads_alone(ledger: Ledger, threads: Callable[[int], None]) -> None:
    threads(2)
    engine_on(ledger, workers=1).answer(Train("training", (TrainJob("a", START),)), 1)
    assert torch.get_num_threads() == 2


def test_a_model_that_cannot_travel_trains_in_one_process(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    class Local(nn.Sequential):
        """Known to this function only."""

    model = Local(nn.Flatten(), nn.Linear(64, 3))
    engine = engine_on(ledger, workers=2, model=model)
    reply = engine.answer(Train("training", (TrainJob("a", flatten(model)),)), 1)
    assert isinstance(reply, Updates)
    assert "in one process" in caplog.text


PARENT = """
import sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
from test_workers import START, NAMES, engine_on, plan
from coterie.algorithms.protocol import Train, TrainJob
from coterie.privacy import Budget, Ledger
with Ledger.open(Path(sys.argv[1]), plan(), budget=Budget(500.0, 1e-3), accountant="rdp") as ledger:
    engine = engine_on(ledger, workers=2)
    engine.answer(Train("training", tuple(TrainJob(name, START) for name in NAMES)), 1)
    print(*(process.pid for process in engine.clients.pool._processes), flush=True)
    time.sleep(60)
"""


@pytest.mark.deployment
def test_a_script_without_a_guard_starts_workers_and_runs_once(tmp_path: Path) -> None:
    """A worker is started by name; spawned processes would run the user's script again."""
    script = tmp_path / "script.py"
    text = PARENT.format(folder=str(Path(__file__).parent)).replace("time.sleep(60)", "engine.close()")
    script.write_text(text + "print('once')\n", encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path / "ledger.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    workers, *rest = done.stdout.splitlines()
    assert len(workers.split()) == 2
    assert rest == ["once"]


@pytest.mark.deployment
def test_a_killed_engine_leaves_no_workers_behind(tmp_path: Path) -> None:
    script = PARENT.format(folder=str(Path(__file__).parent))
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "ledger.jsonl")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(worker) for worker in workers)


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # nobody may be there to collect an orphan that ended


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be asked")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    """In a process of its own, which asks for it: large arrays, freed and taken again, fault no new pages."""
    code = (
        "import resource, numpy as np\n"
        "from coterie.engines.memory import keep_freed_memory\n"
        "if not keep_freed_memory(): print('nobody to ask'); raise SystemExit\n"
        "def step():\n"
        "    for size in (3, 40, 7): np.zeros(size << 17) + 1.0\n"
        "step()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(20): step()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if said.stdout.strip() == "nobody to ask":
        pytest.skip("this C library has no mallopt")
    assert int(said.stdout) < 1000  # 20 steps of 100 MiB are half a million pages
