"""What a server proposes to its sites, from what they told: the plan, proven first, and their contracts."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from coterie.algorithms import find_algorithm
from coterie.algorithms.protocol import OwnChoice
from coterie.data import GroupsFederation
from coterie.engines.flower.contract import IN_THE_CLEAR, WHO_IS_ASKED, Contract, TrustedWork, ranges_of
from coterie.engines.flower.shared_code import SharedCode, own_code
from coterie.engines.secret import SEEDED
from coterie.errors import InputError
from coterie.experiment.calibrated import (
    PUBLIC_COUNT,
    CalibratedRun,
    Population,
    calibrate_run,
    counts_clients,
    delta_caveat,
    reported_of,
)
from coterie.experiment.own_code import own_caveats
from coterie.experiment.recipe import sized
from coterie.experiment.schema import Experiment
from coterie.experiment.sites import Sites, counted, trusts_server
from coterie.groups import Structure, is_file, named_structure
from coterie.models.features import public_data_caveats
from coterie.plugins import ALGORITHM
from coterie.privacy import Budget, Custody, Unit
from coterie.training.learner import Learner

NOT_COMPARED = (
    "at how many sites a person has records is declared (privacy.clients_per_person), not checked: sites do "
    "not compare persons"
)


def structure_of(experiment: Experiment, names: tuple[str, ...]) -> Structure | None:
    """Who is in which group: the sites in the order of their names, or as the file of groups names them."""
    settings = experiment.federation
    if not isinstance(settings, GroupsFederation):
        return None
    workers = settings.workers if is_file(settings.structure) else len(names)
    found = named_structure(settings.structure, workers, settings.groups, prefix="federation.")
    if found.workers != len(names) or set(found.names or names) != set(names):
        raise InputError(
            f"federation.structure: {settings.structure} is about {found.workers} workers, the sites are "
            f"{', '.join(names)}; allowed: the same names"
        )
    return found if found.names else replace(found, names=names)


def calibrate_sites(experiment: Experiment, sites: Sites, truth: Mapping[str, int] | None) -> CalibratedRun:
    """The run that is proposed to the sites, proven from what they told."""
    persons = experiment.privacy.persons
    if (None if persons is None else persons.records) != sites.records_per_person:
        key = "unit" if persons is None or sites.records_per_person is None else "records_per_person"
        said = counted(sites.records_per_person)
        raise InputError(
            f"privacy.{key}: {getattr(experiment.privacy, key)}; every site {said}; allowed: unit person "
            "with that number where sites say --records-per-person, other units where they do not"
        )
    experiment = sized(experiment, sites.task, sites.records)
    structure = structure_of(experiment, tuple(sites.records))
    names = sites.records if structure is None else structure.names
    trusted, unit = trusts_server(experiment), experiment.privacy.unit
    # At unit client a score is the mean over all sites: without all of them there is none.
    everyone = unit is not Unit.CLIENT or sites.reported.keys() == sites.records.keys()
    scored = experiment.evaluation.kind != "none" and unit is not Unit.WORKER and everyone
    population = Population(
        sites.task,
        {name: sites.records[name] for name in names},
        structure,
        truth,
        {name: sites.held_out[name] for name in names},
        reported_of(experiment, sites.reported) if scored else {},
    )

    def caveats(learner: Learner, budgets: Mapping[str, Budget]) -> dict[str | None, bool]:
        return {
            delta_caveat(experiment, population, budgets): True,
            PUBLIC_COUNT: counts_clients(experiment),
            **dict.fromkeys(own_caveats(experiment, served=True), True),
            **dict.fromkeys(public_data_caveats(experiment.model.features, sites.task), True),
            IN_THE_CLEAR: trusted,
            WHO_IS_ASKED: trusted,
            NOT_COMPARED: persons is not None,
            SEEDED: experiment.seeds.noise is not None if trusted else sites.simulation,
        }

    held_by = Custody.TRUSTED_SERVER if trusted else Custody.EACH_SITE
    return calibrate_run(experiment, population, torch.device("cpu"), caveats, held_by)


def contracts_of(calibrated: CalibratedRun, sites: Sites) -> dict[str, Contract]:
    """What each site is asked to sign."""
    experiment, plan = calibrated.experiment, calibrated.plan
    trusted = _trusted_work(calibrated) if trusts_server(experiment) else None
    algorithm = ((ALGORITHM, experiment.algorithm.name),) if experiment.own_algorithm else ()
    code = tuple(SharedCode.here(kind, name) for kind, name in (*algorithm, *own_code(experiment.model)))
    return {
        client: Contract(
            experiment=sites.experiment,
            algorithm=experiment.algorithm.name,
            client=client,
            records=sites.records[client],
            task=sites.task,
            held_out=sites.held_out[client],
            model=experiment.model,
            lr=experiment.schedule.lr,
            augmentation=calibrated.augmentation,
            public_seed=experiment.seeds.simulation,
            rounds=experiment.schedule.rounds,
            plan=plan,
            accountant=experiment.privacy.accountant,
            delta=calibrated.budgets[plan.subjects_of((client,))[0]].delta,
            additive=find_algorithm(experiment.privacy.unit, experiment.algorithm.name).additive,
            trusted=trusted,
            code=code,
        )
        for client in sorted(sites.records)
    }


def _trusted_work(calibrated: CalibratedRun) -> TrustedWork:
    """What sites do for a server that they trust."""
    training, served = calibrated.algorithm.local_training(), calibrated.algorithm.models(calibrated.start())
    assert training is not None
    if not isinstance(served, OwnChoice):
        return TrustedWork(training, watched=calibrated.observer)
    personal = () if served.parts is None else ranges_of(served.parts.personal)
    return TrustedWork(training, served.choice, personal, calibrated.observer)
