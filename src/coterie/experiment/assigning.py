"""A newcomer finds its cluster: one private choice among a run's models, by its own records."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.data import Records
from coterie.data.client_files import DECLARATION, Clipped, KnownBy, client_files, formats, read_client
from coterie.data.folder import read_declaration
from coterie.data.identity import of_records
from coterie.engines.clients import build_learner
from coterie.engines.features import encoded
from coterie.engines.secret import SEEDED
from coterie.errors import DataError, InputError
from coterie.experiment.calibrated import default_delta
from coterie.experiment.registered import History
from coterie.experiment.usable import UsableModels
from coterie.models import code_caveats
from coterie.models.check import one_thread
from coterie.privacy import Guarantee, SecretKey, Unit
from coterie.privacy.choices import ChargedChoice, ChoiceLedger
from coterie.privacy.randomness import Floats
from coterie.privacy.ranges import EPSILON
from coterie.privacy.units import number_to_json
from coterie.privacy.wording import SIMULATION
from coterie.register import DataSet, Register, Reservation, Use
from coterie.training.learner import Batch
from coterie.training.scoring import score_sums

STATE = ".coterie"
"""Beside the records: whoever copies them copies what was charged to them, too."""
LEDGER = "choices.jsonl"
NOT_IN_TRAINING = "that none of these records trained the models is taken for granted, and not checked"


@dataclass(frozen=True)
class AssignedCluster:
    """What a newcomer is told, and may tell.

    Args:
        guarantee: of all choices on these records so far that the file beside them has.
        history: by the register, which counts all else, too, and choices whose file is gone.
    """

    cluster: int
    candidates: int
    records: int
    calls: int
    guarantee: Guarantee
    ledger: Path
    history: History

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "epsilon": number_to_json(self.guarantee.epsilon),
            "delta": self.guarantee.delta,
            "guarantee": self.guarantee.line,
            "guarantee_text": self.guarantee.text,
            "calls": self.calls,
            "candidates": self.candidates,
            "records": self.records,
            "ledger": str(self.ledger),
            "history": self.history.to_json(),
        }


def assign(run: UsableModels, data: Path, epsilon: float, key: SecretKey | None = None) -> AssignedCluster:
    """Choose among the models of a run by the records of a folder; charged beside them before it is chosen.

    Args:
        data: holds one file of labelled records, as the run was trained on.
        epsilon: of this choice.
        key: of the noise; by default drawn from the operating system, for this call alone.
    """
    if epsilon not in EPSILON or not epsilon < float("inf"):
        raise InputError(f"--epsilon: {epsilon} is not allowed, {EPSILON.least:g} to {EPSILON.most:g} is")
    check_choosable(run)
    name, records = newcomer(run, data)
    key = key or SecretKey.from_os()
    choice = ChargedChoice(epsilon, _digest(run), len(run.rows), len(records))
    history = _enter(run, data, name, records, choice, seeded=key.simulation)
    folder = data / STATE
    folder.mkdir(mode=0o700, exist_ok=True)
    with ChoiceLedger.open(folder / LEDGER) as ledger:
        ledger.charge(choice)  # whatever happens from here on is paid for
        said = {
            NOT_IN_TRAINING: True,
            SEEDED: key.simulation,
            **dict.fromkeys(code_caveats(run.trained.model), True),
        }
        delta = default_delta(min(each.records for each in ledger.choices))
        promise = ledger.guarantee(name, delta, [word for word, holds in said.items() if holds])
        calls = len(ledger.choices)
        noise = key.stream(
            "selection", subject=name, round=calls, release="choice", input_hash=ledger.head.hash
        )
        sums = scores(run, records)
        cluster = choice.selection.choose(sums[:, 0], sums[:, 1], noise)
    return AssignedCluster(cluster, len(run.rows), len(records), calls, promise, ledger.path, history)


def _enter(
    run: UsableModels, data: Path, name: str, records: Records, choice: ChargedChoice, *, seeded: bool
) -> History:
    """Have the register count a choice beside all else that the records have paid; it is made right away."""
    selection = choice.selection
    wanted = Reservation(
        id=Reservation.new_id(),
        kind="choice",
        name=str(run.path.resolve()),
        data=DataSet.of_folder(data),
        unit=Unit.RECORD,
        adjacency=selection.adjacency,
        delta=default_delta(len(records)),
        uses=(Use(name, of_records(records), selection.event),),
        weak=(SIMULATION,) if seeded else (),
        seeded=seeded,
    )
    with Register.open() as register:
        register.reserve(wanted)
        register.settle(wanted)
        return History.from_register(register, register.reserved[wanted.id])


def check_choosable(run: UsableModels) -> None:
    """Refuse a run whose models are no whole ones, or among which there is nothing to choose."""
    if run.trained.promise.unit is Unit.PERSON:
        raise InputError(
            f"{run.path}: protects persons, and a newcomer's choice would protect single records; "
            "allowed: a run of privacy.unit record"
        )
    if run.personal_parts is not None:
        raise InputError(
            f"{run.path}: clients of {run.trained.algorithm} keep a part of the model for themselves; "
            "there is no whole model for a newcomer"
        )
    if len(run.rows) == 1:
        raise InputError(f"{run.path}: has one model, nothing is to be chosen; use cluster 0")


def newcomer(run: UsableModels, data: Path) -> tuple[str, Records]:
    """The name and the labelled records of whoever holds a folder."""
    if not data.is_dir():
        raise DataError(f"--data: {data}; allowed: a folder with one file of records")
    described, clipped = run.preprocessing, Clipped()
    files = client_files(data, formats(described))
    if len(files) > 1:
        raise DataError(f"--data: {data} holds {len(files)} files of records; allowed: one, the newcomer's")
    declared = data / DECLARATION
    known_by = KnownBy(read_declaration(declared).identifier if declared.exists() else None)
    found = read_client(files[0], described, clipped, known_by=known_by)
    clipped.tell(data)
    assert found.targets is not None
    features = described.inputs.features(found.raw)
    return files[0].stem, Records(features, found.targets, identity=found.identity)


def scores(run: UsableModels, records: Records) -> Floats:
    """For each model, the sums over all records of what it gets right (bounded by 1) and of its losses."""
    trained, device = run.trained, torch.device("cpu")
    learner = build_learner(trained.model, run.task, trained.seed, device, additive=trained.additive)
    batch = Batch.of(encoded(records, trained.model.features, run.task, device), device)
    with one_thread():
        sums = [score_sums(learner, torch.from_numpy(row), batch, [len(records)]) for row in run.rows]
    return np.array([(right[0], lost[0]) for right, lost in sums])


def _digest(run: UsableModels) -> str:
    """Of the models that are chosen from."""
    return hashlib.sha256(np.ascontiguousarray(run.rows).tobytes()).hexdigest()
