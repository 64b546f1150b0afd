"""A site from what its operator says: which records, which name, which limits, where its ledger is."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from coterie.data import Client, Federation, NaturalFederation, check_federation
from coterie.data.client_files import DECLARATION
from coterie.data.folder import read_folder
from coterie.data.natural import split_records
from coterie.data.persons import WholePersons, units_of
from coterie.data.records import Dataset
from coterie.engines.flower.booking import SiteBooking, basis_of
from coterie.engines.flower.contract import NO_RULES, Limits, Rules
from coterie.engines.flower.keys import check_site_name
from coterie.engines.flower.review import Reviewer
from coterie.engines.flower.site import Site
from coterie.errors import InputError
from coterie.files import check_place
from coterie.privacy import Adjacency, Budget, HeldOut, PersonBounds, Unit
from coterie.privacy.ranges import (
    CLIENTS,
    DELTA,
    EPSILON,
    EVALUATION_EPSILON,
    RECORDS_PER_PERSON,
    ROUNDS,
    SEED,
    Range,
)
from coterie.privacy.units import round_up, short_number
from coterie.register import DataSet, RegisterView

MEANT_DELTA = replace(DELTA, most=0.999)
SHARE = Range(1e-6, 0.999999)
PLACE = replace(CLIENTS, least=0)
STATE = ".coterie"
"""Beside the records by default: a ledger belongs to them, and whoever copies them copies it, too."""


@dataclass(frozen=True)
class Joining:
    """What an operator decides when joining.

    Args:
        data: a folder with `federation.yaml` and one file of records.
        name: under which the server's operator knows the site; by default, that of the file.
        state: the folder of its ledger, noise key and contract; by default inside the data folder.
        epsilon, delta: the most that may be spent of these records; delta defaults to a fifth of one over
            their number, or over that of the persons.
        models: models of the form package.module:function whose code may run here.
        held_out: share of the records that is never trained on; None: all are.
        split: seed, and place, of the draw that decides which those are: by their position alone.
        evaluation_epsilon: what scoring models may cost a held-out record (of a site that trusts the server:
            nothing beside epsilon); None: models are not scored.
        evaluation_reports: how often models may be scored.
        trust_server: whether the server may see this site's clipped updates in the clear, where a unit is a
            client or a worker; delta must then be given, since units are sites.
        adjacency: between which neighbours epsilon holds, whatever a plan says; by default as it says.
        noise_seed: for tests: repeatable noise, no privacy against anybody who knows it.
        records_per_person: protect persons, of whom so many records count; None: records, or the site.
        rules: what a policy says beside the budget.
        lifetime_epsilon, lifetime_delta: the most that a record may ever spend, in all experiments together;
            once set it binds later ones.
        new_records: rows that are new in this folder have paid nothing yet.
    """

    data: Path
    epsilon: float
    delta: float | None = None
    name: str | None = None
    state: Path | None = None
    models: tuple[str, ...] = field(default=())
    held_out: float | None = None
    split: tuple[int, int] = (0, 0)
    evaluation_epsilon: float | None = None
    evaluation_reports: int = 1
    noise_seed: int | None = None
    trust_server: bool = False
    adjacency: Adjacency | None = None
    records_per_person: int | None = None
    rules: Rules = NO_RULES
    lifetime_epsilon: float | None = None
    lifetime_delta: float | None = None
    new_records: bool = False

    def __post_init__(self) -> None:
        numbers: Mapping[str, tuple[float | None, Range]] = {
            "--epsilon": (self.epsilon, EPSILON),
            "--delta": (self.delta, MEANT_DELTA),
            "--held-out": (self.held_out, SHARE),
            "--split": (self.split[0], SEED),
            "--split: place": (self.split[1], PLACE),
            "--evaluation-epsilon": (self.evaluation_epsilon, EVALUATION_EPSILON),
            "--evaluation-reports": (self.evaluation_reports, ROUNDS),
            "--noise-seed": (self.noise_seed, SEED),
            "--records-per-person": (self.records_per_person, RECORDS_PER_PERSON),
            "--lifetime-epsilon": (self.lifetime_epsilon, EVALUATION_EPSILON),
            "--lifetime-delta": (self.lifetime_delta, MEANT_DELTA),
        }
        for option, (value, allowed) in numbers.items():
            InputError.unless_within(allowed, option, value)
        scored = self.evaluation_epsilon is not None
        idle = {
            "--split: no records are held out; it acts with --held-out": (
                self.held_out is None and self.records_per_person is None and self.split != (0, 0)
            ),
            "--trust-server: with it this site is protected, with --records-per-person a person; allowed: "
            "one of them": self.trust_server and self.records_per_person is not None,
            "--evaluation-epsilon: no records are held out to score models; --held-out names a share": (
                self.held_out is None and scored
            ),
            "--evaluation-reports: no model is scored; it acts with --evaluation-epsilon": (
                self.evaluation_reports != 1 and not scored
            ),
            "--lifetime-epsilon and --lifetime-delta: needed together, or neither": (
                (self.lifetime_epsilon is None) != (self.lifetime_delta is None)
            ),
        }
        for line, holds in idle.items():
            InputError.when(holds, line)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From a Flower node's configuration, where names have dashes and everything is a plain value."""
        InputError.when(not {"data", "epsilon"} <= set(config), "node config: data and epsilon are needed")
        for key in (key for key in config if _CONFIG.get(key) in (float, int, bool)):
            # The text "false" would be true, and true a number.
            value, switch = config[key], _CONFIG[key] is bool
            wanted = "true or false" if switch else "a number"
            odd = isinstance(value, bool) != switch
            InputError.when(odd, f"node config: {key}: {value} is not allowed, {wanted} is")
        known = {key.replace("-", "_"): read(config[key]) for key, read in _CONFIG.items() if key in config}
        return cls(**known)


def _adjacency(name: str) -> Adjacency:
    allowed = " or ".join(Adjacency)
    InputError.when(
        name not in list(Adjacency), f"node config: adjacency: {name} is not allowed, {allowed} is"
    )
    return Adjacency(name)


def parse_split(text: str) -> tuple[int, int]:
    """A seed, or a seed and a place, as in 3:1."""
    found = re.fullmatch(r"([0-9]{1,20})(?::([0-9]{1,20}))?", text)
    if found is None:
        raise InputError(f"--split: {text!r} is not allowed, a seed is, or seed:place as in 0:2")
    return int(found[1]), int(found[2] or "0")


_CONFIG: Mapping[str, Callable[[Any], Any]] = {
    "data": Path,
    "epsilon": float,
    "delta": float,
    "name": str,
    "state": Path,
    "models": lambda names: tuple(name for name in str(names).split(",") if name),
    "held-out": float,
    "split": lambda split: parse_split(str(split)),
    "evaluation-epsilon": float,
    "evaluation-reports": int,
    "noise-seed": int,
    "trust-server": bool,
    "adjacency": _adjacency,
    "records-per-person": int,
    "lifetime-epsilon": float,
    "lifetime-delta": float,
    "new-records": bool,
}
"""Keys of a Flower node's configuration and how each is read."""


def open_site(joining: Joining, reviewer: Reviewer | None = None) -> Site:
    """Read the records once, and open the site, or open it again.

    Args:
        reviewer: has the operator decide about contracts.
    """
    InputError.when(
        joining.trust_server and joining.delta is None,
        "--delta: needed with --trust-server, where not a record but this site is protected; allowed: a "
        "number well below one over the number of sites",
    )
    state = joining.state or joining.data / STATE
    check_place(state, "--state")
    dataset = read_folder(joining.data)
    for caveat in dataset.caveats:
        raise InputError(f"--data: {joining.data}: {caveat}; allowed between sites: ranges that all agree on")
    owners = dataset.owners.names if dataset.owners else ()
    held = f"{len(owners)} clients ({', '.join(owners)})"
    InputError.when(len(owners) != 1, f"--data: {joining.data} holds {held}; a site has one file")
    name = joining.name or owners[0]
    check_site_name(name)
    alone = _alone(name, dataset, joining)
    units = len(alone.clients[0].train) + len(alone.clients[0].test)
    delta = joining.delta if joining.delta is not None else 0.2 / units
    budget = Budget(joining.epsilon, delta)
    limits = Limits(
        budget,
        joining.models,
        _reported(joining),
        joining.trust_server,
        joining.adjacency,
        joining.rules,
    )
    booking = SiteBooking(DataSet.of_folder(joining.data), alone)
    lifetime = None
    if joining.lifetime_epsilon is not None and joining.lifetime_delta is not None:
        lifetime = Budget(joining.lifetime_epsilon, joining.lifetime_delta)
    unit = Unit.CLIENT if joining.trust_server else Unit.RECORD
    if joining.records_per_person is not None:
        unit = Unit.PERSON
    basis = basis_of(unit, joining.adjacency)
    booking.prepare(lifetime, basis, new_records=joining.new_records)
    return Site(alone, state, limits, noise_seed=joining.noise_seed, reviewer=reviewer, booking=booking)


def spent_before(data: Path) -> str:
    """What the register says that the records of a folder have paid before."""
    register = RegisterView.read()
    spent = None if register is None else register.spent(DataSet.of_folder(data))
    if spent is None:
        return "nothing that the register of this user knows of"
    total = f"epsilon {round_up(spent.epsilon)} at delta {short_number(spent.delta)}"
    allowed = "" if spent.lifetime is None else f", of a lifetime budget of {spent.lifetime.epsilon:g}"
    return f"{total} for one {spent.basis.unit} in {len(spent.experiments)} experiments, composed{allowed}"


def _reported(joining: Joining) -> HeldOut | None:
    """What the operator allows held-out records to say."""
    if joining.evaluation_epsilon is None:
        return None
    # How many records, the site counts itself.
    return HeldOut(0, joining.evaluation_epsilon, joining.evaluation_reports)


def _alone(name: str, dataset: Dataset, joining: Joining) -> Federation:
    """The site and its records, divided as its operator says.

    With the seed and the site's place of a simulation, they are divided as that simulation would.
    """
    most, (seed, place) = joining.records_per_person, joining.split
    InputError.when(
        most is not None and dataset.persons is None,
        f"--records-per-person: {most}; {joining.data} does not say whose each record is; person: COLUMN in "
        f"{DECLARATION} does",
    )
    units = units_of(dataset, None if most is None else PersonBounds(most), seed)
    own = units.at(place, np.arange(len(dataset.train)))
    train = everything = np.arange(len(own))
    test = everything[:0]
    if joining.held_out is not None:
        shares = NaturalFederation(test_share=joining.held_out)
        train, _, test = split_records(everything, shares, seed, place)
    parts = (units.take(own, part) for part in (train, everything[:0], test))
    alone = Federation(
        (Client(name, *parts),), dataset.task, preprocessing=dataset.preprocessing, records_per_person=most
    )
    check_federation(alone, held_out=False)
    if isinstance(units, WholePersons):
        units.tell()
    return alone
