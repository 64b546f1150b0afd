"""Parts of a plan that record-level algorithms share."""

from collections.abc import Callable, Sequence
from typing import Literal

from coterie.algorithms.protocol import PublicFacts
from coterie.algorithms.settings import PrivacySettings, Schedule
from coterie.errors import InputError
from coterie.privacy import (
    AccuracySelection,
    FullBatchSteps,
    Mode,
    Multiplier,
    NoiseRule,
    PlannedRelease,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    Unit,
    UnitPlan,
)
from coterie.privacy.threats import THREATS


def record_plan(
    facts: PublicFacts,
    privacy: PrivacySettings,
    releases_of: Callable[[str, int], Sequence[PlannedRelease]],
    caveats: tuple[str, ...] = (),
) -> PrivacyPlan:
    """A plan in which every client protects its own records: `releases_of` a client with so many records."""
    check_budgets(facts, privacy)
    units = tuple(
        UnitPlan(client, tuple(releases_of(client, facts.records[client]))) for client in facts.clients
    )
    return PrivacyPlan(
        unit=Unit.RECORD,
        adjacency=privacy.adjacency,
        threat=THREATS[Unit.RECORD],
        units=units,
        caveats=caveats,
    )


def check_budgets(facts: PublicFacts, privacy: PrivacySettings) -> None:
    """Refuse a budget for somebody who is not there."""
    unknown = set(privacy.budgets) - set(facts.clients)
    if unknown:
        raise InputError(
            f"privacy.budgets: no client is called '{min(unknown)}'; the clients are "
            f"{facts.clients[0]} to {facts.clients[-1]}"
        )


def training(schedule: Schedule, privacy: PrivacySettings, records: int, rounds: int) -> PlannedRelease:
    """DP-SGD over Poisson batches, released once a round, with the plan's free noise multiplier."""
    if schedule.batch > records:
        raise InputError(
            f"schedule.batch: {schedule.batch} is more than the {records} records of a client; "
            f"allowed: 1 to {records}"
        )
    steps = PoissonSteps(
        clip=privacy.clip,
        noise_multiplier=NoiseRule.SHARED,
        records=records,
        batch=schedule.batch,
        epochs=schedule.epochs,
        adjacency=privacy.adjacency,
    )
    return PlannedRelease("training", steps, rounds)


def clustering_round(
    schedule: Schedule,
    privacy: PrivacySettings,
    records: int,
    noise: Multiplier,
    batch: int | Literal["all"] = "all",
) -> PlannedRelease:
    """One round whose update is released to cluster clients by: full-batch steps, or Poisson batches."""
    if batch != "all":
        if batch > records:
            raise InputError(
                f"algorithm.first_round_batch: {batch} is more than the {records} records of a client; "
                f"allowed: all, or 1 to {records}"
            )
        small = PoissonSteps(
            clip=privacy.clip,
            noise_multiplier=noise,
            records=records,
            batch=batch,
            epochs=schedule.epochs,
            adjacency=privacy.adjacency,
        )
        return PlannedRelease("first round", small, 1)
    steps = FullBatchSteps(
        clip=privacy.clip,
        noise_multiplier=noise,
        records=records,
        epochs=schedule.epochs,
        adjacency=privacy.adjacency,
    )
    return PlannedRelease("first round", steps, 1)


def selections(privacy: PrivacySettings, client: str, share: float, times: int) -> list[PlannedRelease]:
    """Private selections, each with a share of the client's own epsilon; none if there is no time for one.

    In mode paper they are the published ones, by accuracy, with the noise that those need.
    """
    kind = AccuracySelection if privacy.mode is Mode.PAPER else PrivateSelection
    selection = kind(epsilon=share * privacy.epsilon_of(client), adjacency=privacy.adjacency)
    return [PlannedRelease("selection", selection, times)] if times else []


def check_clusters(clusters: int, clients: int, also: str = "") -> None:
    """Refuse more clusters than there are clients."""
    if clusters > clients:
        raise InputError(
            f"algorithm.clusters: {clusters} is more than the {clients} clients; "
            f"allowed: {also}2 to {clients}"
        )


def training_plan(
    facts: PublicFacts, schedule: Schedule, privacy: PrivacySettings, caveats: tuple[str, ...] = ()
) -> PrivacyPlan:
    """A plan of training alone, in every round."""
    return record_plan(
        facts,
        privacy,
        lambda client, records: [training(schedule, privacy, records, schedule.rounds)],
        caveats,
    )
