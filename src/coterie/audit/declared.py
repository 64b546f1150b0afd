"""What is attacked: the plan of an experiment, or of a contract, with the code that executes it and no
record.

Data that are the user's own are counted and not read. Published data are loaded as `coterie plan` does, for
how many records each client has, and let go."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coterie.audit.arena import Audited
from coterie.data import Client, Federation, build_federation
from coterie.data.counting import blank_records, count_folder
from coterie.errors import CoterieError, InputError
from coterie.experiment.calibrated import CalibratedRun
from coterie.experiment.local import calibrate, load_federation
from coterie.experiment.schema import Experiment
from coterie.files import read_json
from coterie.models import build_model
from coterie.training.parameters import flatten

if TYPE_CHECKING:  # sites need Flower, audits of experiments do not
    from coterie.engines.flower.contract import Contract


def blank(federation: Federation) -> Federation:
    """The federation with as many records, none of which is anybody's."""

    def emptied(client: Client) -> Client:
        parts = (client.train, client.validation, client.test)
        return Client(client.name, *(blank_records(federation.task, len(part)) for part in parts))

    return replace(federation, clients=tuple(map(emptied, federation.clients)))


def declared_run(experiment: Experiment) -> CalibratedRun:
    """The run that the experiment would be, proven from counts alone, on this machine's processor."""
    chosen = experiment.model_copy(
        update={"engine": experiment.engine.model_copy(update={"name": "local", "device": "cpu"})}
    )
    data = chosen.data
    if data.name == "folder":
        path = getattr(data, "path", None)
        assert path is not None
        seed = chosen.seeds.simulation
        persons = chosen.privacy.persons
        counted = count_folder(path, persons=persons is not None)
        return calibrate(chosen, blank(build_federation(counted, chosen.federation, seed, persons)))
    return calibrate(chosen, blank(load_federation(chosen, counted=True)))


def audited_run(experiment: Experiment) -> tuple[Audited, str]:
    """What is attacked of an experiment, and what it is called."""
    run = declared_run(experiment)
    audited = Audited(
        plan=run.plan,
        learner=run.learner,
        lr=run.experiment.schedule.lr,
        public_seed=run.experiment.seeds.simulation,
        augmentation=run.augmentation,
        initial=run.facts.initialise(run.experiment.seeds.simulation),
        deltas={subject: budget.delta for subject, budget in run.budgets.items()},
        accountant=run.accountant,
        algorithm=run.algorithm,
        facts=run.facts,
        observer=run.observer,
    )
    return audited, f"{experiment.algorithm.name} on {experiment.data.name}"


def read_contract(path: Path) -> "Contract":
    """A contract as a site keeps it (contract.json of its state), or alone."""
    from coterie.engines.flower import require_flower

    require_flower()
    from coterie.engines.flower.contract import Contract

    content = read_json(path)
    try:
        return Contract.read(content.get("contract", content))
    except CoterieError as problem:
        raise InputError(f"--contract: {path}: {problem}") from None


def audited_contract(data: Path, path: Path, allowed: Sequence[str]) -> tuple[Audited, str]:
    """What this site's own code would release under a contract about the records of its folder."""
    contract = read_contract(path)
    whole = contract.plan.persons is not None
    found = count_folder(data, persons=whole)
    names = found.owners.names if found.owners else ()
    if len(names) != 1:
        raise InputError(f"--data: {data} holds {len(names)} clients; a site has one file")
    if contract.task != found.task:
        raise InputError(f"--contract: {path} is about {contract.task}; --data declares {found.task}")
    counted, said = len(found.train), contract.records + contract.held_out
    if whole:
        # A folder that names nobody has no persons.
        counted = 0 if found.persons is None else len(np.unique(found.persons.train))
    if counted != said:
        rows = "persons" if whole else "records"
        raise InputError(f"--contract: {path} is about {said} {rows}; --data has {counted}")
    if contract.model.own and contract.model.name not in allowed:
        raise InputError(
            f"--contract: {path} names a model whose code would run here, '{contract.model.name}'; allowed "
            "once --allow-model says so"
        )
    from coterie.engines.flower.approval import learner_of

    initial = flatten(
        build_model(contract.model, contract.task, contract.public_seed, additive=contract.additive)
    )
    audited = Audited(
        plan=contract.own_plan,
        learner=learner_of(contract),
        lr=contract.lr,
        public_seed=contract.public_seed,
        augmentation=contract.augmentation,
        initial=initial,
        deltas={unit.subject: contract.delta for unit in contract.units},
        accountant=contract.accountant,
        observer=contract.watched,
        trusted=contract.trusted,
    )
    return audited, f"{contract.algorithm}, contract of {contract.client}"
