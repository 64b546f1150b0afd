"""Files for containers and systemd: they parse, name what exists, and their commands run a federation."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import coterie
from coterie.cli.main import COMMANDS
from coterie.engines.flower.keys import make_keys
from coterie.engines.flower.processes import free_port

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
HOME = "/srv/coterie"
SERVICES = {"server": "serve", "site": "join"}


def composed(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / f"compose.{kind}.yaml").read_text())["services"][kind]
    return found


def started(kind: str) -> list[str]:
    """What a unit starts, as words."""
    text = (DEPLOY / f"coterie-{kind}.service").read_text().replace("\\\n", " ")
    [line] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    return shlex.split(line)


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize("kind", SERVICES)
def test_both_ways_start_the_same_command_with_options_that_exist(kind: str) -> None:
    in_container, by_systemd = composed(kind)["command"], started(kind)
    command = SERVICES[kind]
    assert command in COMMANDS
    assert (in_container[0], by_systemd[1]) == (command, command)
    assert options(in_container) == options(by_systemd)
    told = subprocess.run(
        [sys.executable, "-m", "coterie", command, "--help"], capture_output=True, text=True, check=True
    )
    assert options(in_container) <= set(re.findall(r"--[a-z-]+", told.stdout))


def test_they_are_for_this_version() -> None:
    recipe = (DEPLOY / "Containerfile").read_text()
    assert f'"coterie[fast,flower]=={coterie.__version__}"' in recipe
    assert {composed(kind)["image"] for kind in SERVICES} == {f"coterie:{coterie.__version__}"}


@pytest.mark.parametrize("kind", SERVICES)
def test_containers_have_no_more_rights_than_they_need(kind: str) -> None:
    service = composed(kind)
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["volumes"] == [f"./{kind}:{HOME}"]
    assert re.search(r"^USER \d+$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_a_linter_finds_nothing_in_the_recipe_of_the_image() -> None:
    found = subprocess.run(
        ["hadolint", str(DEPLOY / "Containerfile")], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("kind", SERVICES)
def test_systemd_accepts_the_units(kind: str, tmp_path: Path) -> None:
    unit = tmp_path / f"coterie-{kind}.service"
    text = (DEPLOY / unit.name).read_text()
    unit.write_text(text.replace("/opt/coterie/bin/coterie", sys.executable))  # one that is there
    found = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


# --- the same commands, without a container -----------------------------------------------------------


def write_site(folder: Path, name: str, keys: Path) -> None:
    rng = np.random.default_rng(len(name))
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "federation.yaml").write_text(
        "task: classification\nlabel: {classes: 2}\nfeatures: {shape: [3], range: [0, 1]}\n"
    )
    np.savez(folder / "data" / "records.npz", x=rng.random((60, 3)), y=rng.integers(2, size=60))
    shutil.copy(keys / "ca.crt", folder / "ca.crt")
    shutil.copy(keys / "sites" / f"{name}.key", folder / "site.key")
    (folder / "policy.yaml").write_text("epsilon: 8\nalgorithms: [global]\nmodels: [softmax]\n")


@pytest.mark.deployment
def test_their_commands_run_a_federation(tmp_path: Path) -> None:
    server, port = tmp_path / "server", free_port()
    server.mkdir()
    make_keys(server / "keys", [], ["east", "west"])
    (server / "experiment.yaml").write_text("algorithm: {name: global}\nschedule: {rounds: 2, batch: 10}\n")

    def start(words: list[str], home: Path, **filled: str) -> subprocess.Popen[str]:
        for name, value in filled.items():
            words = [re.sub(rf"\$\{{{name}[^}}]*\}}", value, word) for word in words]
        words = [word.replace(HOME, str(home)).replace("9443", str(port)) for word in words]
        log = (home / "log").open("w")
        return subprocess.Popen([sys.executable, "-m", "coterie", *words], stderr=log, stdout=log, text=True)

    running = {"server": start(composed("server")["command"], server)}
    for name in ("east", "west"):
        write_site(tmp_path / name, name, server / "keys")
        words = composed("site")["command"]
        running[name] = start(words, tmp_path / name, COTERIE_SERVER=f"127.0.0.1:{port}", COTERIE_SITE=name)
    try:
        codes = {name: process.wait(timeout=300) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    logs = {path.parent.name: path.read_text() for path in tmp_path.glob("*/log")}
    assert codes == {"server": 0, "east": 0, "west": 0}, logs
    assert "Finished" in (server / "live.html").read_text()
    told = [json.loads(line) for line in logs["server"].splitlines() if line.startswith("{")]
    rounds = [line["round"] for line in told if line["event"] == "round"]
    assert rounds == [1, 2]
    released = [line for line in logs["east"].splitlines() if '"event": "released"' in line]
    assert len(released) == 2
    assert (tmp_path / "east" / "state" / "report.html").exists()
    # What is wrong with the input does not get better by trying again, and is said with a code of its own.
    again = start(composed("server")["command"], server)
    assert again.wait(timeout=120) == 2
