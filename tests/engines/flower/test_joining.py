"""From an operator's words to a site, and the four hospitals of the example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from site_folders import write_sites
from tiny_site import deliver

from coterie.data.folder import read_folder
from coterie.data.heart_disease import read_heart_disease
from coterie.engines.flower import messages
from coterie.engines.flower.joining import Joining, open_site
from coterie.engines.flower.messages import SiteFacts, Split
from coterie.errors import InputError
from coterie.experiment.files import read_experiment
from coterie.experiment.runner import load_federation
from coterie.experiment.serving import check_servable

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "heart-disease"


def test_a_site_splits_its_records_as_a_simulation_of_all_would(tmp_path: Path) -> None:
    folders = write_sites(tmp_path, records=50)
    chosen = read_experiment(
        None,
        ["data.name=folder", f"data.path={tmp_path / 'together'}", "federation.kind=natural"],
    )
    everyone = load_federation(chosen)
    for position, client in enumerate(everyone.clients):
        site = open_site(Joining(folders[client.name], 8.0))
        alone, _ = site._records(Split(0, position, 0.2, 0.0))
        for part in ("train", "validation", "test"):
            ours, theirs = getattr(alone, part), getattr(client, part)
            np.testing.assert_array_equal(ours.features, theirs.features)
            np.testing.assert_array_equal(ours.targets, theirs.targets)
        facts = SiteFacts.from_content(deliver(site, messages.FACTS, Split(0, 0, 0.2, 0.0).to_content()))
        assert (facts.name, facts.records, facts.simulation) == (client.name, 40, False)


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
        "state": str(tmp_path / "books"),
        "models": "a.b:c,d:e",
        "report-accuracy": True,
        "noise-seed": 3,
    }
    expected = Joining(tmp_path, 2.0, 1e-4, "va", tmp_path / "books", ("a.b:c", "d:e"), True, 3)
    assert Joining.from_config(config) == expected


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
