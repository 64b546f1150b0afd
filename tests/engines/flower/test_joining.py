"""From an operator's words to a site, and the four hospitals of the example."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from site_folders import write_sites
from tiny_site import deliver

from coterie.data.folder import read_folder
from coterie.data.heart_disease import read_heart_disease
from coterie.engines.flower import messages
from coterie.engines.flower.joining import Joining, open_site, parse_split
from coterie.engines.flower.messages import SiteFacts
from coterie.errors import InputError
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.local import load_federation
from coterie.experiment.sites import check_servable
from coterie.privacy import Adjacency, HeldOut

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "heart-disease"


def test_a_site_splits_its_records_as_a_simulation_of_all_would(tmp_path: Path) -> None:
    folders = write_sites(tmp_path, records=50)
    chosen = read_experiment(
        None,
        ["data.name=folder", f"data.path={tmp_path / 'together'}", "federation.kind=natural"],
    )
    everyone = load_federation(chosen)
    for position, client in enumerate(everyone.clients):
        site = open_site(Joining(folders[client.name], 8.0, held_out=0.2, split=(0, position)))
        [alone] = site.alone.clients
        for part in ("train", "validation", "test"):
            ours, theirs = getattr(alone, part), getattr(client, part)
            np.testing.assert_array_equal(ours.features, theirs.features)
            np.testing.assert_array_equal(ours.targets, theirs.targets)
        facts = SiteFacts.from_content(deliver(site, messages.FACTS, messages.pack({})))
        assert (facts.name, facts.records, facts.held_out) == (client.name, 40, 10)
        assert (facts.reported, facts.simulation) == (None, False)


def test_all_records_are_trained_on_and_nothing_is_scored_unless_the_operator_says_so(tmp_path: Path) -> None:
    folders = write_sites(tmp_path, records=50)
    site = open_site(Joining(folders["amber"], 8.0))
    facts = SiteFacts.from_content(deliver(site, messages.FACTS, messages.pack({})))
    assert (facts.records, facts.held_out, facts.reported) == (50, 0, None)
    asking = open_site(
        Joining(folders["amber"], 8.0, held_out=0.4, evaluation_epsilon=0.5, evaluation_reports=3)
    )
    facts = SiteFacts.from_content(deliver(asking, messages.FACTS, messages.pack({})))
    assert (facts.records, facts.held_out, facts.reported) == (30, 20, HeldOut(20, 0.5, 3))


def test_a_server_has_no_say_in_what_is_held_out(tmp_path: Path) -> None:
    site = open_site(Joining(write_sites(tmp_path, records=50)["amber"], 8.0))
    asked = messages.pack({"seed": 0, "position": 0, "test_share": 0.95, "validation_share": 0.0})
    assert messages.is_refusal(deliver(site, messages.FACTS, asked)) == "garbage"


SAID_WRONG = {
    "everything held out": ({"held_out": 1.0}, "--held-out: 1.0"),
    "less than nothing": ({"held_out": -0.1}, "--held-out"),
    "scores by no records": ({"evaluation_epsilon": 1.0}, "--evaluation-epsilon: no records"),
    "scores for nothing": ({"held_out": 0.2, "evaluation_epsilon": 0.0}, "--evaluation-epsilon: 0.0"),
    "scores without limit": ({"held_out": 0.2, "evaluation_epsilon": float("inf")}, "--evaluation-epsilon"),
    "no scores": (
        {"held_out": 0.2, "evaluation_epsilon": 1.0, "evaluation_reports": 0},
        "--evaluation-reports: 0",
    ),
}


@pytest.mark.parametrize(("said", "line"), SAID_WRONG.values(), ids=SAID_WRONG.keys())
def test_reports_that_make_no_sense_are_one_line(said: dict[str, Any], line: str, tmp_path: Path) -> None:
    folder = write_sites(tmp_path, records=50)["amber"]
    with pytest.raises(InputError, match=line):
        open_site(Joining(folder, 8.0, **said))
    with pytest.raises(InputError, match="--split"):
        parse_split("0:x")


def test_what_an_operator_says_wrong_is_one_line(tmp_path: Path) -> None:
    folders = write_sites(tmp_path, records=20)
    with pytest.raises(InputError, match="holds 4 clients"):
        open_site(Joining(tmp_path / "together", 8.0))
    with pytest.raises(InputError, match="--epsilon"):
        open_site(Joining(folders["amber"], float("nan")))
    with pytest.raises(InputError, match="site"):
        open_site(Joining(folders["amber"], 8.0, name="../amber"))
    with pytest.raises(InputError, match="data and epsilon"):
        Joining.from_config({"epsilon": 8.0})


def test_a_nodes_configuration_says_what_the_command_line_does(tmp_path: Path) -> None:
    config = {
        "data": str(tmp_path),
        "epsilon": 2.0,
        "delta": 1e-4,
        "name": "va",
        "state": str(tmp_path / "state"),
        "models": "a.b:c,d:e",
        "held-out": 0.2,
        "split": "0:3",
        "evaluation-epsilon": 1.0,
        "evaluation-reports": 2,
        "noise-seed": 3,
        "adjacency": "replace-one",
    }
    models = ("a.b:c", "d:e")
    expected = Joining(tmp_path, 2.0, 1e-4, "va", tmp_path / "state", models, 0.2, (0, 3), 1.0, 2, 3)
    expected = replace(expected, adjacency=Adjacency.REPLACE_ONE)
    assert Joining.from_config(config) == expected
    for key, value in (
        ("epsilon", True),
        ("held-out", True),
        ("noise-seed", False),
        ("adjacency", "any"),
        ("trust-server", "false"),
    ):
        with pytest.raises(InputError, match=f"node config: {key}: {value} is not allowed"):
            Joining.from_config({**config, key: value})


def test_the_neighbours_that_an_operator_names_are_the_sites_limit(tmp_path: Path) -> None:
    folders = write_sites(tmp_path, records=20)
    for adjacency in (None, Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE):
        joining = Joining(folders["amber"], 8.0, state=tmp_path / str(adjacency), adjacency=adjacency)
        assert open_site(joining).limits.adjacency is adjacency


def test_the_example_writes_the_four_hospitals_and_can_be_served(
    tmp_path: Path, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(real_data))
    source = real_data / "heart-disease"
    subprocess.run(
        [sys.executable, EXAMPLE / "make_sites.py", source, tmp_path], check=True, capture_output=True
    )
    expected = read_heart_disease()
    assert expected.owners is not None
    for index, name in enumerate(expected.owners.names):
        found = read_folder(tmp_path / name).train
        mine = expected.owners.train == index
        np.testing.assert_array_equal(found.features, expected.train.features[mine])
        np.testing.assert_array_equal(found.targets, expected.train.targets[mine])
    check_servable(read_experiment(EXAMPLE / "experiment.yaml"))
