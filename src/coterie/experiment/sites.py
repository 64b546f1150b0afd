"""What a server learns of its sites before it asks for anything, and which experiments it can serve.

The server has no data. It learns names, record counts and the task from the sites; what follows for the plan
is in `proposing`.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from coterie.data import DataSettings, GroupsFederation
from coterie.data.records import Task
from coterie.engines.flower.agreement import gather_facts
from coterie.engines.flower.transport import Transport
from coterie.errors import CoterieError, InputError
from coterie.experiment.schema import Experiment, refuse
from coterie.files import read_json
from coterie.groups import Shape, is_file
from coterie.privacy import HeldOut, Mode, Unit
from coterie.privacy.plain import Key, Plain
from coterie.settings import departures


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
        found = gather_facts(transport)
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
                    f"client {name}: {counted(site.records_per_person)}, {names[0]} {counted(most)}; "
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


def counted(most: int | None) -> str:
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
