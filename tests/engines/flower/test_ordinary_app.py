"""Coterie as an ordinary Flower app: Flower's own programs, `flwr run`, and the same contract and ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from real_federation import PATIENCE, processes_about, wait_until
from site_folders import write_sites

from coterie.engines.flower.processes import Child, Upstream, environment, free_port, wait_until_healthy
from coterie.experiment.serving import APP

pytestmark = pytest.mark.deployment


def test_flwr_run_reaches_sites_through_their_nodes_configuration(tmp_path: Path) -> None:
    sites = write_sites(tmp_path / "data")
    names = ("amber", "cedar")
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(
        yaml.safe_dump({"algorithm": {"name": "global"}, "schedule": {"rounds": 1, "batch": 40}})
    )
    address, home = f"127.0.0.1:{free_port()}", tmp_path / "flwr"
    with ExitStack() as stack:
        arguments = ["--insecure", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
        link = Child("flower-superlink", arguments, home, tmp_path / "link.log")
        stack.callback(link.close)
        wait_until_healthy(link, Upstream(address), PATIENCE)
        for name in names:
            config = f'data="{sites[name]}" epsilon=8.0 noise-seed=5'
            arguments = ["--insecure", "--superlink", address, "--port", str(free_port())]
            node = Child(
                "flower-supernode",
                [*arguments, "--node-config", config],
                tmp_path / f"{name}-flwr",
                tmp_path / f"{name}.log",
            )
            stack.callback(node.close)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
        )
        config = f'experiment="{experiment}" out="{tmp_path / "run"}" clients=2'
        subprocess.run(
            [Path(sys.executable).parent / "flwr", "run", APP, "here", "-c", config],
            env=environment(home),
            check=True,
            capture_output=True,
            timeout=PATIENCE,
        )
        wait_until("the run is finished", (tmp_path / "run" / "result.json").exists)
        for name in names:  # each is handed its model once the result is there
            wait_until(f"{name} is finished", (sites[name] / ".coterie" / "finished.json").exists)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["rounds"] == 1
    assert all(tally == {"answered": 1, "missed": 0} for tally in result["participation"].values())
    for name in names:
        state = sites[name] / ".coterie"
        assert (state / "finished.json").exists()
        assert len((state / "ledger.jsonl").read_text().splitlines()) == 2
    assert processes_about(tmp_path) == []
