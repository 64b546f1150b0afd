"""Runs whose unit is a client or a worker, side by side: each as if it were alone, their clients together."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trained_runs import last_state

from coterie.experiment.folder import RunFolder
from coterie.experiment.local import fit_together, run, run_together
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.files import read_lines
from coterie.training.local_sgd import LocalJob, LocalSGD, LocalTrainer

SLOTS = 3
ROUNDS = 3


def cell(
    name: str, epsilon: float = 8.0, *, seed: int = 1, rounds: int = ROUNDS, **options: Any
) -> Experiment:
    content = {
        "federation": {"kind": "clusters", "sizes": [4, 4], "shift": "rotation", "records_per_client": 25},
        "model": {"name": "mlp"},
        "algorithm": {"name": name, "rate": 0.5, **options},
        "privacy": {"unit": "client", "epsilon": epsilon, "delta": 0.01, "clip": 0.5},
        "schedule": {"rounds": rounds, "epochs": 1, "batch": 10, "lr": 0.1},
        "seeds": {"simulation": seed, "noise": 2},
        "evaluation": {"references": False, "every": 2},
    }
    return Experiment.model_validate(content)


def worker_cell(name: str, *, seed: int = 0, mode: str = "sound", **options: Any) -> Experiment:
    content = {
        "federation": {"kind": "groups", "structure": "ring", "workers": 6, "groups": 3},
        "model": {"name": "softmax"},
        "algorithm": {"name": name, "noise": 2.0, **options},
        "privacy": {"unit": "worker", "epsilon": math.inf, "mode": mode},
        "schedule": {"rounds": ROUNDS, "batch": 10, "lr": 0.1},
        "seeds": {"simulation": seed, "noise": 2},
        "evaluation": {"references": False},
    }
    return Experiment.model_validate(content)


CELLS = {
    "fedavg": cell("dp-fedavg"),
    "longer": cell("dp-fedavg", 4.0, seed=0, rounds=ROUNDS + 1),
    "fedprox": cell("dp-fedprox", proximal=0.5),
    "fedper": cell("dp-fedper"),
    "routed": cell("dp-ifca", clusters=2, rebalance={"minimum": 2}),
    "fesem": cell("dp-fesem", clusters=2),
}
GROUPS = {
    "ogl": worker_cell("dp-ogl"),
    "ogl again": worker_cell("dp-ogl", seed=1),
    "plus": worker_cell("dp-ogl-plus", period=2),
    "drafts": worker_cell("dp-ogl-plus", period=2, mode="paper"),
}
Trainings = list[tuple[LocalSGD, int]]


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    """Stacked programs on a processor, always of as many slots: what each of them trained, and how many jobs.

    A program of another size may round differently.
    """
    for room in ("local", "members"):
        monkeypatch.setattr(f"coterie.engines.{room}.stacks", lambda learner: True)
    monkeypatch.setattr(LocalTrainer, "_slots", lambda self, rule, waves: SLOTS)
    seen: Trainings = []
    train = LocalTrainer.train

    def counted(self: LocalTrainer, jobs: list[LocalJob]) -> Any:
        seen.append((jobs[0].rule, len(jobs)))
        return train(self, jobs)

    monkeypatch.setattr(LocalTrainer, "train", counted)
    return seen


Alone = Callable[[str, Experiment, Trainings], Path]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Alone, dict[str, int]]:
    """A run by itself, once for all tests; and how many trainings each took."""
    folder, took = tmp_path_factory.mktemp("alone"), dict[str, int]()

    def find(name: str, experiment: Experiment, trainings: Trainings) -> Path:
        if name not in took:
            before = len(trainings)
            run(experiment, folder / name)
            took[name] = len(trainings) - before
        return folder / name

    return find, took


def assert_same_run(one: Path, other: Path) -> None:
    """The same charges, of the same inputs; the same state to the last bit."""
    charges = [[line.get("charges") for line in read_lines(RunFolder(path).ledger)] for path in (one, other)]
    assert charges[0] == charges[1]
    first, second = last_state(one), last_state(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.tobytes() == second[name].tobytes(), name
    results = RunResult.load(one), RunResult.load(other)
    assert results[0].guarantee == results[1].guarantee
    assert results[0].clusters == results[1].clusters
    assert results[0].accuracy == results[1].accuracy


@pytest.mark.parametrize("cells", [CELLS, GROUPS], ids=["clients", "workers"])
def test_runs_end_with_the_bits_that_each_has_alone(
    tmp_path: Path,
    trainings: Trainings,
    alone: tuple[Alone, dict[str, int]],
    cells: dict[str, Experiment],
) -> None:
    find, took = alone
    by_themselves = {name: find(name, experiment, trainings) for name, experiment in cells.items()}
    trainings.clear()
    outcomes = run_together({tmp_path / name: experiment for name, experiment in cells.items()})
    assert not outcomes.failures
    assert len(trainings) < sum(took[name] for name in cells)
    for name, path in by_themselves.items():
        assert_same_run(path, tmp_path / name)


def test_who_learns_by_one_rule_learns_in_one_program(tmp_path: Path, trainings: Trainings) -> None:
    names = ("fedavg", "longer", "fedper", "fedprox")
    assert not run_together({tmp_path / name: CELLS[name] for name in names}).failures
    jobs: dict[float, list[int]] = {}
    for rule, count in trainings:
        jobs.setdefault(rule.proximal, []).append(count)
    # Three runs by one rule, the longest of them one round more alone; and one by another.
    assert jobs == {0.0: [3, 3, 3, 1], 0.5: [1, 1, 1]}


def test_choices_that_take_a_training_wait_for_it_like_all_others(
    tmp_path: Path, trainings: Trainings
) -> None:
    fesem = {tmp_path / str(seed): cell("dp-fesem", seed=seed, clusters=2) for seed in (0, 1, 2)}
    assert not run_together(fesem).failures
    # To choose and to learn, in every round; evaluation asks every client by itself.
    assert [count for _, count in trainings if count > 1] == [3] * (2 * ROUNDS)


@pytest.mark.parametrize("place", ["server", "members"])
def test_a_run_that_fails_takes_no_other_with_it_and_resumes_in_other_company(
    tmp_path: Path,
    trainings: Trainings,
    alone: tuple[Alone, dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    """While it computes the next state, or while its members keep what they learnt in the shared program."""
    from coterie.algorithms.client.dp_fedper import FedPer
    from coterie.engines.members import LocalMembers

    failing, name = (FedPer, "moved") if place == "server" else (LocalMembers, "_keep_personal")
    usual: Callable[..., Any] = getattr(failing, name)
    times = 0

    def breaking(self: Any, given: Any, *rest: Any) -> Any:
        nonlocal times
        parts = [] if place == "server" else [each.job.parts for each in given]
        if place == "server" or any(own is not None and own.personal.any() for own in parts):
            times += 1
            if times == 2:
                raise RuntimeError("the sky fell")
        return usual(self, given, *rest)

    monkeypatch.setattr(failing, name, breaking)
    paths = {tmp_path / name: experiment for name, experiment in CELLS.items()}
    outcomes = run_together(paths)
    assert {path.name for path in outcomes.failures} == {"fedper"}
    assert str(outcomes.failures[tmp_path / "fedper"]) == "the sky fell"
    assert {path.name for path in outcomes.results} == set(CELLS) - {"fedper"}
    monkeypatch.setattr(failing, name, usual)
    again = {tmp_path / "fedper": CELLS["fedper"], tmp_path / "newcomer": cell("dp-fedavg", 2.0)}
    assert not run_together(again).failures
    for name, experiment in CELLS.items():
        assert_same_run(alone[0](name, experiment, trainings), tmp_path / name)


def test_another_clients_records_in_one_run_move_no_bit_of_another_run(
    tmp_path: Path, trainings: Trainings
) -> None:
    """Neighbours: one run holds other records, and all else goes the same way."""
    together = {
        world: run_together(
            {
                tmp_path / world / "one": CELLS["routed"],
                tmp_path / world / "other": cell("dp-fedavg", seed=seed),
            }
        )
        for world, seed in (("here", 5), ("there", 6))
    }
    assert not any(outcomes.failures for outcomes in together.values())
    assert_same_run(tmp_path / "here" / "one", tmp_path / "there" / "one")
    states = [last_state(tmp_path / world / "other") for world in together]
    assert any(states[0][name].tobytes() != states[1][name].tobytes() for name in states[0])


def test_cells_of_one_unit_fit_together() -> None:
    assert len({fit_together(experiment) for experiment in CELLS.values()}) == 1
    records = CELLS["fedavg"].model_dump(mode="json") | {"privacy": {"epsilon": 8, "unit": "record"}}
    records["algorithm"] = {"name": "global"}
    assert fit_together(Experiment.model_validate(records)) != fit_together(CELLS["fedavg"])
