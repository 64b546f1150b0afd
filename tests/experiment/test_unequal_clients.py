"""Clients with records and budgets of their own: each is noised, charged and weighed by what it has."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.algorithms.record import r_dpcfl
from coterie.clustering.mixture import Mixture
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.local import calibrate, finish, load_federation
from coterie.files import read_json
from coterie.privacy import Budget, Ledger, PrivacyPlan, epsilon_of
from coterie.privacy.mechanisms import NoisySum

RECORDS = (220, 180, 140, 220, 160, 100)
SETTINGS = [
    "federation.sizes=[3,3]",
    "federation.records_per_client=220",
    "schedule.rounds=6",
    "schedule.batch=20",
    "privacy.epsilon=20",
    "privacy.delta=1.0e-3",
    "privacy.budgets={client-1: {epsilon: 10}, client-5: {epsilon: 30, delta: 1.0e-4}}",
    "algorithm.candidates=[2,3]",
    "evaluation.every=6",
    "evaluation.references=false",
    "seeds.noise=1",
]


def test_r_dpcfl_weighs_every_client_by_its_own_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = read_experiment(None, SETTINGS)
    equal = load_federation(experiment)
    clients = tuple(
        replace(client, train=client.train.take(slice(0, size)))
        for client, size in zip(equal.clients, RECORDS, strict=True)
    )
    prepared = calibrate(experiment, replace(equal, clients=clients))
    own = {"client-1": Budget(10.0, 1e-3), "client-5": Budget(30.0, 1e-4)}
    assert prepared.budgets == {c.name: own.get(c.name, Budget(20.0, 1e-3)) for c in clients}
    seen: list[float] = []
    choose = r_dpcfl.choose_mixture

    def watched(releases: Sequence[Any], *rest: Any) -> tuple[Mixture, Any]:
        seen.extend(release.noise_std for release in releases)
        return choose(releases, *rest)

    monkeypatch.setattr(r_dpcfl, "choose_mixture", watched)
    result = finish(prepared, RunFolder(tmp_path / "run"))

    plan = PrivacyPlan.from_json(read_json(RunFolder(tmp_path / "run").plan))
    noise = []
    for unit, size in zip(plan.units, RECORDS, strict=True):
        for name in ("first round", "training"):
            assert getattr(unit.release(name).mechanism, "records") == size  # noqa: B009
        mechanism = unit.release("first round").mechanism
        assert isinstance(mechanism, NoisySum)
        noise.append(mechanism.clip * mechanism.multiplier / size)
        budget = prepared.budgets[unit.subject]
        spent = epsilon_of(unit.event, budget.delta, "rdp", plan.adjacency)
        assert 0.99 * budget.epsilon < spent <= budget.epsilon
    assert seen == pytest.approx(noise)
    assert max(noise) > 2 * min(noise)
    with Ledger.open(
        RunFolder(tmp_path / "run").ledger, plan, budget=prepared.budgets, accountant="rdp"
    ) as ledger:
        for unit in plan.units:
            assert ledger.executed(unit.subject) == {r.name: r.times for r in unit.releases}
    assert result.clusters_found
