"""Real processes killed, stopped and lied to; after each, what was spent is what was released.

Longer than a test should take: `make test-deployment` runs these, `make test` does not.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_federation import HERE, RealFederation, processes_about, wait_until
from site_folders import NAMES, write_sites

from coterie.algorithms import find_algorithm
from coterie.algorithms.protocol import Assignment
from coterie.engines.flower import agreement, messages
from coterie.engines.flower.contract import Contract
from coterie.engines.flower.messages import RequestId, SiteRequest
from coterie.engines.flower.network import open_link
from coterie.engines.flower.transport import Timeouts, Transport
from coterie.experiment import checkpoint, local
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.served_run import ServedRun
from coterie.experiment.serving import APP, wait_for
from coterie.privacy import Unit

pytestmark = pytest.mark.deployment

ROUNDS = 10
ODD = str(HERE / "odd_site.py")


def charged(federation: RealFederation, name: str) -> Counter[int]:
    """How often a site's own ledger says that it was charged, by round."""
    lines = (federation.sites[name] / ".coterie" / "ledger.jsonl").read_text().splitlines()[1:]
    return Counter(charge["round"] for line in lines for charge in json.loads(line)["charges"])


def released(federation: RealFederation, name: str) -> Counter[int]:
    """How often it computed a release, by its own log."""
    return Counter(
        int(round) for round in re.findall(r"round (\d+) of \d+, \w+: released", federation.log(name))
    )


# --- one federation, one run, everything that can happen to it ---------------------------------------


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFederation]:
    folder = tmp_path_factory.mktemp("faults")
    experiment = {
        "algorithm": {"name": "global"},
        "privacy": {"epsilon": 8},
        "schedule": {"rounds": ROUNDS, "batch": 40},
    }
    with RealFederation(folder, write_sites(folder / "data"), experiment) as made:
        yield made


WAITING = ("--answer", "75", "--rejoin", "90")


def missing_in(federation: RealFederation, round: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (federation.run / "participation.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["round"] == round:
            found = entry["missing"]
    return found


def test_a_liar_is_left_out_of_the_rounds_in_which_it_lies(federation: RealFederation) -> None:
    federation.serve(*WAITING)
    slow_amber, slow_birch = json.dumps({"slow": 4}), json.dumps({"slow": 9})
    federation.join("amber", program=(ODD, slow_amber))
    federation.join("birch", program=(ODD, slow_birch))
    federation.join("cedar")
    federation.join("dune", program=(ODD, json.dumps({"nan": 1, "huge": 2, "garbage": 3})))
    federation.wait_for_round(3)
    assert "not finite" in missing_in(federation, 1)["dune"]
    assert "no honest site" in missing_in(federation, 2)["dune"]
    assert "garbage" in missing_in(federation, 3)["dune"]
    for round in (1, 2, 3):
        assert set(missing_in(federation, round)) == {"dune"}


def test_a_site_killed_while_it_trains_comes_back_and_is_charged_once(federation: RealFederation) -> None:
    wait_until("amber trains in round 4", (federation.folder / "training-4").exists)
    assert charged(federation, "amber")[4] == 1  # before the answer, and it stands
    federation.kill(federation.joined["amber"])
    federation.join("amber")
    federation.wait_for_round(4)
    # It is sent the same message again once it is back; on a busy machine that may come too late.
    assert set(missing_in(federation, 4)) <= {"amber"}
    assert charged(federation, "amber")[4] == 1


def test_a_site_that_hangs_is_missing_and_what_it_missed_is_not_executed(federation: RealFederation) -> None:
    federation.joined["cedar"].send_signal(signal.SIGSTOP)
    before = federation.rounds()

    def missed_rounds() -> list[int]:
        return [round for round in (before + 1, before + 2) if "cedar" in missing_in(federation, round)]

    wait_until("a round without cedar", missed_rounds)
    [missed] = missed_rounds()[:1]
    assert missing_in(federation, missed)["cedar"] == "no answer in time"
    federation.joined["cedar"].send_signal(signal.SIGCONT)

    def goes_on() -> bool:
        """It refuses the old message, or that was withdrawn before it came, and it takes the next."""
        refused = re.search("refused a message of type train: (late|passed)", federation.log("cedar"))
        return bool(refused) or any(charged(federation, "cedar")[later] for later in (missed + 1, missed + 2))

    wait_until("cedar goes on", goes_on)
    assert charged(federation, "cedar")[missed] == 0


def test_a_server_killed_between_rounds_goes_on(federation: RealFederation) -> None:
    assert federation.server is not None
    done = federation.rounds()
    federation.wait_for_round(min(done + 1, 8))
    federation.kill(federation.server)
    federation.serve("--resume", *WAITING)


def test_a_server_killed_inside_a_round_goes_on(federation: RealFederation) -> None:
    assert federation.server is not None
    wait_until("birch trains in round 9", (federation.folder / "training-9").exists)
    federation.kill(federation.server)
    federation.kill(federation.joined["birch"])
    federation.join("birch")
    federation.serve("--resume", *WAITING)
    federation.wait_for_end()
    assert federation.server.returncode == 0, federation.log("server")


KILLED = {"amber": {4}, "birch": {9}}
"""Rounds in which a site was killed after its charge and before its answer."""


def test_after_all_that_what_was_spent_is_what_was_released(federation: RealFederation) -> None:
    result = json.loads(federation.out("server").splitlines()[-1])
    assert result["rounds"] == ROUNDS
    answered: dict[str, set[int]] = {name: set() for name in NAMES}
    for line in (federation.run / "participation.jsonl").read_text().splitlines():
        entry = json.loads(line)
        for name in entry["answered"]:
            answered[name].add(entry["round"])
    for name in NAMES:
        spent, computed = charged(federation, name), set(released(federation, name))
        assert max(spent.values()) == 1, f"{name}: a round was charged twice"
        # Nothing left a site uncharged, and nothing was charged that was not computed, but for the answers
        # that a killed site could not give any more: their charge stands.
        assert answered[name] <= computed <= set(spent), name
        assert set(spent) - computed <= KILLED.get(name, set()), name
        state = federation.sites[name] / ".coterie"
        told = json.loads((state / "finished.json").read_text())["epsilon"]
        assert told <= result["asked"][name] + 1e-9
    federation.stop()
    assert processes_about(federation.folder) == []


# --- a server that asks for more than was agreed ------------------------------------------------------


def test_a_greedy_server_gets_what_was_signed_and_no_more(tmp_path: Path) -> None:
    """Over TLS, with keys, to a real site: repeated, reordered, foreign and excessive requests."""
    sites = {"amber": write_sites(tmp_path / "data")["amber"]}
    experiment = {
        "algorithm": {"name": "global"},
        "privacy": {"epsilon": 8},
        "schedule": {"rounds": 2, "batch": 40},
    }
    with (
        RealFederation(tmp_path, sites, experiment) as made,
        open_link(tmp_path / "link", made.keys, "127.0.0.1", made.port, APP) as link,
    ):
        made.join("amber")
        with link.grid() as grid:
            transport = Transport(grid, link.nodes, Timeouts(answer=120.0))
            wait_for(transport, 600.0, everyone=True)
            run = ServedRun(read_experiment(made.experiment), RunFolder(made.run), transport)
            contract: Contract = run.contracts["amber"]
            start = run.calibrated.facts.initialise(0)

            def ask(round: int, model: np.ndarray, digest: str = contract.digest) -> Any:
                wanted = RequestId(digest, round, "training")
                content = {"amber": SiteRequest(wanted, model[None]).to_content(messages.TRAIN)}
                length = run.calibrated.facts.parameters

                def read(name: str, found: Any) -> np.ndarray:
                    messages.read_answer(found, wanted, {})
                    return messages.read_vector(found, length)

                return transport.ask(messages.TRAIN, content, read)

            def reason(answers: Any) -> str:
                return str(answers.missing["amber"])

            assert messages.REFUSALS["no contract"] in reason(ask(1, start))
            assert agreement.offer(transport, run.contracts).by_client == {"amber": contract.digest}
            assert messages.REFUSALS["other contract"] in reason(ask(1, start, "0" * 64))
            first = ask(1, start).by_client["amber"]
            np.testing.assert_array_equal(ask(1, start).by_client["amber"], first)
            assert charged(made, "amber") == {1: 1}
            second = ask(2, start + 1).by_client["amber"]
            assert not np.array_equal(first, second)
            assert messages.REFUSALS["passed"] in reason(ask(1, start + 2))
            assert messages.REFUSALS["over budget"] in reason(ask(2, start + 2))
            assert messages.REFUSALS["not planned"] in reason(ask(3, start))
            assert charged(made, "amber") == {1: 1, 2: 1}
            final = Assignment(start[None], {"amber": 0})
            assert agreement.finish(transport, run.contracts, final).by_client == {"amber": contract.digest}
        made.joined["amber"].wait(timeout=120)
        assert made.joined["amber"].returncode == 0
        assert released(made, "amber") == {1: 1, 2: 1}


# --- a server that is trusted -------------------------------------------------------------------------


def test_a_trusted_server_killed_in_between_reaches_the_simulations_state(tmp_path: Path) -> None:
    """`dp-ifca` of whole clients, routed, over TLS with keys."""
    sites = write_sites(tmp_path / "data")
    experiment = {
        "data": {"name": "folder", "path": str(tmp_path / "data" / "together")},
        "federation": {"kind": "natural"},
        "algorithm": {
            "name": "dp-ifca",
            "clusters": 2,
            "rate": 0.7,
            "rebalance": {"rule": "route", "minimum": 1},
        },
        "privacy": {"unit": "client", "epsilon": 30, "delta": 0.05, "clip": 0.5},
        "schedule": {"rounds": 3, "batch": 40},
        "seeds": {"noise": 5},
    }
    consent = ("--trust-server", "--epsilon", "30", "--delta", "0.05")
    with RealFederation(tmp_path, sites, experiment) as made:
        server_process = made.serve()
        for place, name in enumerate(NAMES):
            # The records that the simulation holds out, and its one report.
            made.join(
                name, *consent, "--held-out", "0.2", "--split", f"0:{place}", "--evaluation-epsilon", "30"
            )
        made.wait_for_round(1)
        made.kill(server_process)
        made.serve("--resume")
        made.wait_for_end()
        result = json.loads(made.out("server"))
        assert result["rounds"] == 3
        assert "trusting the server" in result["guarantee"]
        alone = local.run(read_experiment(made.experiment), tmp_path / "alone")
        kind = find_algorithm(Unit.CLIENT, "dp-ifca").state_type
        states = [
            vars(saved.state)
            for out in (made.run, tmp_path / "alone")
            if (saved := checkpoint.load(RunFolder(out).checkpoint, kind)) is not None
        ]
        for key, value in states[1].items():
            np.testing.assert_array_equal(states[0][key], value, err_msg=key)
        ledgers = [RunFolder(out).ledger.read_bytes() for out in (made.run, tmp_path / "alone")]
        assert ledgers[0] == ledgers[1]
        assert result["epsilon"] == alone.epsilon
        assert alone.accuracy is not None
        assert result["accuracy"]["mean"] == alone.accuracy.mean
        assert "in the clear" in made.log("amber")
        assert (made.run / "report.html").exists()
        assert not made.run.with_name("run.link").exists()
