"""Who holds which records: the `federation` section of an experiment, in one of its kinds."""

from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Discriminator, Tag

from coterie.data.clients import Federation, check_federation
from coterie.data.clusters import ClustersFederation
from coterie.data.dirichlet import DirichletFederation
from coterie.data.groups import GroupsFederation
from coterie.data.natural import NaturalFederation
from coterie.data.own import OwnFederation
from coterie.data.preprocessing import Preprocessing
from coterie.data.records import Dataset
from coterie.errors import DataError, InputError
from coterie.privacy import PersonBounds
from coterie.settings import tag_of

_KINDS = ("clusters", "dirichlet", "natural", "groups")
OwnFederation.ours = _KINDS

FederationSettings = Annotated[
    Annotated[ClustersFederation, Tag("clusters")]
    | Annotated[DirichletFederation, Tag("dirichlet")]
    | Annotated[NaturalFederation, Tag("natural")]
    | Annotated[GroupsFederation, Tag("groups")]
    | Annotated[OwnFederation, Tag("own")],
    Discriminator(lambda section: tag if (tag := tag_of(section, "kind", "clusters")) in _KINDS else "own"),
]


def build_federation(
    dataset: Dataset, settings: FederationSettings, seed: int, persons: PersonBounds | None = None
) -> Federation:
    """Deal the dataset to clients and check what came out; the same seed gives the same federation.

    Args:
        persons: how many records of a person count, where persons are to be kept whole.
    """
    share = getattr(settings, "test_share", None)
    if dataset.test is not None and share not in (None, type(settings).model_fields["test_share"].default):
        raise InputError(
            f"federation.test_share: {share} has no effect here; {dataset.name} has test records of its own"
        )
    if persons is None:
        federation = settings.build(dataset, seed)
    elif isinstance(settings, NaturalFederation):
        federation = settings.build(dataset, seed, persons)
    else:
        raise InputError(
            f"federation.kind: {settings.kind} deals single records, and those of one person to different "
            "clients; allowed with privacy.unit person: natural"
        )
    holds_out = dataset.test is not None or getattr(settings, "test_share", None) != 0
    try:
        check_federation(federation, held_out=holds_out)
    except DataError as problem:
        if not isinstance(settings, OwnFederation):
            raise
        raise DataError(f"{settings.plugin.key}: {settings.kind}: {problem}") from None
    described = dataset.preprocessing or Preprocessing.as_it_is(dataset.task)
    parts = [dataset.train] if dataset.test is None else [dataset.train, dataset.test]
    known = [part.identity for part in parts if part.identity is not None]
    everyone = np.concatenate(known) if len(known) == len(parts) else None
    return replace(federation, preprocessing=described, caveats=dataset.caveats, everyone=everyone)
