"""Who holds which records: the `federation` section of an experiment, and the builder of each kind."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from coterie.data.clients import Client, Federation, check_federation
from coterie.data.clusters import ClustersFederation, build_clusters
from coterie.data.dirichlet import DirichletFederation, build_dirichlet
from coterie.data.groups import GroupsFederation, build_groups
from coterie.data.natural import NaturalFederation, build_natural
from coterie.data.records import Dataset

__all__ = [
    "Client",
    "ClustersFederation",
    "DirichletFederation",
    "Federation",
    "FederationSettings",
    "GroupsFederation",
    "NaturalFederation",
    "build_federation",
    "check_federation",
]

FederationSettings = Annotated[
    ClustersFederation | DirichletFederation | NaturalFederation | GroupsFederation,
    Field(discriminator="kind"),
]


def build_federation(dataset: Dataset, settings: FederationSettings, seed: int) -> Federation:
    """Deal the dataset to clients and check what came out; the same seed gives the same federation."""
    match settings:
        case ClustersFederation():
            federation = build_clusters(dataset, settings, seed)
        case DirichletFederation():
            federation = build_dirichlet(dataset, settings, seed)
        case NaturalFederation():
            federation = build_natural(dataset, settings, seed)
        case GroupsFederation():
            federation = build_groups(dataset, settings, seed)
    check_federation(federation)
    return federation
