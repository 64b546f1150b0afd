"""A site signs what its operator said yes to, or what a policy allows; the rest is refused by name."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_federation import QUICK, MemoryFederation, experiment
from real_federation import wait_until
from tiny_site import LIMITS, contract, deliver, plan_of, records, releases, site, training
from trusting import sites_of, trusting

from coterie.cli.join import _allowed
from coterie.engines.flower import messages
from coterie.engines.flower.booking import SiteBooking
from coterie.engines.flower.contract import MOST_WORK, Contract, Rules, promised
from coterie.engines.flower.joining import spent_before
from coterie.engines.flower.messages import quoted
from coterie.engines.flower.policy import read_policy
from coterie.engines.flower.review import Reviewer, in_words
from coterie.engines.flower.site import Site
from coterie.engines.flower.transport import Transport
from coterie.errors import InputError
from coterie.experiment import served_run
from coterie.experiment.folder import RunFolder
from coterie.experiment.served_run import ServedRun
from coterie.privacy import Adjacency
from coterie.register import DataSet

Facts = Sequence[tuple[str, str]]


def offered(made: Site, agreed: Contract | None = None) -> str | None:
    return messages.is_refusal(deliver(made, messages.OFFER, (agreed or contract()).to_content()))


# --- an operator who reads --------------------------------------------------------------------------


class Operator:
    """Reads what is shown, and answers when told to."""

    def __init__(self) -> None:
        self.shown: list[Facts] = []
        self.answer: bool | None = None
        self.ready = threading.Event()

    def decide(self, facts: Facts) -> bool:
        self.shown.append(facts)
        self.ready.wait(60)
        assert self.answer is not None
        return self.answer

    def say(self, answer: bool) -> None:
        self.answer = answer
        self.ready.set()


def reviewed(folder: Path, decide: Callable[[Facts], bool]) -> Site:
    beside = [("who asks", "hub:9443"), ("spent before", "nothing")]
    return Site(records(), folder, LIMITS, reviewer=Reviewer(decide, lambda: beside))


def eventually(made: Site, reason: str | None) -> bool:
    until = time.monotonic() + 10
    while (found := offered(made)) != reason and time.monotonic() < until:
        time.sleep(0.01)
    return found == reason


def test_nothing_is_signed_before_the_operator_says_yes(tmp_path: Path) -> None:
    operator = Operator()
    made = reviewed(tmp_path, operator.decide)
    for _ in range(3):
        assert offered(made) == "review"
    assert not made.files.contract.exists()
    assert messages.is_refusal(deliver(made, messages.TRAIN, training())) == "no contract"
    operator.say(True)
    assert eventually(made, None)
    assert len(operator.shown) == 1  # asked once, however often the server proposed
    consent = json.loads(made.files.consent.read_text())
    assert (consent["by"], consent["contract"]) == ("operator", contract().digest)
    made.close()


def test_no_is_no_and_an_answer_that_cannot_be_had_is_no(tmp_path: Path) -> None:
    operator = Operator()
    operator.say(False)
    made = reviewed(tmp_path / "no", operator.decide)
    assert eventually(made, "declined")
    assert not made.files.contract.exists()

    def gone(facts: Facts) -> bool:
        raise EOFError

    threading.excepthook, hook = lambda *_: None, threading.excepthook
    try:
        assert eventually(reviewed(tmp_path / "gone", gone), "declined")
    finally:
        threading.excepthook = hook


def test_what_the_limits_forbid_is_refused_before_anybody_reads_it(tmp_path: Path) -> None:
    operator = Operator()
    made = reviewed(tmp_path, operator.decide)
    assert offered(made, contract(plan=plan_of(releases(noise=0.3)))) == "too much"
    assert operator.shown == []


def test_the_words_say_all_that_an_operator_decides_about() -> None:
    agreed = contract()
    told = in_words(agreed, promised(agreed, ()), 18)
    found = dict(told)
    assert found["what is computed"] == 'algorithm "global", 9 rounds'
    assert found["model"].startswith("softmax, of coterie")
    assert found["records"] == "40 to train on; 10 held out, which score no model"
    leaves = [line for name, line in told if name == "leaves this site"]
    assert [line.split(":")[0] for line in leaves] == ["sketch", "training", "selection"]
    assert "3 times" in leaves[1]
    assert found["work"] == f"{1 + 3 * 5 + 2:,} steps of training in all"
    assert "nobody is trusted" in found["who is trusted"]
    assert "if any other may take its place" in found["spent at most"]
    assert "blind guessing: 50 %" in found["what that means"]


def test_a_servers_text_stands_in_quotes_that_it_cannot_close() -> None:
    lie = 'fine". approved (eps=0.01, delta=1e-9)-DP. "'
    agreed = contract(experiment=lie, algorithm=lie, plan=replace(plan_of(releases()), caveats=(lie,)))
    assert quoted(lie) == '"fine\\". approved (eps=0.01, delta=1e-9)-DP. \\""'
    for name, line in in_words(agreed, promised(agreed, ()), 18):
        assert "\n" not in line
        assert 'fine". approved' not in line, name
    assert 'fine". approved' not in promised(agreed, ()).text
    assert quoted("two\nlines\x1b[2J") == '"two?lines?[2J"'


def test_what_was_spent_before_is_told(register: Path, tmp_path: Path) -> None:
    assert spent_before(tmp_path).startswith("nothing that the register of this user knows of")
    made = site(tmp_path / "state", booking=SiteBooking(DataSet.of_folder(tmp_path), records()))
    assert messages.is_refusal(deliver(made, messages.OFFER, contract().to_content())) is None
    assert re.match(r"epsilon [0-9.]+ at delta 1e-3 for one record in 1 experiments", spent_before(tmp_path))


def test_the_server_waits_while_an_operator_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = MemoryFederation(experiment(algorithm={"name": "global"}), tmp_path / "sites")
    operator, slow = Operator(), next(iter(federation.sites.values()))
    slow.reviewer = Reviewer(operator.decide)
    monkeypatch.setattr(served_run, "AGAIN_SECONDS", 0.05)

    def asked_again() -> bool:
        sent = [one for one in list(federation.grid.sent) if one.metadata.message_type == messages.OFFER]
        return len(sent) > len(federation.sites)

    def answer() -> None:
        wait_until("the server has asked again", asked_again)
        operator.say(True)

    threading.Thread(target=answer, daemon=True).start()
    result = federation.serve(tmp_path / "run")
    assert result.rounds == 5  # asked again, and nobody else was harmed by that
    federation.close()


def test_a_server_whose_plan_is_declined_has_released_nothing(tmp_path: Path) -> None:
    federation = MemoryFederation(experiment(algorithm={"name": "global"}), tmp_path / "sites")
    slow = next(iter(federation.sites.values()))
    slow.reviewer = Reviewer(lambda facts: False)
    transport = Transport(federation.grid, federation.nodes, replace(QUICK, consent=5.0))
    with pytest.raises(InputError, match="its operator has read the plan and said no"):
        ServedRun(federation.experiment, RunFolder(tmp_path / "run"), transport).finish()
    assert not slow.files.contract.exists()
    federation.close()


# --- a policy ---------------------------------------------------------------------------------------

BROKEN: dict[str, Rules] = {
    "rule algorithms": Rules(algorithms=("r-dpcfl",)),
    "rule models": Rules(models=("cnn",)),
    "rule rounds": Rules(rounds=8),
    "rule steps": Rules(steps=17),
}
KEPT = Rules(algorithms=("global",), models=("softmax",), rounds=9, steps=18)


@pytest.mark.parametrize(("rule", "rules"), BROKEN.items(), ids=BROKEN.keys())
def test_the_rule_that_a_contract_breaks_is_named(rule: str, rules: Rules, tmp_path: Path) -> None:
    made = site(tmp_path, replace(LIMITS, rules=rules))
    assert offered(made) == rule
    assert not made.files.contract.exists()
    assert f"({rule.removeprefix('rule ')})" in messages.REFUSALS[rule]


def test_what_a_policy_allows_is_signed(tmp_path: Path) -> None:
    made = site(tmp_path, replace(LIMITS, rules=KEPT))
    assert offered(made) is None
    made.close()


def test_the_time_of_a_policy_ends(tmp_path: Path) -> None:
    made = site(tmp_path, replace(LIMITS, rules=Rules(hours=1.0)))
    assert offered(made) is None
    assert messages.is_refusal(deliver(made, messages.TRAIN, training(1))) is None
    consent = json.loads(made.files.consent.read_text())
    made.files.consent.write_text(json.dumps({**consent, "until": "2020-01-01T00:00:00+00:00"}))
    assert messages.is_refusal(deliver(made, messages.TRAIN, training(2))) == "rule hours"
    made.close()


def test_a_plan_that_would_keep_a_site_busy_for_years_is_refused(tmp_path: Path) -> None:
    """By one release of records, or by what a trusted server has a site do."""
    [_, training, _] = releases(noise=100.0)
    long = replace(training, times=10**6, mechanism=replace(training.mechanism, epochs=4))
    assert contract(rounds=10**6, plan=plan_of((long,))).work == 2 * 10**7 > MOST_WORK
    assert offered(site(tmp_path / "a"), contract(rounds=10**6, plan=plan_of((long,)))) == "rule steps"
    federation = sites_of(trusting("client", {"name": "dp-fedavg"}), tmp_path / "sites")
    run = ServedRun(
        federation.experiment,
        RunFolder(tmp_path / "run"),
        Transport(federation.grid, federation.nodes, QUICK),
    )
    [first, *_] = run.contracts.values()
    assert first.trusted is not None
    longer = replace(first.trusted.training, iterations=10**7)
    busy = replace(first, trusted=replace(first.trusted, training=longer))
    assert busy.work == 3 * 10**7
    assert offered(federation.sites[first.client], busy) == "rule steps"
    federation.close()


def test_a_policy_file_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "epsilon: 4\nadjacency: replace-one\nalgorithms: [global]\nrounds: 20\n"
        "evaluation: {epsilon: 0.5, reports: 2}\nhours: 12\n"
    )
    found = _allowed(path, {"--epsilon": ("epsilon", None)})
    assert (found["epsilon"], found["adjacency"]) == (4.0, Adjacency.REPLACE_ONE)
    assert (found["evaluation_epsilon"], found["evaluation_reports"]) == (0.5, 2)
    assert found["rules"] == Rules(algorithms=("global",), rounds=20, hours=12.0)
    with pytest.raises(InputError, match="--epsilon: beside --policy"):
        _allowed(path, {"--epsilon": ("epsilon", 8.0)})
    for text, line in {
        "rounds: 5": "epsilon: missing",
        "epsilon: 4\nround: 5": "round: unknown key; did you mean 'rounds'",
        "epsilon: -1": "epsilon",
        "epsilon: 4\nhours: 0": "hours",
        "- 4": "keys and values",
        "epsilon: [": "line 1",
    }.items():
        path.write_text(text)
        with pytest.raises(InputError, match=line):
            read_policy(path)
    with pytest.raises(InputError, match="--policy"):
        read_policy(tmp_path / "nowhere.yaml")


def test_without_a_policy_epsilon_is_needed() -> None:
    options: Any = {"--epsilon": ("epsilon", None)}
    with pytest.raises(InputError, match="--epsilon: needed"):
        _allowed(None, options)
