"""What holds, as data and in words; the only place that states an epsilon.

A `Guarantee` has three forms: a line, a paragraph (its text) and a table with one row for each kind of
release. `wording` writes the first two.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from dp_accounting import DpEvent

from coterie.privacy import accounting, paper, rdp, wording
from coterie.privacy.calibration import budget_of
from coterie.privacy.errors import PlanError, PrivacyInputError
from coterie.privacy.events import event_from_json, event_to_json
from coterie.privacy.meaning import Meaning, from_bound, sharpest, weakest
from coterie.privacy.plan import PrivacyPlan, UnitPlan
from coterie.privacy.pld import GridError
from coterie.privacy.units import (
    Adjacency,
    Budget,
    Custody,
    Json,
    Mode,
    ThreatModel,
    Unit,
    number_from_json,
    number_to_json,
    round_up,
)


@dataclass(frozen=True)
class ReleaseCost:
    """One kind of release: what it lets out, how often, behind how much noise, and its epsilon alone."""

    name: str
    what: str
    times: int
    noise: str
    epsilon: float
    held_out: bool = False
    """Whether it is computed from the records that a client holds out."""

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "what": self.what,
            "times": self.times,
            "noise": self.noise,
            "epsilon_alone": number_to_json(self.epsilon),
            "held_out": self.held_out,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        return cls(
            name=str(data["name"]),
            what=str(data["what"]),
            times=int(str(data["times"])),
            noise=str(data["noise"]),
            epsilon=number_from_json(data["epsilon_alone"]),
            held_out=data["held_out"] is True,
        )


@dataclass(frozen=True)
class ClientCost:
    """What the whole plan costs one client, worker, or all of a population."""

    name: str
    epsilon: float | None
    """None for a worker whom nobody observes."""
    delta: float
    records: int | None = None
    """How many records its releases are computed from, where the plan counts them."""

    def to_json(self) -> Json:
        return {
            "epsilon": None if self.epsilon is None else number_to_json(self.epsilon),
            "delta": self.delta,
            "records": self.records,
        }

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, object]) -> Self:
        epsilon, records = data["epsilon"], data["records"]
        return cls(
            name,
            None if epsilon is None else number_from_json(epsilon),
            number_from_json(data["delta"]),
            None if records is None else int(str(records)),
        )


@dataclass(frozen=True)
class Guarantee:
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
    """

    unit: Unit
    subject: str
    adjacency: Adjacency
    threat: ThreatModel
    epsilon: float
    delta: float
    epsilon_replace_one: float
    accountant: str
    mode: Mode
    event: DpEvent
    meaning: Meaning
    releases: tuple[ReleaseCost, ...]
    per_client: tuple[ClientCost, ...]
    held_by: Custody = Custody.PLAN
    most_exposed: str | None = None
    caveats: tuple[str, ...] = ()
    published_epsilon: float | None = None

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
        return {
            "unit": self.unit.value,
            "subject": self.subject,
            "adjacency": self.adjacency.value,
            "threat": self.threat.to_json(),
            "held_by": self.held_by.value,
            "epsilon": number_to_json(self.epsilon),
            "delta": self.delta,
            "epsilon_replace_one": number_to_json(self.epsilon_replace_one),
            "accountant": self.accountant,
            "mode": self.mode.value,
            "event": event_to_json(self.event),
            "meaning": self.meaning.to_json(),
            "releases": [release.to_json() for release in self.releases],
            "per_client": self.per_client_json(),
            "most_exposed": self.most_exposed,
            "caveats": list(self.caveats),
            "published_epsilon": None
            if self.published_epsilon is None
            else number_to_json(self.published_epsilon),
            "line": self.line,
            "text": self.text,
        }

    def per_client_json(self) -> Json:
        """Epsilon, delta and records of every client by name."""
        return {cost.name: cost.to_json() for cost in self.per_client}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        try:
            threat, event, caveats = data["threat"], data["event"], data["caveats"]
            releases, clients = data["releases"], data["per_client"]
            published, most = data["published_epsilon"], data["most_exposed"]
            assert isinstance(threat, Mapping)
            assert isinstance(event, Mapping)
            assert isinstance(caveats, list)
            assert isinstance(releases, list)
            assert isinstance(clients, Mapping)
            return cls(
                unit=Unit(str(data["unit"])),
                subject=str(data["subject"]),
                adjacency=Adjacency(str(data["adjacency"])),
                threat=ThreatModel.from_json(threat),
                held_by=Custody(str(data["held_by"])),
                epsilon=number_from_json(data["epsilon"]),
                delta=number_from_json(data["delta"]),
                epsilon_replace_one=number_from_json(data["epsilon_replace_one"]),
                accountant=str(data["accountant"]),
                mode=Mode(str(data["mode"])),
                event=event_from_json(event),
                meaning=Meaning.from_json(data["meaning"]),
                releases=tuple(ReleaseCost.from_json(release) for release in releases),
                per_client=tuple(ClientCost.from_json(str(name), cost) for name, cost in clients.items()),
                most_exposed=None if most is None else str(most),
                caveats=tuple(str(caveat) for caveat in caveats),
                published_epsilon=None if published is None else number_from_json(published),
            )
        except (KeyError, AssertionError, TypeError, ValueError) as mistake:
            raise PlanError(f"guarantee: the data does not describe one ({mistake!r})") from None


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
    if (delta is None) == (budget is None):
        raise PrivacyInputError("guarantee: give either delta or budget")
    if not plan.units:
        raise PlanError("guarantee: the plan has no units")
    method = accounting.accountant_named(accountant)
    known: dict[tuple[object, float], _Cost] = {}

    def cost_of(unit: UnitPlan) -> _Cost:
        own = budget_of(budget, unit.subject).delta if budget is not None else delta
        assert own is not None
        key = unit.releases, own
        if key not in known:
            event = unit.event
            spent = method.epsilon(event, delta=own, adjacency=plan.adjacency)
            meaning = sharpest(method.meaning(event, plan.adjacency), from_bound(spent, own))
            try:
                replaced = method.epsilon(event, delta=own, adjacency=Adjacency.REPLACE_ONE)
            except GridError:
                replaced = math.inf  # a second line that cannot be proven takes nothing from the first
            known[key] = _Cost(spent, replaced, own, meaning)
        return known[key]

    costs = [cost_of(unit) for unit in plan.units]
    worst = max(range(len(costs)), key=lambda index: costs[index].epsilon)
    unit, most = plan.units[worst], costs[worst]
    cross_check = ""
    if accountant != "rdp":
        by_rdp = accounting.epsilon_of(unit.event, most.delta, "rdp", plan.adjacency)
        cross_check = f" (RDP: {round_up(by_rdp)})"
    published = None
    if mode is Mode.PAPER:
        published = paper.epsilon(unit, most.delta)
        caveats = (*caveats, paper.caveat(unit))
    per_client = _per_client(plan, costs)
    return Guarantee(
        unit=plan.unit,
        subject=_subject(plan, per_client),
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
        releases=_releases(plan, unit.owner, costs),
        per_client=per_client,
        most_exposed=unit.owner if _differ(plan) else None,
        caveats=tuple(dict.fromkeys((*plan.caveats, *caveats))),
        published_epsilon=published,
    )


def _per_client(plan: PrivacyPlan, costs: Sequence[_Cost]) -> tuple[ClientCost, ...]:
    """Of each owner the larger of what its parts cost, and the records of both."""
    rows: dict[str, ClientCost] = {}
    for unit, cost in zip(plan.units, costs, strict=True):
        before = rows.get(unit.owner)
        if before is None:
            rows[unit.owner] = ClientCost(unit.owner, cost.epsilon, cost.delta, unit.records)
            continue
        assert before.epsilon is not None
        counted = [records for records in (before.records, unit.records) if records is not None]
        rows[unit.owner] = ClientCost(
            unit.owner,
            max(before.epsilon, cost.epsilon),
            max(before.delta, cost.delta),
            sum(counted) if counted else None,
        )
    return tuple(rows.values())


def _subject(plan: PrivacyPlan, per_client: Sequence[ClientCost]) -> str:
    if len(per_client) == 1:
        return per_client[0].name
    return f"any of {len(per_client)} {'workers' if plan.unit is Unit.WORKER else 'clients'}"


def _differ(plan: PrivacyPlan) -> bool:
    """Whether some clients release something else than others."""
    parts: dict[str, set[object]] = {}
    for unit in plan.units:
        parts.setdefault(unit.owner, set()).add((unit.is_held_out, unit.releases))
    return len({frozenset(own) for own in parts.values()}) > 1


def _releases(plan: PrivacyPlan, owner: str, costs: Sequence[_Cost]) -> tuple[ReleaseCost, ...]:
    """The rows of one client, each by RDP; what is composed never costs less than a part of it."""
    rows = []
    for unit, cost in zip(plan.units, costs, strict=True):
        if unit.owner != owner:
            continue
        for release in unit.releases:
            alone = rdp.epsilon(release.event, delta=cost.delta, adjacency=plan.adjacency)
            mechanism = release.mechanism
            rows.append(
                ReleaseCost(
                    release.name,
                    mechanism.summary,
                    release.times,
                    mechanism.noise_summary,
                    min(alone, cost.epsilon),
                    unit.is_held_out,
                )
            )
    return tuple(rows)
