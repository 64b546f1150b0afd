"""A site from what its operator says: which records, which name, which limits, where its books are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from coterie.data import Client, Federation, NaturalFederation, check_federation
from coterie.data.folder import read_folder
from coterie.data.natural import split_records
from coterie.data.records import Dataset
from coterie.engines.flower.contract import Limits
from coterie.engines.flower.keys import check_site_name
from coterie.engines.flower.messages import Split
from coterie.engines.flower.site import Records, Site
from coterie.errors import InputError
from coterie.privacy import Adjacency, Budget

BOOKS = ".coterie"
"""Beside the records by default: a ledger belongs to them, and whoever copies them copies it, too."""


@dataclass(frozen=True)
class Joining:
    """What an operator decides when joining.

    Args:
        data: a folder with `federation.yaml` and one file of records.
        name: under which the server's operator knows the site; by default, that of the file.
        state: the site's books; by default inside the data folder.
        epsilon, delta: the most that may be spent of these records; delta defaults to a fifth of one over
            their number.
        models: models of the form package.module:function whose code may run here.
        report_accuracy: whether accuracy on held-out records may be told, outside the guarantee.
        trust_server: whether the server may see this site's clipped updates in the clear, where a unit is a
            client or a worker; delta must then be given, since units are sites.
        adjacency: between which neighbours epsilon holds, whatever a plan says; by default as it says.
        noise_seed: for tests: repeatable noise, no privacy against anybody who knows it.
    """

    data: Path
    epsilon: float
    delta: float | None = None
    name: str | None = None
    state: Path | None = None
    models: tuple[str, ...] = field(default=())
    report_accuracy: bool = False
    noise_seed: int | None = None
    trust_server: bool = False
    adjacency: Adjacency | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From a Flower node's configuration, where names have dashes and everything is a plain value."""
        if "data" not in config or "epsilon" not in config:
            raise InputError("node config: data and epsilon are needed")
        for key in ("epsilon", "delta", "noise-seed"):
            if isinstance(config.get(key), bool):
                raise InputError(f"node config: {key}: {config[key]} is not allowed, a number is")
        models = str(config.get("models", ""))
        return cls(
            data=Path(str(config["data"])),
            epsilon=float(config["epsilon"]),
            delta=float(config["delta"]) if "delta" in config else None,
            name=str(config["name"]) if "name" in config else None,
            state=Path(str(config["state"])) if "state" in config else None,
            models=tuple(models.split(",")) if models else (),
            report_accuracy=bool(config.get("report-accuracy", False)),
            noise_seed=int(config["noise-seed"]) if "noise-seed" in config else None,
            trust_server=bool(config.get("trust-server", False)),
            adjacency=_adjacency(str(config["adjacency"])) if "adjacency" in config else None,
        )


def _adjacency(name: str) -> Adjacency:
    if name not in list(Adjacency):
        raise InputError(f"node config: adjacency: {name} is not allowed, {' or '.join(Adjacency)} is")
    return Adjacency(name)


def open_site(joining: Joining) -> Site:
    """Read the records once, and open or reopen the books."""
    if joining.trust_server and joining.delta is None:
        raise InputError(
            "--delta: needed with --trust-server, where not a record but this site is protected; allowed: a "
            "number well below one over the number of sites"
        )
    dataset = read_folder(joining.data)
    owners = dataset.owners.names if dataset.owners else ()
    if len(owners) != 1:
        raise InputError(
            f"--data: {joining.data} holds {len(owners)} clients ({', '.join(owners)}); a site has one file"
        )
    name = joining.name or owners[0]
    check_site_name(name)
    count = len(dataset.train)
    delta = joining.delta if joining.delta is not None else 0.2 / count
    if math.isnan(joining.epsilon) or not joining.epsilon > 0:
        raise InputError(f"--epsilon: {joining.epsilon}; allowed: a number above 0")
    limits = Limits(
        Budget(joining.epsilon, delta),
        joining.models,
        joining.report_accuracy,
        joining.trust_server,
        joining.adjacency,
    )
    return Site(
        name,
        _records(name, dataset),
        joining.state or joining.data / BOOKS,
        limits,
        noise_seed=joining.noise_seed,
    )


def _records(name: str, dataset: Dataset) -> Records:
    """The site's records under any split, as a simulation of all sites would divide them."""

    def split_up(split: Split) -> tuple[Client, Federation]:
        settings = NaturalFederation(test_share=split.test_share, validation_share=split.validation_share)
        everything = np.arange(len(dataset.train))
        train, apart, test = split_records(everything, settings, split.seed, split.position)
        take = dataset.train.take
        client = Client(name, train=take(train), validation=take(apart), test=take(test))
        alone = Federation((client,), dataset.task)
        check_federation(alone)
        return client, alone

    return split_up
