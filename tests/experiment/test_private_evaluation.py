"""Private evaluation of a run: what it releases, how sure it is, what it costs, and what it never tells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.data import Client, Federation
from coterie.engines.clients import TrainingFacts
from coterie.engines.evaluation import PrivateScores
from coterie.errors import BudgetError, InputError
from coterie.experiment import evaluator, local
from coterie.experiment.calibrated import CalibratedRun
from coterie.experiment.evaluator import NORMAL_95, Evaluator, LocalScores, private_accuracy, private_mean
from coterie.experiment.folder import RunFolder
from coterie.experiment.local import calibrate
from coterie.experiment.loop import Run
from coterie.experiment.recorded import recount
from coterie.experiment.result import RunResult
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.files import read_json
from coterie.privacy import (
    EVALUATION,
    POPULATION,
    Ledger,
    NoisyScores,
    Released,
    SecretKey,
    held_out,
)
from coterie.privacy.errors import NoiseError
from coterie.report.run import write_run_report

REPETITIONS = 400


def experiment(**sections: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "evaluation": {"kind": "private", "epsilon": 1.0},
            "seeds": {"simulation": 0, "noise": 0},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def demo() -> CalibratedRun:
    """The demo's own data and federation, evaluated privately at epsilon 1."""
    return calibrate(experiment())


def evaluator_of(
    prepared: CalibratedRun, ledger: Ledger, key: SecretKey, federation: Federation
) -> Evaluator:
    names = tuple(client.name for client in federation.clients)
    sizes = tuple(len(client.train) for client in federation.clients)
    facts = TrainingFacts(names, sizes, 0.1, noise_key=key, coin_key=key, public_seed=0)
    engine: Any = SimpleNamespace(
        facts=facts, plan=prepared.plan, ledger=ledger, context="test", learner=prepared.learner
    )
    scores = LocalScores(federation, engine)
    exact = scores.exact if prepared.experiment.evaluation_kind is EvaluationKind.EXACT else None
    return Evaluator(prepared, scores, exact)


def last_state(prepared: CalibratedRun) -> Any:
    state = prepared.algorithm.start(prepared.facts, np.random.default_rng(0))
    return replace(state, round=prepared.experiment.schedule.rounds)


def released(
    prepared: CalibratedRun, folder: Path, key: SecretKey, federation: Federation | None = None
) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    privacy = prepared.experiment.privacy
    with Ledger.open(
        folder / "ledger.jsonl", prepared.plan, budget=prepared.budgets, accountant=privacy.accountant
    ) as ledger:
        judge = evaluator_of(prepared, ledger, key, federation or prepared.federation)
        found = judge.after(last_state(prepared))
        assert found is not None
        return found.reached


def exact_scores(prepared: CalibratedRun) -> NDArray[np.float64]:
    chosen = replace(prepared, experiment=Experiment.model_validate({"evaluation": {"kind": "exact"}}))
    judge = evaluator_of(chosen, SimpleNamespace(), SecretKey.from_seed(0), prepared.federation)  # type: ignore[arg-type]
    found = judge.after(last_state(prepared))
    assert found is not None
    return np.array(list(found.reached.per_client.values()))


def test_the_interval_covers_the_exact_score_as_often_as_it_says_and_is_no_wider_than_the_noise(
    demo: CalibratedRun, tmp_path: Path
) -> None:
    exact = exact_scores(demo)
    [mechanism] = {
        demo.plan.for_subject(held_out(c)).release(EVALUATION).mechanism for c in demo.facts.clients
    }
    assert isinstance(mechanism, NoisyScores)
    inside, mean_inside = 0, 0
    for repetition in range(REPETITIONS):
        found = released(demo, tmp_path / str(repetition), SecretKey.from_seed(repetition))
        ends = np.array(list(found.intervals.values()))
        inside += int(((ends[:, 0] <= exact) & (exact <= ends[:, 1])).sum())
        mean_inside += found.interval[0] <= exact.mean() <= found.interval[1]
        half = NORMAL_95 * mechanism.noise_std / mechanism.units
        assert ((ends[:, 1] - ends[:, 0]) / 2 <= 1.05 * half).all()
        together = half / np.sqrt(len(exact))
        assert (found.interval[1] - found.interval[0]) / 2 <= 1.05 * together
    assert 0.93 <= inside / (REPETITIONS * len(exact)) <= 0.99
    assert 0.93 <= mean_inside / REPETITIONS <= 0.99


def test_one_held_out_record_moves_one_clients_count_by_at_most_one(
    demo: CalibratedRun, tmp_path: Path
) -> None:
    """Same coins, neighbouring records: another label moves its client's sum by one, and nothing else."""
    before = released(demo, tmp_path / "before", SecretKey.from_seed(7))
    first, *others = demo.federation.clients
    moved = []
    for label in range(demo.federation.task.classes):
        targets = first.test.targets.copy()
        targets[3] = label
        changed = Client(first.name, first.train, first.validation, replace(first.test, targets=targets))
        neighbour = replace(demo.federation, clients=(changed, *others))
        after = released(demo, tmp_path / f"label-{label}", SecretKey.from_seed(7), neighbour)
        assert {c.name: after.per_client[c.name] for c in others} == {
            c.name: before.per_client[c.name] for c in others
        }
        moved.append((after.per_client[first.name] - before.per_client[first.name]) * len(first.test))
    assert max(abs(np.array(moved))) == pytest.approx(1.0, abs=1e-6)
    assert len(set(np.round(moved, 6))) == 2


def test_noise_is_what_was_planned_and_nine_tenths_of_it_is_not_released(
    demo: CalibratedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, planned = demo.plan, demo.plan.for_subject(held_out("client-00")).release(EVALUATION).mechanism
    assert isinstance(planned, NoisyScores)
    facts = TrainingFacts(("client-00",), (1,), 0.1, SecretKey.from_os(), SecretKey.from_os(), 0)
    ledger: Any = SimpleNamespace(charge=lambda charges: None)
    scores = PrivateScores(facts, plan, ledger, "test")
    models = np.random.default_rng(0).normal(size=(4000, 3)).astype(np.float32)
    noise = [
        scores.of_records({"client-00": model}, 1, lambda: {"client-00": 17.0})["client-00"].value - 17.0
        for model in models
    ]
    assert np.std(noise) == pytest.approx(planned.noise_std, rel=0.06)
    assert np.mean(noise) == pytest.approx(0.0, abs=5 * planned.noise_std / np.sqrt(len(noise)))
    less = property(lambda self: 0.9 * self.clip * self.multiplier)
    monkeypatch.setattr(NoisyScores, "noise_std", less)
    with pytest.raises(NoiseError):
        scores.of_records({"client-00": models[0]}, 1, lambda: {"client-00": 17.0})


def test_a_score_is_charged_before_any_record_is_read(demo: CalibratedRun, tmp_path: Path) -> None:
    facts = TrainingFacts(("client-00",), (1,), 0.1, SecretKey.from_seed(1), SecretKey.from_seed(1), 0)
    model = np.zeros((2, 3), dtype=np.float32)

    def read() -> dict[str, float]:
        assert ledger.executed(held_out("client-00")) == {EVALUATION: 1}
        return {"client-00": 3.0}

    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, demo.plan, budget=demo.budgets, accountant="rdp") as ledger:
        scores = PrivateScores(facts, demo.plan, ledger, "test")
        first = scores.of_records({"client-00": model[0]}, 1, read)
        assert scores.of_records({"client-00": model[0]}, 1, read) == first, "asked again, answered again"
        with pytest.raises(BudgetError):
            scores.of_records({"client-00": model[1] + 1}, 1, read)


def test_figures_stay_between_nothing_and_everything() -> None:
    high = private_accuracy({"a": Released(61.5, 1.0), "b": Released(-2.0, 1.0)}, {"a": 60, "b": 60})
    assert high.per_client == {"a": 1.0, "b": 0.0}
    assert high.mean == pytest.approx((61.5 - 2.0) / 120), "what is cut off must not bias the mean"
    assert private_mean(Released(-0.5, 1.0), 10).mean == 0.0


# --- whole runs -------------------------------------------------------------------------------------

ROWS = 60


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Three files with an easy rule."""
    folder, rng = tmp_path / "hospitals", np.random.default_rng(0)
    folder.mkdir()
    for name in ("amber", "birch", "cedar"):
        values = rng.uniform(0, 1, size=(ROWS, 2)).round(3)
        lines = [f"{a},{b},{'ill' if a + b > 1 else 'well'}" for a, b in values]
        (folder / f"{name}.csv").write_text("\n".join(["a,b,state", *lines]) + "\n")
    (folder / "federation.yaml").write_text(
        "task: classification\nlabel: {column: state, classes: [ill, well]}\n"
        "features: [{column: a, range: [0, 1]}, {column: b, range: [0, 1]}]\n"
    )
    return folder


def own(hospitals: Path, **sections: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "data": {"name": "folder", "path": str(hospitals)},
            "federation": {"kind": "natural"},
            "algorithm": {"name": "global"},
            "schedule": {"rounds": 3, "batch": 16},
            **sections,
        }
    )


def test_own_records_are_scored_privately_and_train_no_reference_unless_asked(
    hospitals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("a central model was trained on somebody's own records")

    monkeypatch.setattr(evaluator, "train_references", never)
    result = local.run(own(hospitals), tmp_path / "run")
    assert result.accuracy is not None
    assert result.accuracy.is_private
    assert (result.loss, result.fairness, result.cluster_accuracy, result.whole_tests) == (None,) * 4
    files = RunFolder(tmp_path / "run")
    plan = read_json(files.plan)
    assert {held_out(name) for name in ("amber", "birch", "cedar")} <= set(plan["subjects"])
    lines = [json.loads(line) for line in files.metrics.read_text().splitlines()]
    assert [line["accuracy"] is None for line in lines] == [True, True, False], "the last round alone"
    assert all(line["loss"] is None for line in lines)
    assert "held-out records, outside" not in json.dumps(read_json(files.guarantee)["caveats"])
    found = recount(tmp_path / "run")
    assert found is not None
    assert found.spent <= found.promised
    html = write_run_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "measured with noise" in html
    for name, (low, high) in result.accuracy.intervals.items():
        assert f"{100 * low:.1f}% to {100 * high:.1f}%" in html, name


def test_exact_scores_of_own_records_are_a_choice_that_the_guarantee_mentions(
    hospitals: Path, tmp_path: Path
) -> None:
    result = local.run(own(hospitals, evaluation={"kind": "exact"}), tmp_path / "run")
    assert result.accuracy is not None
    assert result.accuracy.kind == "exact"
    assert result.fairness is not None
    assert result.fairness.f_acc is None, "references are not trained unless asked for"
    assert "outside the guarantee" in json.dumps(read_json(RunFolder(tmp_path / "run").guarantee)["caveats"])


def test_a_population_tells_its_mean_and_nothing_of_single_clients(hospitals: Path, tmp_path: Path) -> None:
    chosen = own(
        hospitals,
        privacy={"unit": "client", "epsilon": 8, "delta": 0.02},
        algorithm={"name": "dp-ifca", "clusters": 2, "rate": 0.5},
    )
    result = local.run(chosen, tmp_path / "run")
    assert result.accuracy is not None
    assert (result.accuracy.min, result.accuracy.max, result.accuracy.per_client) == (None, None, {})
    assert result.clusters == {}, "which model a client chose is its own affair"
    charged = RunFolder(tmp_path / "run").ledger.read_text()
    assert charged.count(f'"release":"{EVALUATION}"') == 1
    assert POPULATION in charged
    assert result.epsilon <= 8.0


def test_one_clients_share_moves_the_populations_sum_by_at_most_one(tmp_path: Path) -> None:
    chosen = experiment(
        federation={"kind": "clusters", "sizes": [2, 2], "records_per_client": 30},
        privacy={"unit": "client", "epsilon": 8, "delta": 0.02},
        algorithm={"name": "dp-fedavg", "rate": 0.5},
        schedule={"rounds": 2, "batch": 10},
    )
    prepared = calibrate(chosen)
    facts = TrainingFacts(
        prepared.facts.clients, (1,) * 4, 0.1, SecretKey.from_seed(1), SecretKey.from_seed(1), 0
    )
    models = np.zeros((1, 3), dtype=np.float32)

    def total(shares: dict[str, float], folder: str) -> float:
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "ledger.jsonl"
        with Ledger.open(path, prepared.plan, budget=prepared.budgets, accountant="rdp") as ledger:
            scores = PrivateScores(facts, prepared.plan, ledger, "test")
            return scores.of_clients(models, 1, lambda: shares).value

    everyone = dict.fromkeys(prepared.facts.clients, 0.7)
    first = prepared.facts.clients[0]
    usual = total(everyone, "usual")
    assert total({**everyone, first: 0.0}, "none") - usual == pytest.approx(-0.7)
    assert total({**everyone, first: 9e9}, "liar") - usual == pytest.approx(0.3), "a share is at most one"
    silent = {name: share for name, share in everyone.items() if name != first}
    assert total(silent, "silent") - usual == pytest.approx(-0.2), "like one that is right by half"


def test_a_run_killed_after_a_private_score_gives_the_same_one_again(
    hospitals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = own(hospitals, seeds={"simulation": 0, "noise": 3})
    whole = local.run(chosen, tmp_path / "whole")
    log = Run._log

    def killed(*arguments: Any) -> None:
        if arguments[1].round == 3:
            raise KeyboardInterrupt
        log(*arguments)

    monkeypatch.setattr(Run, "_log", killed)
    with pytest.raises(KeyboardInterrupt):
        local.run(chosen, tmp_path / "cut")
    monkeypatch.setattr(Run, "_log", log)
    assert local.run(chosen, tmp_path / "cut", resume=True).accuracy == whole.accuracy
    for name in ("ledger.jsonl", "metrics.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert RunResult.load(tmp_path / "cut").accuracy == whole.accuracy


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scores between workers": (
        {
            "privacy": {"unit": "worker"},
            "algorithm": {"name": "dp-ogl"},
            "federation": {"kind": "groups", "structure": "ring", "workers": 6, "groups": 3},
        },
        r"evaluation\.kind: private with privacy\.unit worker",
    ),
    "a publication's arithmetic": ({"privacy": {"mode": "paper"}}, r"evaluation\.kind: private with privacy"),
    "references beside them": (
        {"evaluation": {"kind": "private", "references": True}},
        r"evaluation\.references: true",
    ),
    "a kind that is none": ({"evaluation": {"kind": "noisy"}}, r"evaluation\.kind: 'noisy'"),
}


@pytest.mark.parametrize(("sections", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_what_noise_on_a_score_cannot_keep_is_refused(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        experiment(**sections)


def test_scores_never_cost_more_than_the_budget() -> None:
    with pytest.raises(InputError, match=r"evaluation\.epsilon: 1 is more than the budget of 0\.5"):
        calibrate(experiment(privacy={"epsilon": 0.5}))
    cheap = calibrate(experiment(privacy={"epsilon": 0.5}, evaluation={"kind": "private"}))
    assert cheap.guarantee.epsilon <= 0.5
    workers = own(Path("nowhere"), privacy={"unit": "worker"}, algorithm={"name": "dp-ogl"})
    assert workers.evaluation_kind == "none", "nothing is told where it cannot be told privately"
