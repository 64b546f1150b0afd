"""Who holds which records: the `federation` section of an experiment, in one of its kinds."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from coterie.data.clients import Federation, check_federation
from coterie.data.clusters import ClustersFederation
from coterie.data.dirichlet import DirichletFederation
from coterie.data.groups import GroupsFederation
from coterie.data.natural import NaturalFederation
from coterie.data.preprocessing import Preprocessing
from coterie.data.records import Dataset

FederationSettings = Annotated[
    ClustersFederation | DirichletFederation | NaturalFederation | GroupsFederation,
    Field(discriminator="kind"),
]


def build_federation(dataset: Dataset, settings: FederationSettings, seed: int) -> Federation:
    """Deal the dataset to clients and check what came out; the same seed gives the same federation."""
    federation = settings.build(dataset, seed)
    holds_out = dataset.test is not None or getattr(settings, "test_share", None) != 0
    check_federation(federation, held_out=holds_out)
    described = dataset.preprocessing or Preprocessing.as_it_is(dataset.task)
    return replace(federation, preprocessing=described, caveats=dataset.caveats)
