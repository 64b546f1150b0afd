"""What holds, as data and in words; the only place that states an epsilon.

A `Guarantee` has three forms: a line, a paragraph (its text) and a table with one row for each kind of
release. `wording` writes the first two.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Self, cast

import numpy as np
from dp_accounting import DpEvent

from coterie.privacy import accounting, paper, wording
from coterie.privacy.calibration import budget_of
from coterie.privacy.divergences import ORDERS
from coterie.privacy.errors import PlanError, PrivacyInputError
from coterie.privacy.meaning import Meaning, from_bound, sharpest, weakest
from coterie.privacy.plain import Json, Key, MalformedError, Plain, codec
from coterie.privacy.plan import PlannedRelease, PrivacyPlan, UnitPlan
from coterie.privacy.pld import GridError
from coterie.privacy.rdp import RdpAccountant, epsilon_from_rdp
from coterie.privacy.units import (
    Adjacency,
    Budget,
    Custody,
    Mode,
    PersonBounds,
    ThreatModel,
    Unit,
    round_up,
)


@dataclass(frozen=True)
class ReleaseCost(Plain):
    """One kind of release: what it lets out, how often, behind how much noise, and its epsilon alone.

    `held_out` says whether it is computed from the records that a client holds out.
    """

    called = "release"
    name: str
    what: str
    times: int
    noise: str
    epsilon: Annotated[float, Key("epsilon_alone")]
    held_out: bool = False


@dataclass(frozen=True)
class ClientCost:
    """What the whole plan costs one client, worker, or all of a population.

    Args:
        epsilon: None for a worker whom nobody observes.
        records: how many its releases are computed from, where the plan counts them.
    """

    name: str
    epsilon: float | None
    delta: float
    records: int | None = None


PerClient = Annotated[tuple[ClientCost, ...], Key(by="name")]
"""Written as an object: what each costs, by name."""


@dataclass(frozen=True, kw_only=True)
class Guarantee(Plain):
    """What holds for whom, against whom, by which proof, and what it does not cover.

    Args:
        subject: whose unit is meant: a client, or all of them.
        epsilon: the largest of all units, with
        delta: the largest of all of theirs; `per_client` has each one's own.
        held_by: who held the records and the noise key.
        meaning: what an attacker gains at best.
        releases: the table: one row for each kind of release of the unit that spends most.
        most_exposed: the unit that spends most, where they differ.
        published_epsilon: what the publication's arithmetic claims; only in paper mode, and not proven.
        persons: how many records of a person count, and at how many clients it may be, where the unit is one.
        epsilon_across_clients: what all clients together cost a person who is at as many as that allows.
    """

    called = "guarantee"
    unit: Unit
    subject: str
    adjacency: Adjacency
    threat: ThreatModel
    held_by: Custody = Custody.PLAN
    epsilon: float
    delta: float
    epsilon_replace_one: float
    accountant: str
    mode: Mode
    event: DpEvent
    meaning: Meaning
    releases: tuple[ReleaseCost, ...]
    per_client: PerClient
    most_exposed: str | None = None
    caveats: tuple[str, ...] = ()
    published_epsilon: float | None = None
    persons: Annotated[PersonBounds | None, Key(optional=True)] = None
    epsilon_across_clients: Annotated[float | None, Key(optional=True)] = None

    @property
    def protected(self) -> str:
        """Who or what is protected: one record of any of 21 clients."""
        return wording.protected(self.unit, self.subject)

    @property
    def line(self) -> str:
        """For terminals and tables."""
        return wording.line(self)

    @property
    def text(self) -> str:
        """In whole sentences."""
        return wording.paragraph(self)

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> Json:
        return {**super().to_json(), "line": self.line, "text": self.text}

    def per_client_json(self) -> Json:
        """Epsilon, delta and records of every client by name."""
        return cast(Json, codec(PerClient).write(self.per_client))

    @classmethod
    def read(cls, data: object) -> Self:
        if isinstance(data, Mapping):  # the words follow from the figures
            data = {key: value for key, value in data.items() if key not in ("line", "text")}
        found = super().read(data)
        for name, figure in found._figures():
            if figure is not None and not figure >= 0:
                raise MalformedError(f"{name}: {figure}; allowed: 0 or more")
        return found

    def _figures(self) -> Iterator[tuple[str, float | None]]:
        """Every epsilon and delta by its name."""
        for name in (
            "epsilon",
            "delta",
            "epsilon_replace_one",
            "published_epsilon",
            "epsilon_across_clients",
        ):
            yield name, getattr(self, name)
        for release in self.releases:
            yield f"releases: {release.name}: epsilon_alone", release.epsilon
        for row in self.per_client:
            yield f"per_client: {row.name}: epsilon", row.epsilon
            yield f"per_client: {row.name}: delta", row.delta


@dataclass(frozen=True)
class _Cost:
    epsilon: float
    replaced: float
    delta: float
    meaning: Meaning


def guarantee(
    plan: PrivacyPlan,
    *,
    delta: float | None = None,
    budget: Budget | Mapping[str, Budget] | None = None,
    accountant: str = "rdp",
    mode: Mode = Mode.SOUND,
    caveats: Sequence[str] = (),
    held_by: Custody = Custody.PLAN,
) -> Guarantee:
    """What the whole plan promises to every unit: the largest epsilon and the largest delta of all.

    A record is in one part of its client's data or in the other, trained on or held out: of a client, too,
    the larger of both counts.

    Args:
        plan: a calibrated plan.
        delta: the delta of every unit; or
        budget: budgets whose deltas count.
        accountant: the one that proves the plan.
        mode: whether the noise follows a proof or a publication.
        caveats: what the run adds to the plan's own caveats.
        held_by: who holds the records and the noise key.
    """
    if delta is not None and budget is None:
        budget = Budget(math.inf, delta)
    elif budget is None or delta is not None:
        raise PrivacyInputError("guarantee: give either delta or budget")
    if not plan.units:
        raise PlanError("guarantee: the plan has no units")
    method = accounting.accountant_named(accountant)

    @cache
    def cost_of(releases: tuple[PlannedRelease, ...], delta: float) -> _Cost:
        event = UnitPlan("alike", releases).event
        account = method(event, plan.adjacency)
        spent = account.epsilon(delta)
        try:
            replaced = method(event, Adjacency.REPLACE_ONE).epsilon(delta)
        except GridError:
            replaced = math.inf  # a second line that cannot be proven takes nothing from the first
        return _Cost(spent, replaced, delta, sharpest(account.meaning(), from_bound(spent, delta)))

    costs = [cost_of(unit.releases, budget_of(budget, unit.subject).delta) for unit in plan.units]
    owned: dict[str, list[tuple[UnitPlan, _Cost]]] = {}
    for unit, cost in zip(plan.units, costs, strict=True):
        owned.setdefault(unit.owner, []).append((unit, cost))
    unit, most = max(zip(plan.units, costs, strict=True), key=lambda pair: pair[1].epsilon)
    kinds = {frozenset((part.is_held_out, part.releases) for part, _ in own) for own in owned.values()}
    cross_check = ""
    if accountant != "rdp":
        by_rdp = accounting.epsilon_of(unit.event, most.delta, "rdp", plan.adjacency)
        cross_check = f" (RDP: {round_up(by_rdp)})"
    published = None
    if mode is Mode.PAPER:
        published = paper.epsilon(unit, most.delta)
        caveats = (*caveats, paper.caveat(unit))
    several = f"any of {len(owned)} {'workers' if plan.unit is Unit.WORKER else 'clients'}"
    return Guarantee(
        unit=plan.unit,
        subject=several if len(owned) > 1 else unit.owner,
        adjacency=plan.adjacency,
        threat=plan.threat,
        held_by=held_by,
        epsilon=most.epsilon,
        delta=max(cost.delta for cost in costs),
        epsilon_replace_one=max(cost.replaced for cost in costs),
        accountant=method.text + cross_check,
        mode=mode,
        event=unit.event,
        meaning=weakest(*(cost.meaning for cost in costs)),
        releases=_releases(owned[unit.owner], plan),
        per_client=tuple(
            ClientCost(
                owner,
                max(cost.epsilon for _, cost in own),
                max(cost.delta for _, cost in own),
                sum(part.records or 0 for part, _ in own) or None,
            )
            for owner, own in owned.items()
        ),
        most_exposed=unit.owner if len(kinds) > 1 else None,
        caveats=tuple(dict.fromkeys((*plan.caveats, *caveats))),
        published_epsilon=published,
        persons=plan.persons,
        epsilon_across_clients=_across_clients(plan, list(owned.values())),
    )


def _across_clients(plan: PrivacyPlan, owned: Sequence[Sequence[tuple[UnitPlan, _Cost]]]) -> float | None:
    """Epsilon of a person who is at as many clients as the plan allows; None where that is one.

    At each client its records are in one part, trained on or held out, and what different clients release
    about it composes. Nobody knows which clients those are: at every order the largest divergences count, so
    many of them. Their sum bounds that of any choice of clients.
    """
    if plan.persons is None or plan.persons.clients == 1:
        return None
    curves = {
        unit.releases: RdpAccountant(unit.event, plan.adjacency).divergences
        for own in owned
        for unit, _ in own
    }
    each = np.array([np.max([curves[unit.releases] for unit, _ in own], axis=0) for own in owned])
    each = np.where(np.isnan(each), np.inf, each)  # what is no number proves nothing
    largest = np.sort(each, axis=0)[-plan.persons.clients :]
    delta = max(cost.delta for own in owned for _, cost in own)
    alone = max(cost.epsilon for own in owned for _, cost in own)
    return max(alone, epsilon_from_rdp(ORDERS, largest.sum(axis=0), delta))


def _releases(own: Sequence[tuple[UnitPlan, _Cost]], plan: PrivacyPlan) -> tuple[ReleaseCost, ...]:
    """The rows of one client, each by RDP; what is composed never costs less than a part of it."""
    return tuple(
        ReleaseCost(
            release.name,
            release.mechanism.summary(plan.unit),
            release.times,
            release.mechanism.noise_summary,
            min(accounting.epsilon_of(release.event, cost.delta, "rdp", plan.adjacency), cost.epsilon),
            unit.is_held_out,
        )
        for unit, cost in own
        for release in unit.releases
    )
