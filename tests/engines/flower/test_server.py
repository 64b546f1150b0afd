"""The server goes on with those who answered, believes nobody, and charges nobody twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message
from memory_federation import MemoryFederation, experiment
from spoiling import replaced, same, state_of, vector

from coterie.algorithms.protocol import TrainJob
from coterie.data.records import Task
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Limits
from coterie.engines.flower.messages import GarbageError, SiteFacts
from coterie.engines.flower.server import largest_release
from coterie.engines.flower.transport import NobodyAnswered, Timeouts, Transport
from coterie.errors import InputError
from coterie.experiment.callbacks import Callbacks
from coterie.experiment.folder import RunFolder
from coterie.experiment.proposing import calibrate_sites, contracts_of
from coterie.experiment.schema import Experiment
from coterie.experiment.served_run import ServedRun
from coterie.experiment.sites import Sites, check_servable, left_to_sites
from coterie.files import read_lines
from coterie.privacy import (
    EVALUATION,
    Adjacency,
    Budget,
    FullBatchSketch,
    FullBatchSteps,
    HeldOut,
    PoissonSteps,
    RecordSums,
    held_out,
)

ROUNDS = 4
CLUSTERED = {"name": "r-dpcfl", "clusters": 2}


def federation_of(algorithm: dict[str, Any], sites: Path) -> MemoryFederation:
    return MemoryFederation(experiment(algorithm=algorithm, schedule={"rounds": ROUNDS, "batch": 20}), sites)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[MemoryFederation]:
    made = federation_of(CLUSTERED, tmp_path / "sites")
    yield made
    made.close()


@dataclass(frozen=True)
class Ended:
    """How a run ended: the server's state, and what each site was charged."""

    state: dict[str, Any]
    charges: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The run in which nothing goes wrong."""
    out = tmp_path_factory.mktemp("undisturbed")
    made = federation_of(CLUSTERED, out / "sites")
    made.serve(out / "run")
    made.close()
    return Ended(state_of(made.experiment, out / "run"), {name: charges(made, name) for name in made.nodes})


def charges(federation: MemoryFederation, name: str) -> list[dict[str, Any]]:
    lines = federation.sites[name].files.ledger.read_text().splitlines()[1:]
    return [charge for line in lines for charge in json.loads(line)["charges"]]


# --- what a client may do to a round ----------------------------------------------------------------


SPOILS: dict[str, Callable[[Message], list[Message]]] = {
    "NaN": lambda reply: [replaced(reply, array=vector(reply) * np.float32("nan"))],
    "infinity": lambda reply: [replaced(reply, array=vector(reply) + np.float32("inf"))],
    "a huge update": lambda reply: [replaced(reply, array=vector(reply) * np.float32(1e6))],
    "too short": lambda reply: [replaced(reply, array=vector(reply)[:-1])],
    "a matrix": lambda reply: [replaced(reply, array=np.tile(vector(reply), (2, 1)))],
    "doubles": lambda reply: [replaced(reply, array=vector(reply).astype(np.float64))],
    "text": lambda reply: [replaced(reply, plain={"round": "2"})],
    "an answer to another round": lambda reply: [replaced(reply, plain={"round": 1})],
    "an answer to another release": lambda reply: [replaced(reply, plain={"release": "selection"})],
    "an answer of another contract": lambda reply: [replaced(reply, plain={"contract": "0" * 64})],
    "a field too few": lambda reply: [replaced(reply, plain={"release": None})],
    "an error of Flower's": lambda reply: [Message(Error(8, "secret"), reply_to=reply)],
}


def serve_spoiled(out: Path, spoil: Callable[[Message], list[Message]]) -> tuple[Any, ...]:
    """A run in which the first client's answer of round 2 is spoiled on its way."""
    made = federation_of({"name": "global"}, out / "sites")
    bad = next(iter(made.nodes))

    def on_the_way(message: Message, reply: Message) -> list[Message]:
        plain = message.content.config_records["coterie"]
        theirs = message.metadata.dst_node_id == made.nodes[bad]
        if not theirs or message.metadata.message_type != messages.TRAIN or plain["round"] != 2:
            return [reply]
        spoiled = spoil(reply)
        for one in spoiled:
            one.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
        return spoiled

    made.grid.spoil = on_the_way
    transport = Transport(made.grid, made.nodes, Timeouts(answer=5.0, rejoin=0.0, poll=0.001))
    result = ServedRun(made.experiment, RunFolder(out / "run"), transport).finish()
    made.close()
    return made, bad, result, state_of(made.experiment, out / "run")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The state after a run in which that answer never came."""
    state: dict[str, Any] = serve_spoiled(tmp_path_factory.mktemp("without"), lambda reply: [])[3]
    return state


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
def test_a_spoiled_answer_is_a_missing_client_and_nothing_more(
    without: dict[str, Any], tmp_path: Path, spoil: Callable[[Message], list[Message]]
) -> None:
    made, bad, result, state = serve_spoiled(tmp_path, spoil)
    assert same(without, state)
    assert np.isfinite(state["model"]).all()
    assert result.participation[bad] == {"answered": ROUNDS - 1, "missed": 1}
    # The charge of what the bad client computed stands, on both sides.
    assert [charge["round"] for charge in charges(made, bad)] == [1, 2, 3, 4]
    assert len(set(result.asked.values())) == 1
    assert "secret" not in (tmp_path / "run" / "participation.jsonl").read_text()


def test_an_answer_that_comes_twice_counts_once(
    federation: MemoryFederation, undisturbed: Ended, tmp_path: Path
) -> None:
    federation.grid.spoil = lambda message, reply: [reply, reply]
    federation.serve(tmp_path / "run")
    assert same(undisturbed.state, state_of(federation.experiment, tmp_path / "run"))


def test_a_choice_out_of_range_is_a_missing_client(federation: MemoryFederation, tmp_path: Path) -> None:
    bad = next(iter(federation.nodes))

    def on_the_way(message: Message, reply: Message) -> list[Message]:
        theirs = message.metadata.dst_node_id == federation.nodes[bad]
        if theirs and message.metadata.message_type == messages.SELECT:
            return [replaced(reply, plain={"value": 2})]
        return [reply]

    federation.grid.spoil = on_the_way
    result = federation.serve(tmp_path / "run")
    assert result.participation[bad]["missed"] == 1


# --- who is away ------------------------------------------------------------------------------------


def test_a_client_that_is_away_is_not_charged_and_may_come_back(
    federation: MemoryFederation, tmp_path: Path
) -> None:
    away = list(federation.nodes)[1]

    def note(report: Any) -> None:
        node = federation.nodes[away]
        if report.round == 1:
            federation.grid.offline.add(node)
        if report.round == 3:
            federation.start(away)
            federation.grid.offline.discard(node)

    result = federation.serve(tmp_path / "run", callbacks=Callbacks(on_round=note))
    assert {charge["round"] for charge in charges(federation, away)} == {1, 4}
    assert result.asked[away] < min(value for name, value in result.asked.items() if name != away)
    assert result.asked[away] == pytest.approx(
        json.loads(federation.sites[away].files.finished.read_text())["epsilon"]
    )


@pytest.mark.parametrize("told", [False, True], ids=["silently", "and the link says so"])
def test_a_client_that_left_with_a_message_and_came_back_is_sent_it_again(
    federation: MemoryFederation, undisturbed: Ended, tmp_path: Path, told: bool
) -> None:
    """It was charged before it died; the same message again costs nothing, and its update counts."""
    name = list(federation.nodes)[2]
    node = federation.nodes[name]
    dead: list[int] = []

    def on_the_way(message: Message, reply: Message) -> list[Message]:
        plain = message.content.config_records["coterie"]
        if message.metadata.dst_node_id == node and plain.get("round") == 2 and not dead:
            dead.append(1)
            federation.grid.offline.add(node)  # trained, charged, killed before it could answer
            gone = Message(Error(5, "node unavailable"), reply_to=message)
            gone.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
            return [gone] if told else []
        return [reply]

    looks = federation.grid.get_node_ids

    def look_again() -> list[int]:
        found = looks()
        if node in federation.grid.offline:
            federation.start(name)
            federation.grid.offline.discard(node)
        return found

    federation.grid.spoil = on_the_way
    federation.grid.get_node_ids = look_again  # type: ignore[method-assign]
    transport = Transport(federation.grid, federation.nodes, Timeouts(answer=30, rejoin=30, poll=0.001))
    result = ServedRun(federation.experiment, RunFolder(tmp_path / "run"), transport).finish()
    assert result.participation[name]["missed"] == 0
    assert same(undisturbed.state, state_of(federation.experiment, tmp_path / "run"))
    assert charges(federation, name) == undisturbed.charges[name]


def test_when_nobody_answers_the_run_says_so_and_can_go_on(
    federation: MemoryFederation, tmp_path: Path
) -> None:
    def note(report: Any) -> None:
        if report.round == 2:
            federation.grid.offline |= set(federation.nodes.values())

    with pytest.raises(NobodyAnswered, match="round 3"):
        federation.serve(tmp_path / "run", callbacks=Callbacks(on_round=note))
    federation.grid.offline.clear()
    result = federation.serve(tmp_path / "run")
    assert result.rounds == ROUNDS
    assert all(tally["answered"] == ROUNDS + 1 for tally in result.participation.values())


# --- a server that is killed ------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing in the code under test may catch this."""


@pytest.mark.parametrize("after", [False, True], ids=["before answers are read", "after"])
@pytest.mark.parametrize("request_number", range(3, 8))
def test_a_server_killed_anywhere_resumes_to_the_same_end_at_no_cost(
    federation: MemoryFederation, undisturbed: Ended, tmp_path: Path, request_number: int, after: bool
) -> None:
    """Requests 1 and 2 ask for facts and offer; 3 to 7 are the rounds, with the selection in between."""
    pushes: list[int] = []
    push, pull = federation.grid.push_messages, federation.grid.pull_messages

    def killing_push(sent: Any) -> list[str]:
        pushes.append(1)
        if len(pushes) == request_number + 1 and after:
            raise Killed  # the answers to the request before were read and kept
        return push(sent)

    def killing_pull(identities: Any) -> list[Message]:
        found = pull(identities)
        if len(pushes) == request_number and not after:
            raise Killed  # all sites have computed, charged and answered: the server has not seen it
        return found

    federation.grid.push_messages = killing_push  # type: ignore[method-assign]
    federation.grid.pull_messages = killing_pull  # type: ignore[method-assign]
    with pytest.raises(Killed):
        federation.serve(tmp_path / "run")
    federation.grid.push_messages = push  # type: ignore[method-assign]
    federation.grid.pull_messages = pull  # type: ignore[method-assign]
    federation.serve(tmp_path / "run")
    assert same(undisturbed.state, state_of(federation.experiment, tmp_path / "run"))
    assert {name: charges(federation, name) for name in federation.nodes} == undisturbed.charges


def test_the_journal_keeps_a_resumed_round_on_its_way(federation: MemoryFederation, tmp_path: Path) -> None:
    """Killed between selection and training; on resume one client is away, and yet nothing is chosen anew."""
    killed: list[int] = []
    push = federation.grid.push_messages

    def killing_push(sent: Any) -> list[str]:
        sent = list(sent)
        plain = sent[0].content.config_records["coterie"]
        if plain.get("round") == 3 and plain["release"] == "training" and not killed:
            killed.append(1)
            raise Killed
        return push(sent)

    federation.grid.push_messages = killing_push  # type: ignore[method-assign]
    with pytest.raises(Killed):
        federation.serve(tmp_path / "run")
    away = next(iter(federation.nodes))
    federation.grid.offline.add(federation.nodes[away])
    federation.serve(tmp_path / "run")
    state = state_of(federation.experiment, tmp_path / "run")
    assert len(state["votes"][away]) == 1  # its choice of before the crash
    for name in federation.nodes:
        assert sum(charge["release"] == "selection" for charge in charges(federation, name)) == 1


def test_why_an_answer_is_missing_is_known_after_a_restart_too(
    federation: MemoryFederation, tmp_path: Path
) -> None:
    """Killed after the selection of round 3, in which one was away: the record still says so."""
    push, away = federation.grid.push_messages, next(iter(federation.nodes))

    def killing_push(sent: Any) -> list[str]:
        sent = list(sent)
        plain = sent[0].content.config_records["coterie"]
        if plain.get("round") == 3 and plain["release"] == "training":
            raise Killed
        if plain.get("round") == 2 and plain["release"] == "training":
            federation.grid.offline.add(federation.nodes[away])
        return push(sent)

    federation.grid.push_messages = killing_push  # type: ignore[method-assign]
    with pytest.raises(Killed):
        federation.serve(tmp_path / "run")
    federation.grid.push_messages = push  # type: ignore[method-assign]
    federation.grid.offline.clear()
    federation.serve(tmp_path / "run")
    record = [
        json.loads(line) for line in (tmp_path / "run" / "participation.jsonl").read_text().splitlines()
    ]
    [selection] = [one for one in record if (one["round"], one["release"]) == (3, "selection")]
    assert selection["missing"] == {away: "not there"}


# --- before the first round -------------------------------------------------------------------------


def test_everybody_must_agree_before_anybody_releases(federation: MemoryFederation, tmp_path: Path) -> None:
    careful = list(federation.nodes)[3]
    federation.sites[careful].limits = Limits(Budget(7.9, 1e-3))
    with pytest.raises(InputError, match=f"{careful}: refused: the plan would spend more"):
        federation.serve(tmp_path / "run")
    for site in federation.sites.values():
        assert not site.files.ledger.exists() or len(site.files.ledger.read_text().splitlines()) == 1
    federation.sites[careful].limits = Limits(Budget(8.0, 1e-3))
    assert federation.serve(tmp_path / "run").rounds == ROUNDS


def test_a_site_cannot_take_anothers_name(federation: MemoryFederation, tmp_path: Path) -> None:
    first, second = list(federation.nodes)[:2]
    handlers = federation.grid.handlers
    handlers[federation.nodes[first]] = handlers[federation.nodes[second]]
    with pytest.raises(InputError, match="under another's name"):
        federation.serve(tmp_path / "run")


@pytest.mark.parametrize("field", ["records", "held_out", "reports"])
def test_more_records_than_a_number_can_hold_are_no_facts(field: str) -> None:
    counts = {"records": 40, "held_out": 10, "reports": 2, field: 10**400}
    reported = HeldOut(counts["held_out"], 1.0, counts["reports"])
    task = Task(kind="classification", shape=(5,), classes=3)
    told = SiteFacts("a", counts["records"], counts["held_out"], reported, task, simulation=False)
    with pytest.raises(GarbageError, match="malformed facts"):
        SiteFacts.from_content(told.to_content())


def test_accuracy_is_reported_as_often_as_operators_allow_and_charged(tmp_path: Path) -> None:
    chosen = experiment(
        algorithm={"name": "global"},
        schedule={"rounds": 2, "batch": 20},
        evaluation={"kind": "private"},
    )
    limits = Limits(Budget(8.0, 1e-3), reported=HeldOut(0, 1.0, 1))
    made = MemoryFederation(chosen, tmp_path / "sites", limits=limits)
    result = made.serve(tmp_path / "run")
    assert result.accuracy is not None
    assert set(result.accuracy.per_client) == set(made.nodes)
    assert result.accuracy.is_private
    assert result.loss is None
    lines = list(read_lines(RunFolder(tmp_path / "run").metrics))
    assert [line["accuracy"] is not None for line in lines] == [False, True], "one report, of the last round"
    for name, site in made.sites.items():
        charged = [json.loads(line) for line in site.files.ledger.read_text().splitlines()[1:]]
        reports = [c for line in charged for c in line["charges"] if c["release"] == EVALUATION]
        assert [(c["subject"], c["round"]) for c in reports] == [(held_out(name), 2)]
    made.close()


def test_exact_scores_are_refused_between_sites(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"evaluation\.kind: exact"):
        check_servable(experiment(algorithm={"name": "global"}, evaluation={"kind": "exact"}))


SIMULATED: dict[str, Any] = {
    "data": {"name": "glyphs", "size": 40},
    "federation": {"kind": "clusters", "sizes": [7], "shift": "none", "records_per_client": 9},
    "engine": {"device": "cpu", "workers": 3, "max_memory": 2.0, "precision": "float32"},
    "evaluation": {"references": False},
}
GROUPS = {"kind": "groups", "structure": "clustered", "groups": 2, "workers": 9, "alpha": 0.7}
IN_GROUPS: dict[str, Any] = {
    "privacy": {"unit": "worker", "epsilon": 80, "delta": 0.01},
    "algorithm": {"name": "dp-ogl", "noise": 2.0},
    "evaluation": {"kind": "none"},
}


def test_what_the_file_says_for_a_simulation_alone_is_named_in_one_line() -> None:
    assert left_to_sites(Experiment.model_validate({"federation": {"kind": "natural"}})) == []
    named = "data.name, data.size, federation.sizes, federation.shift, federation.records_per_client, "
    named += "engine.device, engine.workers, engine.max_memory, engine.precision, evaluation.references"
    [line] = left_to_sites(Experiment.model_validate(SIMULATED))
    assert line.startswith(f"note: {named} act in a simulation; ")
    [line] = left_to_sites(Experiment.model_validate({**IN_GROUPS, "federation": GROUPS}))
    assert line.startswith("note: federation.workers, federation.alpha act in a simulation; ")
    from_file = {"kind": "groups", "structure": "g.json", "workers": 3}
    assert left_to_sites(Experiment.model_validate({**IN_GROUPS, "federation": from_file})) == []


def test_what_is_named_so_changes_nothing_that_sites_are_asked_to_sign() -> None:
    records = {"a": 60, "b": 80, "c": 60, "d": 60}
    sites = Sites("x", Task("classification", (4,), 2), records, dict.fromkeys(records, 0), {}, True)

    def signed(**sections: Any) -> object:
        chosen = Experiment.model_validate({"algorithm": {"name": "global"}, **sections})
        return contracts_of(calibrate_sites(chosen, sites, None), sites)

    assert signed(**SIMULATED) == signed()
    ours = {key: GROUPS[key] for key in ("kind", "structure", "groups")}
    assert signed(**IN_GROUPS, federation=GROUPS) == signed(**IN_GROUPS, federation=ours)
    assert signed(**IN_GROUPS, federation=ours) != signed(**IN_GROUPS, federation={**ours, "groups": 1})


# --- the bound on honest updates --------------------------------------------------------------------

MECHANISMS: list[RecordSums] = [
    PoissonSteps(2.0, 0.5, records=30, batch=5, epochs=2, adjacency=Adjacency.ZERO_OUT),
    FullBatchSteps(1.0, 1.0, records=30, epochs=3, adjacency=Adjacency.ZERO_OUT),
    FullBatchSketch(1.0, 1.0, records=30, dimensions=4, adjacency=Adjacency.ZERO_OUT),
]


@pytest.mark.parametrize("weight", [0.0, 0.7, 5.0])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_no_honest_update_is_taken_for_a_lie(mechanism: RecordSums, weight: float) -> None:
    """A site whose every record pulls one way at full clip, with the largest noise there is, stays inside."""
    lr, start = 0.4, np.zeros(3, np.float32)
    anchor = np.array([1.0, -2.0, 0.5], np.float32) if weight else None
    job = TrainJob("a", start, anchor, weight)
    bound = largest_release(job, mechanism, lr)
    worst = mechanism.clip * mechanism.records + 9.3 * mechanism.noise_std
    if isinstance(mechanism, FullBatchSketch):
        assert worst / mechanism.denominator <= bound <= 10 * worst / mechanism.denominator
        return
    moved = np.zeros(3)
    for _ in range(mechanism.steps):
        pull = weight * (moved - anchor) if anchor is not None else 0.0
        moved = moved - lr * (worst / mechanism.denominator + pull)
    assert np.abs(moved).max() <= bound
