"""Equal shares with unequal labels: Dirichlet mixtures of the classes."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from coterie.data.clients import Client, Federation, client_name
from coterie.data.records import UNDIVIDED, Array, Dataset, stream
from coterie.errors import InputError
from coterie.privacy.ranges import CLIENTS, CONCENTRATION, RECORDS
from coterie.settings import Settings, within

Concentration = Annotated[float, within(CONCENTRATION)]


class DirichletFederation(Settings):
    """Clients whose label mixtures are drawn from Dirichlet(alpha, ..., alpha).

    Records are dealt without replacement (Hsu, Qi and Brown 2019); a client whose classes have run out gets
    others. Test records of a class go to the clients in proportion to their training records of it.
    """

    kind: Literal["dirichlet"] = Field("dirichlet", description="clusters | dirichlet | natural | groups")
    clients: PositiveInt = Field(le=CLIENTS.most, description="how many clients")
    alpha: Concentration = Field(description="concentration; a small one leaves each client few classes")
    records_per_client: PositiveInt | None = Field(
        None, le=RECORDS.most, description="records dealt to every client; null: an equal share of all"
    )
    validation_share: float = Field(
        0.0, ge=0, lt=1, description="share of its records that a client keeps apart"
    )
    test_share: Annotated[float, UNDIVIDED] = Field(
        0.2, gt=0, lt=1, description="held out of a dataset without test records"
    )

    def build(self, dataset: Dataset, seed: int) -> Federation:
        """Draw each client's labels, then deal records of those labels."""
        task, clients = dataset.task, self.clients
        if task.kind != "classification":
            raise InputError("federation.kind: dirichlet; it needs classes and this task is regression")
        train, test = dataset.train, dataset.test
        if test is None:
            order = stream(seed, 0).permutation(len(train))
            held_out = round(self.test_share * len(train))
            train, test = train.take(order[held_out:]), train.take(order[:held_out])
        share = self.records_per_client or len(train) // clients
        if not 1 <= share <= len(train) // clients:
            raise InputError(
                f"federation.records_per_client: {self.records_per_client}; {dataset.name} has "
                f"{len(train) // clients} training records for each of {clients} clients"
            )
        rng = stream(seed, 1)
        labels = train.targets, test.targets
        mine, tests = dealt_by_label(labels, task.classes, (clients, share), self.alpha, rng)
        kept = share - round(self.validation_share * share)
        return Federation(
            tuple(
                Client(
                    client_name(index, clients),
                    train=train.take(mine[index][:kept]),
                    validation=train.take(mine[index][kept:]),
                    test=test.take(tests[index]),
                )
                for index in range(clients)
            ),
            task,
        )


def dealt_by_label(
    labels: tuple[Array, Array],
    classes: int,
    shape: tuple[int, int],
    alpha: float,
    rng: np.random.Generator,
    tested: int | None = None,
) -> tuple[list[Array], list[Array]]:
    """Positions of each client's training and test records, by mixtures of labels drawn for them.

    Args:
        labels: of all training and of all test records.
        shape: how many clients, and training records of each.
        tested: test records of a client, about; as many of each class as its training records ask for, or
            fewer where a class has too few for all. None: all test records are dealt.
    """
    (train, test), (_, share) = labels, shape
    available, held_out = (np.bincount(part, minlength=classes) for part in (train, test))
    ends = _label_counts(available, shape, alpha, rng).cumsum(axis=0)
    last = ends[-1]
    reach = ends / np.maximum(last, 1)
    if tested is not None:
        held_out = last * min(tested / share, (held_out[last > 0] / last[last > 0]).min())
    return _dealt(train, ends, rng), _dealt(test, np.rint(reach * held_out).astype(np.int64), rng)


def _label_counts(available: Array, shape: tuple[int, int], alpha: float, rng: np.random.Generator) -> Array:
    """Records of each class for each client, together never more of a class than there are."""
    left, (clients, share) = available.copy(), shape
    mixtures = rng.dirichlet([alpha] * len(left), clients)
    counts = np.zeros(mixtures.shape, dtype=np.int64)
    for row, mixture in zip(counts, mixtures, strict=True):
        while (wanted := share - int(row.sum())) > 0:
            weights = np.where(left > 0, mixture, 0.0)
            if weights.sum() < 1e-9:  # all of this client's classes have run out
                weights = left.astype(np.float64)
            drawn = np.minimum(rng.multinomial(wanted, weights / weights.sum()), left)
            row += drawn
            left -= drawn
    return counts


def _dealt(targets: Array, ends: Array, rng: np.random.Generator) -> list[Array]:
    """Positions for each client, given where its share of each class ends in the class's shuffled order."""
    shares: list[list[Array]] = [[] for _ in ends]
    for label, label_ends in enumerate(ends.T):
        members = rng.permutation(np.flatnonzero(targets == label))
        for client, part in enumerate(np.split(members, label_ends)[:-1]):
            shares[client].append(part)
    return [rng.permutation(np.concatenate(share)) for share in shares]
