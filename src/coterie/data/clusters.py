"""Clusters of clients, each with its own shift of the whole dataset."""

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from coterie.data.clients import Client, Federation, client_name
from coterie.data.dirichlet import Concentration, dealt_by_label
from coterie.data.records import UNDIVIDED, Dataset, Records, Task, stream
from coterie.errors import InputError, check_memory
from coterie.privacy.ranges import CLIENTS, RECORDS
from coterie.settings import Acts, Settings


class ClustersFederation(Settings):
    """Clusters of given sizes with a shift between them.

    Every cluster deals the whole training pool anew: clusters hold the same records under different shifts,
    the clients of one cluster share none, and no test record is a training record of anyone. Where the
    dataset has no test records, those that nobody trains on are held out.
    """

    kind: Literal["clusters"] = Field("clusters", description="clusters | dirichlet | natural | groups")
    sizes: tuple[Annotated[int, Field(ge=1, le=CLIENTS.most)], ...] = Field(
        (3, 6, 6, 6), min_length=1, description="clients per cluster"
    )
    shift: Annotated[
        Literal["rotation", "label", "none"],
        Acts("two clusters or more", lambda own, _: own.shift == "none" or len(own.sizes) > 1),
    ] = Field(
        "rotation", description="rotation (by 90 k degrees in cluster k) | label (moved by k classes) | none"
    )
    records_per_client: PositiveInt | None = Field(
        None,
        le=RECORDS.most,
        description="training records of every client; null: what the largest cluster allows",
    )
    validation_per_client: NonNegativeInt = Field(
        0, le=RECORDS.most, description="further records that a client keeps apart"
    )
    alpha: Concentration | None = Field(
        None,
        description="labels of a cluster's clients: Dirichlet mixtures of this concentration; null: as dealt",
    )
    test_per_client: PositiveInt | None = Field(
        None,
        le=RECORDS.most,
        description="test records of every client (with alpha, about); null: what the largest cluster allows",
    )
    test_share: Annotated[
        float,
        UNDIVIDED,
        Acts("federation.records_per_client null", lambda own, _: own.records_per_client is None),
    ] = Field(
        0.2,
        gt=0,
        lt=1,
        description="held out of a dataset without test records if records_per_client is null",
    )

    def build(self, dataset: Dataset, seed: int) -> Federation:
        """Deal the dataset once per cluster and shift what was dealt."""
        _check_shift(dataset.task, self)
        train, test = _pools(dataset, self, seed)
        kept, tested = _shares(dataset.name, len(train), len(test), self)
        dealt = kept + self.validation_per_client
        taken = sum(self.sizes) * (dealt + tested) * train.take(slice(1)).features.nbytes
        check_memory(f"federation.sizes: {sum(self.sizes)} clients", taken)
        clients: list[Client] = []
        for cluster, size in enumerate(self.sizes):
            rng = stream(seed, 1, cluster)
            if self.alpha is None:
                order, test_order = rng.permutation(len(train)), rng.permutation(len(test))
                shares = [order[member * dealt :][:dealt] for member in range(size)]
                tests = [test_order[member * tested :][:tested] for member in range(size)]
            else:
                labels, classes, shape = (train.targets, test.targets), dataset.task.classes, (size, dealt)
                shares, tests = dealt_by_label(labels, classes, shape, self.alpha, rng, tested)
            for mine, held_out in zip(shares, tests, strict=True):
                parts = [
                    _shifted(part, cluster, self.shift, dataset.task)
                    for part in (train.take(mine[:kept]), train.take(mine[kept:]), test.take(held_out))
                ]
                clients.append(Client(client_name(len(clients), sum(self.sizes)), *parts))
        # Without a shift the clusters are one cluster.
        truth = (0 if self.shift == "none" else k for k, size in enumerate(self.sizes) for _ in range(size))
        return Federation(tuple(clients), dataset.task, tuple(truth))


def whole_test(dataset: Dataset, settings: ClustersFederation, cluster: int, seed: int) -> Records:
    """All test records under one cluster's shift."""
    return _shifted(_pools(dataset, settings, seed)[1], cluster, settings.shift, dataset.task)


def _pools(dataset: Dataset, settings: ClustersFederation, seed: int) -> tuple[Records, Records]:
    """Training and test records; one hold-out for all clusters, where the dataset has none."""
    if dataset.test is not None:
        return dataset.train, dataset.test
    total, largest = len(dataset.train), max(settings.sizes)
    if settings.records_per_client is None:
        share = (total - round(settings.test_share * total)) // largest
    else:
        share = settings.records_per_client + settings.validation_per_client
    # At least a test record for each client of the largest cluster; `_shares` explains what does not fit.
    kept = largest * min(share, max(0, total // largest - 1))
    order = stream(seed, 0).permutation(total)
    return dataset.train.take(order[:kept]), dataset.train.take(order[kept:])


def _shares(name: str, train: int, test: int, settings: ClustersFederation) -> tuple[int, int]:
    """Training and test records per client, if the pools hold that many for the largest cluster."""
    largest, validation = max(settings.sizes), settings.validation_per_client
    most, most_tested = train // largest - validation, test // largest
    kept = settings.records_per_client or most
    if most < 1 or kept > most:
        apart = f" beside {validation} for validation" if validation else ""
        raise InputError(
            f"federation.records_per_client: {settings.records_per_client}; {name} has {max(most, 0)} "
            f"training records{apart} for each of {largest} clients"
        )
    tested = settings.test_per_client or most_tested
    if most_tested < 1 or tested > most_tested:
        raise InputError(
            f"federation.test_per_client: {settings.test_per_client}; {name} leaves {most_tested} test "
            f"records for each of {largest} clients"
        )
    return kept, tested


def _check_shift(task: Task, settings: ClustersFederation) -> None:
    clusters = len(settings.sizes)
    if settings.alpha is not None and task.kind != "classification":
        raise InputError(
            f"federation.alpha: {settings.alpha:g}; it needs classes and this task is regression"
        )
    if settings.shift == "rotation":
        if len(task.shape) != 3 or task.shape[1] != task.shape[2]:
            raise InputError(
                f"federation.shift: rotation; it needs square images, these records are {task.shape}"
            )
        if clusters > 4:
            raise InputError(
                f"federation.sizes: {clusters} clusters; rotation by quarter turns allows at most 4"
            )
    if settings.shift == "label":
        if task.kind != "classification":
            raise InputError("federation.shift: label; it needs classes and this task is regression")
        if clusters > task.classes:
            raise InputError(
                f"federation.sizes: {clusters} clusters; label shift allows at most {task.classes}"
            )


def _shifted(records: Records, cluster: int, shift: str, task: Task) -> Records:
    if shift == "rotation":
        turned = np.rot90(records.features, cluster, axes=(2, 3))
        return replace(records, features=np.ascontiguousarray(turned))
    if shift == "label":
        return replace(records, targets=(records.targets + cluster) % task.classes)
    return records
