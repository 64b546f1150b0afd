"""After a soak: do the ledgers agree, and does a simulation with the same answers reach the same bits?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from consortium import NAMES, NOISE_SEED, Consortium

from coterie.algorithms import find_algorithm
from coterie.algorithms.protocol import Assignment, Request, Select, Train
from coterie.algorithms.state import State
from coterie.engines.driver import Work
from coterie.engines.flower.kept import Finished, Signed
from coterie.engines.flower.messages import REFUSALS
from coterie.engines.flower.server import Participation
from coterie.engines.flower.taken_home import read_models
from coterie.engines.flower.transport import TOO_LATE
from coterie.errors import CoterieError
from coterie.experiment import checkpoint, local
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.recorded import check_folder
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.files import read_lines
from coterie.privacy import EVALUATION, LedgerView, held_out

REASONS = {"not there", "not sent", "went away", TOO_LATE, *(f"refused: {why}" for why in REFUSALS.values())}
"""Why an answer may be missing between sites that are honest."""

Key = tuple[str, int, str]
"""Whose records, in which round, for which release."""


@dataclass
class Settlement:
    """What was found when a run was over."""

    rounds: int = 0
    requests: int = 0
    answers: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    server_charges: int = 0
    site_charges: int = 0
    in_vain: int = 0
    """Charged at a site whose answer came too late or not at all: the charge stands."""
    problems: list[str] = field(default_factory=list)

    def check(self, sound: bool, problem: str) -> None:
        if not sound:
            self.problems.append(problem)


def charges_in(path: Path) -> list[tuple[Key, str]]:
    """All charges of a ledger, in their order, with the hash of what the client was sent."""
    bodies = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return [
        ((charge["subject"], charge["round"], charge["release"]), charge["input_hash"])
        for body in bodies
        for charge in body["charges"]
    ]


def participation_of(files: RunFolder) -> list[Participation]:
    return [Participation(**line) for line in read_lines(files.participation)]


def subject_of(client: str, release: str) -> str:
    return held_out(client) if release == EVALUATION else client


def settle(world: Consortium) -> Settlement:
    """Compare everything that was written down with everything else."""
    found = Settlement(rounds=world.rounds())
    record = participation_of(world.files)
    _check_record(found, record, world.planned)
    _check_ledgers(found, record, world)
    _check_replay(found, record, world)
    return found


def _check_record(found: Settlement, record: Iterable[Participation], rounds: int) -> None:
    """Everybody who was asked answered, or it is known why not; no request is told of twice."""
    seen: Counter[tuple[int, str]] = Counter()
    for one in record:
        where = f"round {one.round}, {one.release}"
        seen[one.round, one.release] += 1
        found.requests += 1
        found.answers += len(one.answered)
        found.missing.update(one.missing.values())
        both = [*one.answered, *one.missing]
        found.check(sorted(both) == sorted(NAMES), f"{where}: told of {sorted(both)}, asked were all")
        for name, why in one.missing.items():
            found.check(why in REASONS, f"{where}: {name} is missing, and the reason is {why!r}")
    twice = [key for key, times in seen.items() if times > 1]
    found.check(not twice, f"requests told of twice: {twice}")
    found.check({round for round, _ in seen} == set(range(1, rounds + 1)), "rounds without a record")


def _check_ledgers(found: Settlement, record: Iterable[Participation], world: Consortium) -> None:
    try:
        check_folder(world.files)  # the chain, and that it stays within the plan
    except CoterieError as mistake:
        found.problems.append(f"the server's folder: {mistake}")
    asked = charges_in(world.files.ledger)
    found.server_charges = len(asked)
    by_key = dict(asked)
    found.check(len(by_key) == len(asked), "the server's ledger charges a release twice")
    result = RunResult.load(world.run)
    answered = {
        (subject_of(name, one.release), one.round, one.release) for one in record for name in one.answered
    }
    for name, place in world.places.items():
        spent = charges_in(place.state / "ledger.jsonl")
        found.site_charges += len(spent)
        own = dict(spent)
        found.check(len(own) == len(spent), f"{name}: a release was charged twice")
        for key, hashed in spent:
            found.check(by_key.get(key) == hashed, f"{name}: charged for {key}, which the server did not ask")
        mine = {key for key in answered if key[0] in (name, held_out(name))}
        found.check(mine <= own.keys(), f"{name}: answered without a charge: {sorted(mine - own.keys())}")
        found.in_vain += len(own.keys() - mine)
        signed, end = (
            Signed.load(place.state / "contract.json"),
            Finished.load(place.state / "finished.json"),
        )
        ledger = LedgerView.read(place.state / "ledger.jsonl", signed.contract.own_plan)
        found.check(end.ledger == ledger.head, f"{name}: what it finished with is not its ledger's head")
        found.check(end.epsilon == ledger.spent(), f"{name}: epsilon {end.epsilon} is not its ledger's")
        least = end.epsilon <= result.asked[name] + 1e-9
        found.check(least, f"{name}: spent {end.epsilon}, and was asked for {result.asked[name]}")
        found.check(not (place.state / "noise.key").exists(), f"{name}: its noise key is still there")


# --- the same answers in one process ----------------------------------------------------------------


def _check_replay(found: Settlement, record: Iterable[Participation], world: Consortium) -> None:
    chosen = read_experiment(world.experiment, [f"seeds.noise={NOISE_SEED}"])
    out = world.folder / "alone"
    alone = replayed(chosen, RunFolder(out), record)
    here, there = state_of(chosen, world.run), state_of(chosen, out)
    for name, value in vars(there).items():
        other = getattr(here, name)
        if isinstance(value, np.ndarray):
            same = value.dtype == other.dtype and value.tobytes() == other.tobytes()
        else:
            same = value == other
        found.check(same, f"the simulation that replays the record has another {name}")
    models = local.calibrate(chosen).algorithm.models(there)
    assert isinstance(models, Assignment)
    for name, place in world.places.items():
        taken, _ = read_models(place.state / "model")
        found.check(
            taken.tobytes() == models.model_of(name).astype(np.float32).tobytes(),
            f"{name}: took home another model than the simulation's",
        )
    result = RunResult.load(world.run)
    if result.accuracy is not None and alone.accuracy is not None:
        for name, value in result.accuracy.per_client.items():
            same = value == alone.accuracy.per_client[name]
            found.check(
                same, f"{name}: its score is {value}, the simulation's {alone.accuracy.per_client[name]}"
            )


def replayed(experiment: Experiment, files: RunFolder, record: Iterable[Participation]) -> RunResult:
    """A simulation in which exactly those answer who answered in the record."""
    answered = {(one.round, one.release): set(one.answered) for one in record}
    return _answer_some(local.work(local.calibrate(experiment), files), answered)


def _answer_some(work: Work[RunResult], answered: Mapping[tuple[int, str], set[str]]) -> RunResult:
    try:
        asked = next(work)
        while True:
            asked = work.send(asked.engine.answer(only(asked.request, asked.round, answered), asked.round))
    except StopIteration as done:
        result: RunResult = done.value
        return result


def only(request: Request, round: int, answered: Mapping[tuple[int, str], set[str]]) -> Request:
    """The same request, of those clients alone who answered it."""
    assert isinstance(request, Train | Select), request
    who = answered[round, request.release]
    if isinstance(request, Train):
        return replace(request, jobs=tuple(job for job in request.jobs if job.client in who))
    return replace(request, clients=tuple(client for client in request.clients if client in who))


def state_of(experiment: Experiment, out: Path) -> State:
    kind: Any = find_algorithm(experiment.privacy.unit, experiment.algorithm.name).state_type
    saved = checkpoint.load(RunFolder(out).checkpoint, kind)
    assert saved is not None
    return saved.state
