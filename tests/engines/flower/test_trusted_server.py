"""Sites that trust the server: the same states as in one process, and nobody moves a sum beyond the clip."""

from __future__ import annotations

import json
import logging
import stat
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from memory_federation import QUICK, MemoryFederation
from spoiling import replaced, same, state_of, vector
from trusting import CLIP, TRUSTING, sites_of, trusting

from coterie import files
from coterie.engines.flower import members, messages
from coterie.engines.flower.contract import Limits
from coterie.engines.flower.members import read_contribution
from coterie.engines.flower.transport import NobodyAnswered, Transport
from coterie.engines.secret import RunSecret
from coterie.errors import InputError
from coterie.experiment import local
from coterie.experiment.callbacks import Callbacks
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.seal import Seal
from coterie.experiment.served_run import ServedRun
from coterie.experiment.serving import Serving, serve
from coterie.experiment.sites import check_servable
from coterie.privacy import POPULATION, Budget, HeldOut, SecretKey, Unit

FEDAVG = {"name": "dp-fedavg"}
ROUTED = {"name": "dp-ifca", "clusters": 2, "rebalance": {"rule": "route", "minimum": 1}}
EXPERIMENTS: dict[str, Experiment] = {
    "dp-fedavg": trusting("client", FEDAVG),
    "dp-fedavg, nobody clipped": trusting("client", FEDAVG, clip=1e6),
    "dp-fedprox": trusting("client", {"name": "dp-fedprox", "momentum": 0.5}),
    "dp-ifca": trusting("client", {"name": "dp-ifca", "clusters": 2, "start": "random"}),
    "dp-ifca, routed": trusting("client", ROUTED),
    "dp-ifca, rebalanced": trusting(
        "client", {"name": "dp-ifca", "clusters": 2, "rebalance": {"rule": "rebalance", "minimum": 1}}
    ),
    "dp-fesem": trusting("client", {"name": "dp-fesem", "clusters": 2}),
    "dp-fedcam": trusting("client", {"name": "dp-fedcam", "clusters": 2}),
    "gmfsc": trusting("client", {"name": "gmfsc", "clusters": 2}),
    "dp-fedper": trusting(
        "client",
        {"name": "dp-fedper"},
        model={"name": "cnn"},
        federation={"kind": "clusters", "sizes": [2, 2], "shift": "label", "records_per_client": 10},
    ),
    "dp-ogl": trusting("worker", {"name": "dp-ogl", "period": 2}),
    "dp-ogl-plus": trusting(
        "worker", {"name": "dp-ogl-plus", "period": 2}, schedule={"rounds": 4, "batch": 15, "lr": 0.1}
    ),
    "dp-fedavg of workers": trusting("worker", FEDAVG),
}


@pytest.mark.parametrize("chosen", EXPERIMENTS.values(), ids=EXPERIMENTS.keys())
def test_every_algorithm_reaches_the_same_state_bit_for_bit(chosen: Experiment, tmp_path: Path) -> None:
    alone = local.run(chosen, tmp_path / "alone")
    federation = sites_of(chosen, tmp_path / "sites")
    served = federation.serve(tmp_path / "served")
    federation.close()
    expected, found = (state_of(chosen, tmp_path / out) for out in ("alone", "served"))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    ledgers = [RunFolder(tmp_path / out).ledger.read_bytes() for out in ("alone", "served")]
    assert ledgers[0] == ledgers[1]
    assert served.epsilon == alone.epsilon
    # What sites report is what a simulation measures: with their own choices, their own parts, one noise.
    assert served.accuracy == alone.accuracy
    assert (served.accuracy is None) == (chosen.privacy.unit is Unit.WORKER)
    for site in federation.sites.values():
        assert site.finished
        told = json.loads(site.files.finished.read_text())
        assert told["epsilon"] <= alone.epsilon * (1 + 1e-9)


# --- what a client may do to a sum ------------------------------------------------------------------


SPOILS: dict[str, Callable[[Message], list[Message]]] = {
    "NaN": lambda reply: [replaced(reply, array=vector(reply) * np.nan)],
    "a huge update": lambda reply: [replaced(reply, array=vector(reply) * 1e12)],
    "a little too long": lambda reply: [replaced(reply, array=vector(reply) * 1.001)],
    "another shape": lambda reply: [replaced(reply, array=vector(reply)[:-1])],
    "a choice out of range": lambda reply: [replaced(reply, plain={"choice": 2})],
    "an error of Flower's": lambda reply: [Message(Error(8, "secret"), reply_to=reply)],
}
BAD = "client-1"
SILENCE = 5.0
"""Seconds of which others need a fraction, even on a busy machine."""


def serve_spoiled(
    chosen: Experiment,
    folder: Path,
    spoil: Callable[[Message], list[Message]],
    round: int = 1,
    *,
    answer: float = QUICK.answer,
) -> tuple[RunResult, dict[str, Any]]:
    """A run in which one client's answer of a round is spoiled on its way.

    Args:
        answer: seconds that clients have, waited for in full where one never comes.
    """
    federation = sites_of(chosen, folder / "sites")

    def on_the_way(message: Message, reply: Message) -> list[Message]:
        plain = message.content.config_records["coterie"]
        theirs = message.metadata.dst_node_id == federation.nodes[BAD]
        if not theirs or message.metadata.message_type != messages.CONTRIBUTE or plain["round"] != round:
            return [reply]
        spoiled = spoil(reply)
        for one in spoiled:
            one.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
        return spoiled

    federation.grid.spoil = on_the_way
    transport = Transport(federation.grid, federation.nodes, replace(QUICK, answer=answer))
    result = ServedRun(chosen, RunFolder(folder / "run"), transport).finish()
    federation.close()
    return result, state_of(chosen, folder / "run")


QUICKLY = {
    "schedule": {"rounds": 2, "batch": 15, "lr": 0.1},
}
EVERYBODY = trusting("client", ROUTED, rate=1.0, **QUICKLY)


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The state after a run in which that answer never came."""
    return serve_spoiled(EVERYBODY, tmp_path_factory.mktemp("without"), lambda reply: [], answer=SILENCE)[1]


def test_an_answer_counts(without: dict[str, Any], tmp_path: Path) -> None:
    assert not same(without, serve_spoiled(EVERYBODY, tmp_path, lambda reply: [reply])[1])


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
def test_a_spoiled_answer_adds_nothing_and_its_sender_is_named(
    without: dict[str, Any],
    tmp_path: Path,
    spoil: Callable[[Message], list[Message]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        result, state = serve_spoiled(EVERYBODY, tmp_path, spoil)
    assert same(without, state)
    assert result.epsilon == pytest.approx(result.asked[BAD])  # the charge of every round stands
    assert any(BAD in line and "adds nothing" in line for line in caplog.messages)
    assert "secret" not in caplog.text


HONEST = np.full(9, CLIP / 3 * 0.9999)
WANTED = messages.RequestId("0" * 64, 1, "sums")
WRONG: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "infinity": (HONEST + np.inf, {}),
    "too long": (HONEST * 1.001, {}),
    "so long that its norm overflows": (HONEST * 1e300, {}),
    "a matrix": (np.tile(HONEST, (2, 1)), {}),
    "singles": (HONEST.astype(np.float32), {}),
    "a choice below zero": (HONEST, {"choice": -1}),
    "a choice above all": (HONEST, {"choice": 3}),
    "half a choice": (HONEST, {"choice": 0.5}),
    "another round": (HONEST, {"round": 2}),
    "another release": (HONEST, {"release": "group 0"}),
    "another contract": (HONEST, {"contract": "1" * 64}),
    "a field too many": (HONEST, {"noise": 0.0}),
}


@pytest.mark.parametrize(("value", "plain"), WRONG.values(), ids=WRONG.keys())
def test_only_a_clipped_answer_to_the_question_is_read(value: np.ndarray, plain: dict[str, Any]) -> None:
    content = messages.answer(WANTED, {"choice": 2}, HONEST, "float64")
    choice, found = read_contribution(content, WANTED, 3, 9, CLIP)
    assert choice == 2
    np.testing.assert_array_equal(found, HONEST)
    content["arrays"] = ArrayRecord({"value": Array(value)})
    content["coterie"] = ConfigRecord({**content.config_records["coterie"], **plain})
    with pytest.raises(messages.GarbageError):
        read_contribution(content, WANTED, 3, 9, CLIP)


DIRECTION = np.random.default_rng(0).normal(size=650)
LIES: dict[str, Callable[[Message], list[Message]]] = {
    "nothing": lambda reply: [],
    "the opposite": lambda reply: [replaced(reply, array=-vector(reply))],
    "anywhere, as long as can be": lambda reply: [
        replaced(reply, array=DIRECTION * CLIP / np.linalg.norm(DIRECTION))
    ],
    "huge": lambda reply: [replaced(reply, array=1e9 * DIRECTION)],
    "not a number": lambda reply: [replaced(reply, array=np.nan * DIRECTION)],
}


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "if messages were not checked"])
def test_whatever_a_client_sends_the_sum_moves_by_at_most_the_clip(
    tmp_path: Path, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours with the same coins and the same noise: with the client, and without it."""
    once = {**QUICKLY, "schedule": {"rounds": 1, "batch": 15, "lr": 0.1}}
    chosen = trusting("client", FEDAVG, rate=1.0, **once)
    if not checked:

        def believing(content: RecordDict, *_: Any) -> tuple[int, np.ndarray]:
            return 0, content.array_records["arrays"]["value"].numpy()

        monkeypatch.setattr(members, "read_contribution", believing)
    models = {}
    for name, lie in LIES.items():
        folder = tmp_path / name
        models[name] = serve_spoiled(chosen, folder, lie)[1]["models"].astype(np.float64)
    moved = {name: 4 * np.linalg.norm(model - models["nothing"]) for name, model in models.items()}
    assert all(np.isfinite(model).all() for model in models.values())
    assert max(moved.values()) <= CLIP * (1 + 1e-5)  # single precision of the models
    assert moved["the opposite"] == pytest.approx(CLIP, rel=1e-3)
    assert (moved["huge"] == 0) == checked


# --- what stays secret ------------------------------------------------------------------------------


def test_only_the_sampled_are_sent_anything_and_the_folder_does_not_say_who(tmp_path: Path) -> None:
    chosen = trusting("client", FEDAVG, rate=0.5, **QUICKLY)
    federation = sites_of(chosen, tmp_path / "sites")
    journals: list[int] = []

    def note(report: Any) -> None:
        journals.append(len(list((tmp_path / "run" / "journal").glob("*"))))

    result = federation.serve(tmp_path / "run", callbacks=Callbacks(on_round=note))
    asked = [m for m in federation.grid.sent if m.metadata.message_type == messages.CONTRIBUTE]
    rounds = Counter(m.content.config_records["coterie"]["round"] for m in asked)
    assert 0 < min(rounds.values()) < 4
    charged = json.loads(RunFolder(tmp_path / "run").ledger.read_text().splitlines()[1])["charges"]
    assert [charge["subject"] for charge in charged] == [POPULATION]
    assert result.participation == {}
    assert not (tmp_path / "run" / "participation.jsonl").exists()
    # The journal of a round holds updates in the clear: its owner alone reads it, until the round is over.
    assert journals == [0, 0]
    assert stat.S_IMODE((tmp_path / "run" / "journal").stat().st_mode) == 0o700
    assert not RunFolder(tmp_path / "run").secret.exists()
    for line in RunFolder(tmp_path / "run").metrics.read_text().splitlines():
        assert json.loads(line)["clusters"] == dict.fromkeys(federation.nodes, 0)
    federation.close()


def test_a_worker_is_sent_only_the_model_that_its_groups_show_it(tmp_path: Path) -> None:
    chosen = trusting("worker", {"name": "dp-ogl", "period": 2}, rate=1.0, **QUICKLY)
    federation = sites_of(chosen, tmp_path / "sites")
    federation.serve(tmp_path / "run")
    structure = federation.federation.structure
    assert structure is not None
    names = {node: name for name, node in federation.nodes.items()}
    for message in federation.grid.sent:
        if message.metadata.message_type == messages.CONTRIBUTE:
            plain = message.content.config_records["coterie"]
            worker = structure.names.index(names[message.metadata.dst_node_id])
            assert int(plain["release"].removeprefix("group ")) in structure.groups_of(worker)
            assert message.content.array_records["arrays"]["models"].numpy().shape == (1, 650)
    federation.close()


def test_what_is_personal_never_leaves(tmp_path: Path) -> None:
    chosen = EXPERIMENTS["dp-fedper"]
    federation = sites_of(chosen, tmp_path / "sites")
    federation.serve(tmp_path / "run")
    state = state_of(chosen, tmp_path / "run")
    lengths = {
        reply.content.array_records["arrays"]["value"].numpy().size
        for reply in federation.grid.received
        if "arrays" in reply.content.array_records
    }
    assert lengths == {int((~state["head"]).sum())}
    federation.close()


# --- who is away, and a server that is killed -------------------------------------------------------


def test_a_client_that_is_away_adds_nothing_and_the_round_goes_on(tmp_path: Path) -> None:
    federation = sites_of(EVERYBODY, tmp_path / "sites")

    def note(report: Any) -> None:
        federation.grid.offline.add(federation.nodes[BAD])

    federation.serve(tmp_path / "run", callbacks=Callbacks(on_round=note))
    federation.close()
    silent = serve_spoiled(EVERYBODY, tmp_path / "unanswered", lambda reply: [], round=2, answer=SILENCE)
    unanswered = silent[1]
    assert same(unanswered, state_of(EVERYBODY, tmp_path / "run"))


def test_who_was_late_before_still_has_its_whole_time(tmp_path: Path) -> None:
    """It is not given up once the others are done: whether one counts must not depend on another."""
    federation = sites_of(EVERYBODY, tmp_path / "sites")
    slow, pull, first_look = federation.nodes[BAD], federation.grid.pull_messages, []
    transport = Transport(federation.grid, federation.nodes, QUICK)

    def slowly(identities: Any) -> list[Message]:
        ready = []
        for identity in identities:
            message = federation.grid._boxes.get(identity)
            asked = message is not None and message.metadata.message_type == messages.CONTRIBUTE
            if asked and message.metadata.dst_node_id == slow:
                first_look.append(time.monotonic())
                transport._late.add(BAD)
                if time.monotonic() < first_look[0] + 1.5:
                    continue
            ready.append(identity)
        return pull(ready)

    federation.grid.pull_messages = slowly  # type: ignore[method-assign]
    ServedRun(EVERYBODY, RunFolder(tmp_path / "run"), transport).finish()
    federation.close()
    undisturbed = serve_spoiled(EVERYBODY, tmp_path / "undisturbed", lambda reply: [reply])[1]
    assert same(undisturbed, state_of(EVERYBODY, tmp_path / "run"))


def test_when_no_site_is_connected_the_run_says_so_and_can_go_on(tmp_path: Path) -> None:
    federation = sites_of(EVERYBODY, tmp_path / "sites")

    def note(report: Any) -> None:
        if report.round == 1:
            federation.grid.offline |= set(federation.nodes.values())

    with pytest.raises(NobodyAnswered, match="round 2: no site is connected"):
        federation.serve(tmp_path / "run", callbacks=Callbacks(on_round=note))
    federation.grid.offline.clear()
    result = federation.serve(tmp_path / "run")
    federation.close()
    undisturbed = serve_spoiled(EVERYBODY, tmp_path / "undisturbed", lambda reply: [reply])
    assert same(undisturbed[1], state_of(EVERYBODY, tmp_path / "run"))
    assert result.asked == undisturbed[0].asked


class Killed(BaseException):
    """Nothing in the code under test may catch this."""


EVALUATED = {**QUICKLY, "evaluation": {"kind": "private", "every": 1}}
SERVED = {
    "dp-ifca, routed": trusting("client", ROUTED, **EVALUATED),
    "dp-ogl": trusting("worker", {"name": "dp-ogl", "period": 2}, **QUICKLY),
}


def kill_at(federation: MemoryFederation, number: int, *, answered: bool) -> Callable[[], None]:
    """Kill the server at its so-manieth request; before it sends it, or once sites have answered."""
    push, pull, pushes = federation.grid.push_messages, federation.grid.pull_messages, [0]

    def killing_push(sent: Any) -> list[str]:
        pushes[0] += 1
        if pushes[0] == number and not answered:
            raise Killed
        return push(sent)

    def killing_pull(identities: Any) -> list[Message]:
        found = pull(identities)
        if pushes[0] == number and answered:
            raise Killed
        return found

    def heal() -> None:
        federation.grid.push_messages = push  # type: ignore[method-assign]
        federation.grid.pull_messages = pull  # type: ignore[method-assign]

    federation.grid.push_messages = killing_push  # type: ignore[method-assign]
    federation.grid.pull_messages = killing_pull  # type: ignore[method-assign]
    return heal


@pytest.fixture(scope="module", params=SERVED.values(), ids=SERVED.keys())
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Experiment, dict[str, Any], bytes, int]:
    """An experiment, how it ends when nothing goes wrong, its ledger, and the number of its requests."""
    chosen, out = request.param, tmp_path_factory.mktemp("undisturbed")
    federation, pushes = sites_of(chosen, out / "sites"), [0]
    push = federation.grid.push_messages

    def counting(sent: Any) -> list[str]:
        pushes[0] += 1
        return push(sent)

    federation.grid.push_messages = counting  # type: ignore[method-assign]
    federation.serve(out / "run")
    federation.close()
    return chosen, state_of(chosen, out / "run"), RunFolder(out / "run").ledger.read_bytes(), pushes[0]


@pytest.mark.parametrize("answered", [False, True], ids=["before it asks", "before it reads answers"])
def test_a_server_killed_anywhere_resumes_to_the_same_end_at_no_cost(
    undisturbed: tuple[Experiment, dict[str, Any], bytes, int], tmp_path: Path, answered: bool
) -> None:
    """Killed at every request in turn, each time going on from what the last life left on its disk."""
    chosen, state, ledger, requests = undisturbed
    federation = sites_of(chosen, tmp_path / "sites")
    for number in range(3, requests):
        heal = kill_at(federation, 3 if number > 3 else number, answered=answered)
        with pytest.raises(Killed):
            federation.serve(tmp_path / "run")
        heal()
    federation.serve(tmp_path / "run")
    federation.close()
    assert same(state, state_of(chosen, tmp_path / "run"))
    assert ledger == RunFolder(tmp_path / "run").ledger.read_bytes()


def test_what_was_released_before_a_crash_is_released_again_whoever_is_away(tmp_path: Path) -> None:
    """The models of a round have left when the server dies: no other sum may follow under the same noise."""
    chosen = trusting("client", FEDAVG, rate=1.0, **EVALUATED)
    federation = sites_of(chosen, tmp_path / "sites")
    heal = kill_at(federation, 4, answered=True)  # facts, offer, round 1, and its evaluation
    with pytest.raises(Killed):
        federation.serve(tmp_path / "run")
    heal()
    journal = list((tmp_path / "run" / "journal").glob("*.safetensors"))
    assert len(journal) == 1
    federation.grid.offline.add(federation.nodes[BAD])
    federation.serve(tmp_path / "run")
    seen = [
        message.content.array_records["arrays"]["models"].numpy().tobytes()
        for message in federation.grid.sent
        if message.metadata.message_type == messages.EVALUATE
        and message.content.config_records["coterie"]["round"] == 1
    ]
    assert len(seen) == 4 + 3
    assert len(set(seen)) == 1
    federation.close()


def test_what_a_crash_left_of_a_journal_goes_with_its_round(tmp_path: Path) -> None:
    """It holds updates in the clear."""
    federation, journal = sites_of(EVERYBODY, tmp_path / "sites"), tmp_path / "run" / "journal"
    heal = kill_at(federation, 4, answered=True)
    with pytest.raises(Killed):
        federation.serve(tmp_path / "run")
    heal()
    (journal / ".000001-01-0123.safetensors.draft-4567").write_bytes(b"an update")
    federation.serve(tmp_path / "run")
    federation.close()
    assert list(journal.iterdir()) == []


def test_what_the_link_remembers_of_a_finished_run_goes_though_a_crash_came_first(tmp_path: Path) -> None:
    federation = sites_of(EVERYBODY, tmp_path / "sites")
    federation.serve(tmp_path / "run")
    federation.close()
    (tmp_path / "run.link").mkdir()
    (tmp_path / "run.link" / "link.db").write_text("who was asked for what")
    again = Serving(tmp_path / "run", None, sites=4, resume=True)
    with pytest.raises(InputError, match="the run is finished"):
        serve(EVERYBODY, again, Callbacks())
    assert not (tmp_path / "run.link").exists()


def test_the_journal_of_an_earlier_version_is_refused_by_one_line(tmp_path: Path) -> None:
    """Asking again instead would put the same noise on another sum."""
    federation = sites_of(trusting("client", FEDAVG, rate=1.0, **EVALUATED), tmp_path / "sites")
    heal = kill_at(federation, 4, answered=True)  # facts, offer, round 1, and its evaluation
    with pytest.raises(Killed):
        federation.serve(tmp_path / "run")
    heal()
    [journal] = (tmp_path / "run" / "journal").glob("*.safetensors")
    known = files.read_arrays(journal)
    assert known is not None
    old: dict[str, Any] = {}
    for place, name in enumerate(federation.nodes):
        old |= {f"update {name}": known["updates"][place], f"choice {name}": known["choices"][[place]]}
    files.write_arrays(journal, old)
    with pytest.raises(InputError, match="kept by an earlier version"):
        federation.serve(tmp_path / "run")
    federation.close()


def test_the_noise_key_of_another_run_is_refused(tmp_path: Path) -> None:
    federation = sites_of(EVERYBODY, tmp_path / "sites")
    heal = kill_at(federation, 4, answered=False)
    with pytest.raises(Killed):
        federation.serve(tmp_path / "run")
    heal()
    secret = RunFolder(tmp_path / "run").secret
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    kept = RunSecret.load(secret, Seal(tmp_path / "run").key)
    secret.unlink()
    with pytest.raises(InputError, match="the noise key is gone"):
        federation.serve(tmp_path / "run")
    replace(kept, data="another").save(secret)
    with pytest.raises(InputError, match="belongs to another run"):
        federation.serve(tmp_path / "run")
    secret.unlink()
    replace(kept, key=SecretKey.from_os()).save(secret)  # for the same run, by its own words
    with pytest.raises(InputError, match=r"noise\.key: not the noise key that the books"):
        federation.serve(tmp_path / "run")
    secret.unlink()
    kept.save(secret)
    assert federation.serve(tmp_path / "run").rounds == 2
    federation.close()


# --- consent ----------------------------------------------------------------------------------------


def test_a_site_takes_part_only_if_its_operator_trusts_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = sites_of(EVERYBODY, tmp_path / "sites")
    federation.sites[BAD].limits = Limits(Budget(30.0, 0.05))
    with pytest.raises(InputError, match=rf"{BAD}: refused: .*\(--trust-server\)") as refused:
        federation.serve(tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not federation.sites[BAD].files.contract.exists()
    federation.sites[BAD].limits = TRUSTING
    with caplog.at_level(logging.INFO):
        result = federation.serve(tmp_path / "run")
    federation.close()
    [approved] = [line for line in caplog.messages if line.startswith("approved")]
    for said in ("one client of", "trusting the server", "eps=30.00"):
        assert said in approved
        assert said in result.guarantee
    assert "in the clear" in result.guarantee_text
    assert "the server held the noise key" in result.guarantee_text
    [told] = [line for line in caplog.messages if line.startswith("Protected is")]
    assert "in the clear" in told
    agreed = f"in 2 rounds it may see up to 2 updates of this client in the clear, clipped to {CLIP:g}; "
    assert agreed in caplog.text
    assert f"sent to the trusted server in the clear, clipped to {CLIP:g}" in caplog.text


def test_less_than_the_plan_costs_is_refused_by_the_sites_own_arithmetic(tmp_path: Path) -> None:
    for chosen in (EVERYBODY, trusting("worker", {"name": "dp-ogl", "period": 2}, **QUICKLY)):
        careful = Limits(Budget(29.0, 0.05), reported=HeldOut(0, 30.0, 9), trust_server=True)
        federation = sites_of(chosen, tmp_path / f"sites-{chosen.privacy.unit}", careful)
        with pytest.raises(InputError, match="would spend more than its operator allows"):
            federation.serve(tmp_path / f"run-{chosen.privacy.unit}")
        federation.close()


def test_what_the_server_cannot_do_between_sites_is_refused() -> None:
    privacy = {"unit": "worker", "epsilon": 30.0, "mode": "paper"}
    paper = trusting("worker", {"name": "dp-ogl-plus", "period": 2}, privacy=privacy)
    with pytest.raises(InputError, match=r"privacy\.mode: paper"):
        check_servable(paper)
    labels = {"kind": "groups", "structure": "label", "workers": 6, "groups": 3}
    with pytest.raises(InputError, match=r"federation\.structure: label"):
        check_servable(trusting("worker", {"name": "dp-ogl"}, federation=labels))
    following = {"name": "dp-fedavg", "adaptive_clip": {"quantile": 0.5}}
    with pytest.raises(InputError, match=r"algorithm\.adaptive_clip: sites sign one clip"):
        check_servable(trusting("client", following))
