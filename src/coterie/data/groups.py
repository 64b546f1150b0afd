"""Workers in overlapping groups: Dirichlet shares of the records, and who works with whom."""

from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from coterie.data.clients import Federation, client_name
from coterie.data.dirichlet import Concentration, DirichletFederation
from coterie.data.records import UNDIVIDED, Dataset
from coterie.errors import InputError
from coterie.groups import is_file, named_structure
from coterie.privacy.ranges import CLIENTS, GROUPS, RECORDS
from coterie.settings import Acts, Settings

_GROUPED = Acts(
    "privacy.unit worker, or as a file that names the clients",
    lambda own, run: run.privacy.unit == "worker" or is_file(own.structure),
)


class GroupsFederation(Settings):
    """Workers that train in groups, each in one or several; the groups are public and stay as they are."""

    kind: Literal["groups"] = Field("groups", description="clusters | dirichlet | natural | groups")
    structure: Annotated[str, _GROUPED] = Field(
        "ring", description="global | ring | string | clustered | label | a JSON, YAML or CSV file of groups"
    )
    workers: PositiveInt | None = Field(
        None, le=CLIENTS.most, description="how many; null: as many as the file has"
    )
    groups: Annotated[PositiveInt | None, _GROUPED] = Field(
        None, le=GROUPS.most, description="how many; null: one, or as many as the file has"
    )
    alpha: Concentration = Field(0.1, description="concentration of the Dirichlet mixtures of labels")
    records_per_client: PositiveInt | None = Field(
        None, le=RECORDS.most, description="records dealt to every worker; null: an equal share of all"
    )
    test_share: Annotated[float, UNDIVIDED] = Field(
        0.2, gt=0, lt=1, description="held out of a dataset without test records"
    )

    def build(self, dataset: Dataset, seed: int) -> Federation:
        """Deal the records, then say who is in which group; by labels, only after they are dealt."""
        named = partial(named_structure, self.structure, groups=self.groups, prefix="federation.")
        known = named(self.workers) if is_file(self.structure) else None
        workers = known.workers if known else self.workers
        if workers is None:
            raise InputError(
                f"federation.workers: nothing was given, a number is needed for structure {self.structure}"
            )
        dealt = DirichletFederation(
            clients=workers,
            alpha=self.alpha,
            records_per_client=self.records_per_client,
            test_share=self.test_share,
        ).build(dataset, seed)
        held = [frozenset(np.unique(client.train.targets).tolist()) for client in dealt.clients]
        structure = known or named(workers, labels=lambda: held)
        names = structure.names or tuple(client_name(index, workers, "worker") for index in range(workers))
        clients = tuple(replace(client, name=name) for client, name in zip(dealt.clients, names, strict=True))
        return replace(dealt, clients=clients, structure=replace(structure, names=names))
