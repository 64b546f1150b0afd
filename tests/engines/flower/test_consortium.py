"""A consortium over time, of real processes: keys change, a site moves, another leaves, the server moves."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_federation import RealFederation, wait_until
from site_folders import NAMES, write_sites

from coterie.engines.flower.keys import make_site_key
from coterie.engines.flower.processes import free_port

pytestmark = pytest.mark.deployment

ROUNDS = 24


def coterie(*words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ends(federation: RealFederation, name: str) -> None:
    """A site is stopped by its operator."""
    federation.joined[name].send_signal(signal.SIGTERM)
    federation.joined[name].wait(timeout=60)


def test_keys_sites_and_the_server_change_while_a_run_goes_on_and_a_later_one_adds_to_it(
    tmp_path: Path,
) -> None:
    experiment = {
        "algorithm": {"name": "global"},
        "privacy": {"epsilon": 8},
        "schedule": {"rounds": ROUNDS, "batch": 40},
    }
    amber, birch, cedar, dune = NAMES
    waiting = ("--answer", "60", "--rejoin", "20")
    with RealFederation(tmp_path, write_sites(tmp_path / "data"), experiment) as made:
        other_port = free_port()
        at = ("--server", f"127.0.0.1:{made.port},127.0.0.1:{other_port}")
        made.serve(*waiting)
        for name in NAMES:
            made.join(name, *at)
        made.wait_for_round(1)

        # A key is rotated: the old one is refused at once, and told why; the new one goes on as that site.
        key = make_site_key(tmp_path / "new", dune)
        coterie("keys", made.keys.path, "--rotate", dune, "--public", key.with_suffix(".pub"))
        wait_until("dune is told", lambda: "revoked this key" in made.log(dune))
        ends(made, dune)
        made.join(dune, *at, "--key", str(key), "--resume")

        # A site moves, with its folder and its key.
        ends(made, amber)
        moved = tmp_path / "elsewhere" / amber
        shutil.move(made.sites[amber], moved)
        made.sites[amber] = moved
        made.join(amber, *at, "--resume")

        # A site leaves for good; what it was charged stands.
        ends(made, cedar)
        coterie("keys", made.keys.path, "--revoke", cedar)
        ledger = made.sites[cedar] / ".coterie" / "ledger.jsonl"
        charged = ledger.read_bytes()

        # The server moves.
        wait_until("amber is back", lambda: made.log(amber).count("connected to") > 1)
        done = made.rounds()
        made.wait_for_round(min(done + 1, ROUNDS - 2))
        assert made.server is not None
        made.kill(made.server)
        made.port = other_port
        made.serve(*waiting, "--wait", "60", "--resume")
        staying = (amber, birch, dune)
        assert made.server.wait(timeout=600) == 0, made.log("server")
        for name in staying:
            assert made.joined[name].wait(timeout=60) == 0, made.log(name)
        result = json.loads(made.out("server"))
        tally = result["participation"]
        assert result["rounds"] == ROUNDS
        assert tally[cedar]["missed"] > 0
        assert tally[birch]["missed"] == 0
        assert tally[amber]["answered"] > 1
        assert tally[dune]["answered"] > 1
        assert ledger.read_bytes() == charged

        # Everybody who stayed has its model, its report and its card.
        for name in staying:
            state = made.sites[name] / ".coterie"
            assert (state / "report.html").exists()
            told = json.loads((state / "card.json").read_text())
            assert told["epsilon"] == json.loads((state / "model" / "guarantee.json").read_text())["epsilon"]
            data = made.sites[name] / f"{name}.npz"
            predicted = json.loads(coterie("predict", state, "--data", data, "--json"))
            assert predicted["records"] == 400

        # A later run with the same sites needs folders of its own, and adds to what was spent.
        made.run = tmp_path / "later"
        made.serve(*waiting)
        for name in staying:
            key = tmp_path / "new" / f"{dune}.key" if name == dune else made.keys.sites / f"{name}.key"
            state = made.sites[name] / "later"
            made.join(name, *at, "--key", str(key), "--state", str(state))
        assert made.server.wait(timeout=600) == 0, made.log("server")
        for name in staying:
            assert made.joined[name].wait(timeout=60) == 0, made.log(name)
            history = json.loads((made.sites[name] / "later" / "card.json").read_text())["history"]
            first = json.loads((made.sites[name] / ".coterie" / "finished.json").read_text())["epsilon"]
            assert history["experiments"] == 2
            assert history["total_epsilon"] > first
