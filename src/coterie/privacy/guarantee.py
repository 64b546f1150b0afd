"""The one sentence that says what holds; the only place that prints an epsilon."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import dp_accounting as dp
from dp_accounting import DpEvent

from coterie.privacy import accounting, paper
from coterie.privacy.calibration import budget_of
from coterie.privacy.errors import PlanError, PrivacyInputError
from coterie.privacy.events import BridgedSumDpEvent, ShuffledEpochDpEvent, event_from_json, event_to_json
from coterie.privacy.plan import PrivacyPlan, UnitPlan
from coterie.privacy.pld import GridError
from coterie.privacy.units import (
    Adjacency,
    Budget,
    Json,
    Mode,
    ThreatModel,
    Unit,
    number_from_json,
    number_to_json,
    short_number,
)


@dataclass(frozen=True)
class Guarantee:
    """What holds for whom, against whom, by which proof, and what it does not cover."""

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
    caveats: tuple[str, ...] = ()
    published_epsilon: float | None = None
    """What the publication's arithmetic claims; only in paper mode, and not proven."""

    def __str__(self) -> str:
        if math.isinf(self.epsilon):
            promise = "no privacy (eps=inf)"
        else:
            promise = f"(eps={round_up(self.epsilon)}, delta={short_number(self.delta)})-DP"
        adjacency = f"adjacency={self.adjacency}"
        if self.adjacency is not Adjacency.REPLACE_ONE:
            adjacency += f" (replace-one: {round_up(self.epsilon_replace_one)})"
        if self.published_epsilon is not None:
            claimed = Adjacency.REPLACE_ONE if self.unit is Unit.RECORD else Adjacency.ADD_REMOVE
            published = f"published eps={round_up(self.published_epsilon)} ({claimed} claimed)"
            promise = f"{published} -> sound: {promise}"
        parts = [
            promise,
            f"unit={self.unit} of {self.subject}",
            adjacency,
            f"vs {self.threat}",
            f"trusting {self.threat.trusted}",
            f"{self.accountant}, {describe_event(self.event)}",
            str(self.mode),
            *self.caveats,
        ]
        return " | ".join(parts)

    def to_json(self) -> Json:
        return {
            "unit": self.unit.value,
            "subject": self.subject,
            "adjacency": self.adjacency.value,
            "threat": self.threat.to_json(),
            "epsilon": number_to_json(self.epsilon),
            "delta": self.delta,
            "epsilon_replace_one": number_to_json(self.epsilon_replace_one),
            "accountant": self.accountant,
            "mode": self.mode.value,
            "event": event_to_json(self.event),
            "caveats": list(self.caveats),
            "published_epsilon": None
            if self.published_epsilon is None
            else number_to_json(self.published_epsilon),
            "sentence": str(self),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        try:
            threat, event, caveats = data["threat"], data["event"], data["caveats"]
            published = data["published_epsilon"]
            assert isinstance(threat, Mapping)
            assert isinstance(event, Mapping)
            assert isinstance(caveats, list)
            return cls(
                unit=Unit(str(data["unit"])),
                subject=str(data["subject"]),
                adjacency=Adjacency(str(data["adjacency"])),
                threat=ThreatModel.from_json(threat),
                epsilon=number_from_json(data["epsilon"]),
                delta=number_from_json(data["delta"]),
                epsilon_replace_one=number_from_json(data["epsilon_replace_one"]),
                accountant=str(data["accountant"]),
                mode=Mode(str(data["mode"])),
                event=event_from_json(event),
                caveats=tuple(str(caveat) for caveat in caveats),
                published_epsilon=None if published is None else number_from_json(published),
            )
        except (KeyError, AssertionError, TypeError, ValueError) as mistake:
            raise PlanError(f"guarantee: the data does not describe one ({mistake!r})") from None


def guarantee(
    plan: PrivacyPlan,
    *,
    delta: float | None = None,
    budget: Budget | Mapping[str, Budget] | None = None,
    accountant: str = "rdp",
    mode: Mode = Mode.SOUND,
    caveats: Sequence[str] = (),
) -> Guarantee:
    """What the whole plan promises to every unit: the largest epsilon and the largest delta of all.

    Args:
        plan: a calibrated plan.
        delta: the delta of every unit; or
        budget: budgets whose deltas count.
        accountant: the one that proves the plan.
        mode: the label of the sentence.
        caveats: what the run adds to the plan's own caveats.
    """
    if (delta is None) == (budget is None):
        raise PrivacyInputError("guarantee: give either delta or budget")
    if not plan.units:
        raise PlanError("guarantee: the plan has no units")
    method = accounting.accountant_named(accountant)
    known: dict[tuple[object, float], tuple[float, float]] = {}

    def costs(unit: UnitPlan) -> tuple[float, float, float]:
        own = budget_of(budget, unit.subject).delta if budget is not None else delta
        assert own is not None
        key = unit.releases, own
        if key not in known:
            event = unit.event
            spent = method.epsilon(event, delta=own, adjacency=plan.adjacency)
            try:
                replaced = method.epsilon(event, delta=own, adjacency=Adjacency.REPLACE_ONE)
            except GridError:
                replaced = math.inf  # a second line that cannot be proven takes nothing from the first
            known[key] = spent, replaced
        return *known[key], own

    all_costs = [costs(unit) for unit in plan.units]
    worst = max(range(len(all_costs)), key=lambda index: all_costs[index][0])
    cross_check = ""
    if accountant != "rdp":
        event, own = plan.units[worst].event, all_costs[worst][2]
        cross_check = f" (RDP: {round_up(accounting.epsilon_of(event, own, 'rdp', plan.adjacency))})"
    published = None
    if mode is Mode.PAPER:
        published = paper.epsilon(plan.units[worst], all_costs[worst][2])
        caveats = (*caveats, paper.caveat(plan.units[worst]))
    return Guarantee(
        unit=plan.unit,
        subject=_subject_text(plan, worst),
        adjacency=plan.adjacency,
        threat=plan.threat,
        epsilon=all_costs[worst][0],
        delta=max(cost[2] for cost in all_costs),
        epsilon_replace_one=max(cost[1] for cost in all_costs),
        accountant=method.text + cross_check,
        mode=mode,
        event=plan.units[worst].event,
        caveats=tuple(dict.fromkeys((*plan.caveats, *caveats))),
        published_epsilon=published,
    )


def _subject_text(plan: PrivacyPlan, worst: int) -> str:
    if len(plan.units) == 1:
        return plan.units[0].subject
    everyone = f"any of {len(plan.units)} {'workers' if plan.unit is Unit.WORKER else 'clients'}"
    if len({unit.releases for unit in plan.units}) == 1:
        return everyone
    return f"{everyone} (most: {plan.units[worst].subject})"


def describe_event(event: DpEvent) -> str:
    """How many releases of each kind, and with how much noise."""
    counts: list[int] = []
    noises: list[float] = []
    _walk(event, 1, counts, noises)
    if not counts:
        return "no release"
    text = f"{'+'.join(str(count) for count in counts)} events"
    if noises:
        text += f", z={'/'.join(f'{noise:.4f}' for noise in dict.fromkeys(noises))}"
    return text


def _walk(event: DpEvent, times: int, counts: list[int], noises: list[float]) -> None:
    if isinstance(event, dp.SelfComposedDpEvent):
        _walk(event.event, times * event.count, counts, noises)
    elif isinstance(event, dp.ComposedDpEvent):
        for part in event.events:
            _walk(part, times, counts, noises)
    elif not isinstance(event, dp.NoOpDpEvent):
        counts.append(times)
        noises.extend(_multipliers(event))


def _multipliers(event: DpEvent) -> list[float]:
    if isinstance(event, dp.GaussianDpEvent | ShuffledEpochDpEvent | BridgedSumDpEvent):
        return [event.noise_multiplier]
    if isinstance(event, dp.PoissonSampledDpEvent | dp.SampledWithoutReplacementDpEvent):
        return _multipliers(event.event)
    if isinstance(event, dp.ComposedDpEvent):
        return [noise for part in event.events for noise in _multipliers(part)]
    return []


def round_up(epsilon: float) -> str:
    """Two decimals, or three digits when it is small; never less than the value."""
    if math.isinf(epsilon):
        return "inf"
    if epsilon == 0:
        return "0"
    digits = 2 if epsilon >= 1 else 2 - math.floor(math.log10(epsilon))
    scale = 10.0**digits
    text = f"{epsilon:.{digits}f}"
    return text if float(text) >= epsilon else f"{math.ceil(epsilon * scale) / scale:.{digits}f}"
