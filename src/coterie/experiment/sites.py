"""What a server learns of its sites before it asks for anything, what follows for the plan, what they sign.

The server has no data. It learns names, record counts and the task from the sites, and proves the plan before
it proposes it.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

from coterie.algorithms import find_algorithm
from coterie.algorithms.protocol import OwnChoice
from coterie.data import DataSettings, GroupsFederation
from coterie.data.records import Task
from coterie.engines.flower import server
from coterie.engines.flower.contract import IN_THE_CLEAR, WHO_IS_ASKED, Contract, TrustedWork, ranges_of
from coterie.engines.flower.transport import Transport
from coterie.engines.secret import SEEDED
from coterie.errors import CoterieError, InputError
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
from coterie.experiment.schema import Experiment, refuse
from coterie.files import read_json
from coterie.groups import Shape, Structure, is_file, named_structure
from coterie.models.features import public_data_caveats
from coterie.privacy import Budget, Custody, HeldOut, Mode, Unit
from coterie.privacy.plain import Key, Plain
from coterie.settings import departures
from coterie.training.learner import Learner

NOT_COMPARED = (
    "at how many sites a person has records is declared (privacy.clients_per_person), not checked: sites do "
    "not compare persons"
)


@dataclass(frozen=True)
class Sites(Plain):
    """The public facts of all sites, and the name under which they will know this run."""

    called = "sites"
    mistake = InputError
    experiment: str
    task: Task
    records: Mapping[str, int]
    held_out: Mapping[str, int]
    reported: Mapping[str, HeldOut]
    simulation: bool
    records_per_person: Annotated[int | None, Key(optional=True)] = None

    @classmethod
    def gather(cls, transport: Transport, most_records: int | None = None) -> "Sites":
        """Ask all sites for their public facts.

        Args:
            most_records: that the server's operator believes a site to have: what one may release grows with
                the number that it claims.
        """
        names = sorted(transport.nodes)
        found = server.gather_facts(transport)
        for name, reason in found.missing.items():
            raise InputError(f"client {name}: no facts ({reason}); all are needed before the first round")
        sites, first = found.by_client, found.by_client[names[0]]
        task, most = first.task, first.records_per_person
        for name, site in sites.items():
            if most_records is not None and site.records + site.held_out > most_records:
                raise InputError(
                    f"client {name}: claims {site.records + site.held_out:,} records; allowed by "
                    f"--most-records: {most_records:,}"
                )
            if site.task != task:
                raise InputError(f"client {name}: its task is {site.task}, that of {names[0]} is {task}")
            if site.records_per_person != most:
                raise InputError(
                    f"client {name}: {_counted(site.records_per_person)}, {names[0]} {_counted(most)}; "
                    "allowed: the same --records-per-person at all sites, or none"
                )
        return cls(
            secrets.token_hex(16),
            task,
            {name: site.records for name, site in sites.items()},
            {name: site.held_out for name, site in sites.items()},
            {name: site.reported for name, site in sites.items() if site.reported is not None},
            any(site.simulation for site in sites.values()),
            most,
        )

    @classmethod
    def load(cls, path: Path) -> "Sites":
        try:
            return cls.from_json(read_json(path))
        except CoterieError as mistake:
            raise InputError(f"{path}: not the sites of a run of this version ({mistake})") from None


def _counted(most: int | None) -> str:
    return "counts records" if most is None else f"counts persons, up to {most} records of each"


def trusts_server(experiment: Experiment) -> bool:
    """Whether the server is trusted with updates, because a unit is more than a record."""
    return not experiment.privacy.unit.within_client


def check_servable(experiment: Experiment) -> None:
    """Refuse, before anybody is asked, what cannot be done between sites."""
    # Sites have records of their own, whatever data the file names.
    experiment.model_copy(update={"data": DataSettings(name="folder", path=Path())}).check_all_acts()
    privacy, federation = experiment.privacy, experiment.federation
    labels = isinstance(federation, GroupsFederation) and federation.structure == Shape.LABEL
    refuse(
        {
            f"algorithm.name: {experiment.algorithm.name} is your own code; with unit {privacy.unit} sites "
            "trust the server with their updates, and not with code that they have not seen; allowed there: "
            "algorithms of coterie": experiment.own_algorithm and not privacy.unit.within_client,
            "evaluation.kind: exact; a site's records are its own, and no score of them leaves it without "
            "noise; allowed between sites: auto, private, none": experiment.evaluation.kind == "exact",
            "evaluation.scores: a site answers with one number, its first score; allowed between sites: "
            "null": experiment.evaluation.scores is not None,
            "privacy.mode: paper lets workers see each other's updates without noise; allowed between sites: "
            "sound": privacy.unit is Unit.WORKER and privacy.mode is Mode.PAPER,
            "algorithm.adaptive_clip: sites sign one clip before the first round, and clip to that; allowed "
            "between sites: null": getattr(experiment.algorithm, "adaptive_clip", None) is not None,
            f"algorithm.name: {experiment.algorithm.name} has every client derive sums from a sketch of its "
            "gradient, which sites do not do yet; allowed between sites: other algorithms": (
                experiment.algorithm.name == "dp-sketch-cluster"
            ),
            "federation.structure: label is made from the workers' labels, which the server does not have; "
            "allowed over Flower: global, ring, string, clustered or a file of groups": labels,
        }
    )


def left_to_sites(experiment: Experiment) -> list[str]:
    """A line that names what the file says and a server does not look at; none where it says nothing such.

    The same file is for a simulation, where all of this acts.
    """
    groups = isinstance(experiment.federation, GroupsFederation)
    acting = {"federation.structure", "federation.groups"} if groups else set()
    if isinstance(experiment.federation, GroupsFederation) and is_file(experiment.federation.structure):
        acting.add("federation.workers")
    found = [
        f"{name}.{key}"
        for name in ("data", "federation", "engine")
        for key in departures(getattr(experiment, name))
        if f"{name}.{key}" not in acting
    ]
    found += ["evaluation.references"] if "references" in departures(experiment.evaluation) else []
    told = "act in a simulation; records, how they are held and who trains on them are the sites' own here"
    return [f"note: {', '.join(found)} {told}"] if found else []


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
        counted = _counted(sites.records_per_person)
        raise InputError(
            f"privacy.{key}: {getattr(experiment.privacy, key)}; every site {counted}; allowed: unit person "
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
