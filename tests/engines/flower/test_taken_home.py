"""When an experiment is over a site holds what it uses: its model, its report, its guarantee."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_federation import QUICK, MemoryFederation, experiment
from memory_grid import MemoryGrid
from site_folders import NAMES, write_sites
from tiny_site import FINAL, contract, deliver, joined, training
from trusting import sites_of, trusting
from typer.testing import CliRunner

from coterie.algorithms import find_algorithm
from coterie.cli.main import app
from coterie.engines.flower import messages
from coterie.engines.flower.joining import Joining, open_site
from coterie.engines.flower.taken_home import MODELS, read_models
from coterie.engines.flower.transport import Transport
from coterie.errors import CoterieError, InputError
from coterie.experiment import checkpoint
from coterie.experiment.card import FIELDS
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.served_run import ServedRun, without_models
from coterie.experiment.site_card import card_of
from coterie.experiment.site_models import SiteModels, open_models
from coterie.privacy import Unit
from coterie.report.site import write_site_report


def final_state(federation: MemoryFederation, out: Path) -> Any:
    chosen = federation.experiment
    algorithm = find_algorithm(chosen.privacy.unit, chosen.algorithm.name)
    saved = checkpoint.load(RunFolder(out).checkpoint, algorithm.state_type)
    assert saved is not None
    return saved.state


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Path]:
    """Four sites with folders of records, two rounds in two clusters, served from memory."""
    folder = tmp_path_factory.mktemp("home")
    sites = write_sites(folder / "data", records=60)
    chosen = read_experiment(None, ["algorithm.name=oracle", "schedule.rounds=2", "schedule.batch=20"])
    opened = {name: open_site(Joining(sites[name], 8.0, noise_seed=5, held_out=0.2)) for name in NAMES}
    nodes = dict(zip(NAMES, range(100, 104), strict=True))
    grid = MemoryGrid({nodes[name]: site.handle for name, site in opened.items()})
    truth = {"amber": 0, "birch": 0, "cedar": 1, "dune": 1}
    transport = Transport(grid, nodes, QUICK)
    ServedRun(chosen, RunFolder(folder / "run"), transport, truth=truth).finish()
    return {name: sites[name] / ".coterie" for name in NAMES}, folder


def test_each_site_has_the_model_of_its_own_cluster_and_no_other(
    folders: tuple[dict[str, Path], Path],
) -> None:
    states, folder = folders
    algorithm = find_algorithm(Unit.RECORD, "oracle")
    saved = checkpoint.load(RunFolder(folder / "run").checkpoint, algorithm.state_type)
    assert saved is not None
    clusters = {"amber": 0, "birch": 0, "cedar": 1, "dune": 1}
    for name, state in states.items():
        models, personal = read_models(state / "model")
        np.testing.assert_array_equal(models, saved.state.models[[clusters[name]]])
        assert personal is None
        assert open_models(state).trained.promise.subject == name
        assert stat.S_IMODE((state / "model").stat().st_mode) == 0o700
    assert without_models(RunFolder(folder / "run"), NAMES) == []


def test_predict_and_export_work_at_the_site(folders: tuple[dict[str, Path], Path], tmp_path: Path) -> None:
    states, folder = folders
    state, data = states["cedar"], folder / "data" / "cedar" / "cedar.npz"
    ended = CliRunner().invoke(app, ["predict", str(state), "--data", str(data), "--json"])
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout)
    assert (told["records"], told["cluster"]) == (60, 1)
    images = np.load(data)
    models, _ = read_models(state / "model")
    network = open_models(state).network(models[0])
    expected = network(torch.from_numpy(images["x"].astype(np.float32))).argmax(dim=1).numpy()
    assert told["predictions"] == expected.tolist()
    out = tmp_path / "exported"
    ended = CliRunner().invoke(app, ["export", str(state), "--out", str(out), "--json"])
    assert ended.exit_code == 0, ended.output
    assert (out / "client.safetensors").exists()
    assert "one record of cedar" in (out / "CARD.md").read_text()
    for another in ({"cluster": 0}, {"client": "amber"}):
        with pytest.raises(InputError, match="allowed: that"):
            open_models(state).chosen(**another)  # type: ignore[arg-type]


def test_the_report_counts_the_ledger_again(folders: tuple[dict[str, Path], Path]) -> None:
    states, _ = folders
    page = write_site_report(states["amber"]).read_text()
    spent = json.loads((states["amber"] / "finished.json").read_text())["epsilon"]
    assert f"epsilon {np.ceil(100 * spent) / 100:.2f} of 8" in page
    assert "one record of amber" in page
    assert "birch" not in page  # nothing of others
    ended = CliRunner().invoke(app, ["report", str(states["amber"])])
    assert ended.exit_code == 0, ended.output
    end = states["amber"] / "finished.json"
    changed = {**json.loads(end.read_text()), "epsilon": spent / 2}
    before = end.read_text()
    end.write_text(json.dumps(changed))
    with pytest.raises(CoterieError, match="does not follow from the ledger"):
        write_site_report(states["amber"])
    end.write_text(before)


def test_each_site_has_a_card_of_its_own_records(folders: tuple[dict[str, Path], Path]) -> None:
    states, _ = folders
    state = states["dune"]
    ended = CliRunner().invoke(app, ["card", str(state), "--format", "json"])
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout)
    assert set(FIELDS) <= set(told)
    signed = json.loads((state / "contract.json").read_text())["contract"]
    promise = open_models(state).trained.promise
    assert (told["epsilon"], told["delta"]) == (promise.epsilon, signed["delta"])
    assert list(told["per_client"]) == [told["run"]] == ["dune"]
    assert told["epsilon_at_1e-5"] > told["epsilon"]  # at a smaller delta
    points = told["profile"]["epsilon_at_delta"]
    assert points["1e-05"] == told["epsilon_at_1e-5"]
    assert points["1e-09"] > points["1e-03"]
    assert told["data"]["source"] == "this site's own records"
    assert told["history"]["experiments"] == 1
    assert "contract alone" in told["history"]["text"]
    assert json.loads((state / "card.json").read_text()) == told
    text = CliRunner().invoke(app, ["card", str(state)])
    assert "one record of dune" in text.stdout
    assert "amber" not in text.stdout  # nothing of others
    registered = CliRunner().invoke(app, ["card", str(state), "--format", "registry"])
    assert "Federated" in registered.stdout


def test_the_card_of_a_site_whose_experiment_goes_on_is_refused(tmp_path: Path) -> None:
    made = joined(tmp_path)
    deliver(made, messages.TRAIN, training())
    made.close()
    with pytest.raises(InputError, match="is not over"):
        card_of(tmp_path)


@pytest.mark.parametrize(
    ("unit", "algorithm"), [("client", {"name": "dp-fedavg"}), ("worker", {"name": "dp-ogl", "period": 2})]
)
def test_a_site_that_trusted_its_server_has_a_card_too(
    tmp_path: Path, unit: str, algorithm: dict[str, Any]
) -> None:
    federation = sites_of(trusting(unit, algorithm), tmp_path / "sites")
    federation.serve(tmp_path / "run")
    name = min(federation.sites)
    told = card_of(federation.sites[name].files.path).content
    promise = federation.sites[name].files.path / "model"
    assert told["epsilon"] == open_models(promise).trained.promise.epsilon
    assert told["unit"]["name"] == unit
    assert told["epsilon_at_1e-5"] >= told["epsilon"]
    assert told["history"]["total_epsilon"] is None  # no folder of records, so nothing was entered
    federation.close()


def test_a_model_that_was_changed_is_not_used(tmp_path: Path) -> None:
    made = joined(tmp_path)
    deliver(made, messages.FINISHED, FINAL.to_content())
    path = tmp_path / "model" / MODELS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="not as it was written"):
        open_models(tmp_path)


def test_an_end_cut_short_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = joined(tmp_path)
    deliver(made, messages.TRAIN, training())
    monkeypatch.setattr("coterie.engines.flower.kept.Finished.save", None)  # dies before the mark
    assert messages.is_refusal(deliver(made, messages.FINISHED, FINAL.to_content())) == "failed"
    monkeypatch.undo()
    made.close()
    again = joined(tmp_path)
    assert messages.is_refusal(deliver(again, messages.FINISHED, FINAL.to_content())) is None
    assert SiteModels.open(tmp_path).facts.contract == contract().digest


STRANGE = {
    "another length": {"models": np.zeros((1, 3), dtype=np.float32)},
    "not finite": {"models": np.full((1, FINAL.models.shape[1]), np.nan, dtype=np.float32)},
    "a cluster of several": {"models": np.zeros((2, FINAL.models.shape[1]), dtype=np.float32)},
    "no cluster": {"cluster": 10**6},
}


@pytest.mark.parametrize("changes", STRANGE.values(), ids=STRANGE.keys())
def test_strange_models_end_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    made = joined(tmp_path)
    final = messages.FinalModels(**{**vars(FINAL), **changes})
    assert messages.is_refusal(deliver(made, messages.FINISHED, final.to_content())) == "garbage"
    assert not made.finished
    made.close()


# --- sites that choose for themselves, workers -------------------------------------------------------


def test_a_site_that_chooses_for_itself_gets_all_it_chooses_from(tmp_path: Path) -> None:
    chosen = trusting("client", {"name": "dp-ifca", "clusters": 2, "start": "random"})
    federation = sites_of(chosen, tmp_path / "sites")
    federation.serve(tmp_path / "run")
    state = final_state(federation, tmp_path / "run")
    for site in federation.sites.values():
        found = SiteModels.open(site.files.path)
        np.testing.assert_array_equal(found.rows, state.models)
        assert found.facts.cluster in (0, 1)
        np.testing.assert_array_equal(found.chosen()[0], state.models[found.facts.cluster])
        assert "for this site alone" in write_site_report(site.files.path).read_text()


def test_a_worker_gets_no_model_of_groups_that_it_is_not_in(tmp_path: Path) -> None:
    federation = sites_of(trusting("worker", {"name": "dp-ogl", "period": 2}), tmp_path / "sites")
    federation.serve(tmp_path / "run")
    finals = [each for each in federation.grid.sent if each.metadata.message_type == messages.FINISHED]
    assert len(finals) == len(federation.sites)
    assert all(each.content.array_records["arrays"]["models"].shape[0] == 1 for each in finals)


def test_personal_parts_come_home_and_are_marked(tmp_path: Path) -> None:
    chosen = trusting(
        "client",
        {"name": "dp-fedper"},
        rate=1.0,
        model={"name": "cnn"},
        federation={"kind": "clusters", "sizes": [2, 2], "shift": "label", "records_per_client": 10},
    )
    federation = sites_of(chosen, tmp_path / "sites")
    federation.serve(tmp_path / "run")
    for name, site in federation.sites.items():
        found = SiteModels.open(site.files.path)
        assert found.personal_parts is not None
        own, _ = found.chosen()
        shared = found.rows[0]
        np.testing.assert_array_equal(
            own[~found.personal_parts.personal], shared[~found.personal_parts.personal]
        )
        assert not np.array_equal(own, shared), name


# --- sites that were away when it ended --------------------------------------------------------------


def test_a_site_that_was_away_takes_its_model_home_later(tmp_path: Path) -> None:
    federation = MemoryFederation(experiment(algorithm={"name": "global"}), tmp_path / "sites")
    out, name, grid = tmp_path / "run", next(iter(federation.sites)), federation.grid
    pull = grid.pull_messages

    def away_at_the_end(identities: Any) -> Any:
        if grid.sent and grid.sent[-1].metadata.message_type == messages.FINISHED:
            grid.offline = {federation.nodes[name]}
        return pull(identities)

    grid.pull_messages = away_at_the_end  # type: ignore[method-assign]
    transport = Transport(grid, federation.nodes, replace(QUICK, answer=0.3))
    ServedRun(federation.experiment, RunFolder(out), transport).finish()
    assert RunFolder(out).finished
    assert without_models(RunFolder(out), federation.sites) == [name]
    assert not federation.sites[name].finished
    grid.pull_messages, grid.offline = pull, set()  # type: ignore[method-assign]
    waiting = {name: federation.nodes[name]}
    again = ServedRun(federation.experiment, RunFolder(out), Transport(grid, waiting, QUICK))
    assert again.hand_out_rest() == []
    assert federation.sites[name].finished
    assert SiteModels.open(federation.sites[name].files.path).facts.client == name
