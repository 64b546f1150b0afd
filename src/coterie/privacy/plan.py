"""What will be released, to the last time: the plan that is calibrated, printed and enforced."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Self, TypeVar, cast

from dp_accounting import DpEvent

from coterie.privacy import events
from coterie.privacy.errors import PlanError
from coterie.privacy.joint_scores import JointScores
from coterie.privacy.mechanisms import Mechanism, NoisyScores
from coterie.privacy.plain import Json, Key, MalformedError, Plain, record
from coterie.privacy.ranges import ROUNDS
from coterie.privacy.units import Adjacency, PersonBounds, ThreatModel, Unit

_M = TypeVar("_M", bound=Mechanism)

POPULATION = "the population"
"""The subject of a plan that is the same for every client: one entry in the ledger stands for all of them."""
_HELD_OUT = " (held out)"


def held_out(client: str) -> str:
    """The subject for the records that a client holds out: never trained on, they score models.

    A record is in one part or the other by its position alone, so that what both parts spend does not add up.
    """
    return f"{client}{_HELD_OUT}"


@dataclass(frozen=True)
class PlannedRelease(Plain):
    """A mechanism, under a name of its own, and how often it may run at most."""

    called = "release"
    name: str
    mechanism: Mechanism
    times: int

    def __post_init__(self) -> None:
        ROUNDS.check(f"release {self.name}: times", self.times)

    @property
    def event(self) -> DpEvent:
        return events.repeated(self.mechanism.event, self.times)

    def to_json(self) -> Json:
        return {"name": self.name, "times": self.times, **self.mechanism.to_json()}

    @classmethod
    def read(cls, data: object) -> Self:
        rest = dict(data) if isinstance(data, Mapping) else {}
        named = {key: rest.pop(key) for key in ("name", "times") if key in rest}
        return cast(Self, record(cls).read({**named, "mechanism": rest}))


@dataclass(frozen=True)
class UnitPlan:
    """Everything that is ever computed from one subject's data."""

    subject: str
    releases: tuple[PlannedRelease, ...]

    def __post_init__(self) -> None:
        names = [release.name for release in self.releases]
        if len(set(names)) != len(names):
            raise PlanError(f"plan of {self.subject}: release names must differ, found {', '.join(names)}")

    @property
    def owner(self) -> str:
        """Whose records these are: the subject, or the client that holds them out."""
        return self.subject.removesuffix(_HELD_OUT)

    @property
    def is_held_out(self) -> bool:
        return self.subject.endswith(_HELD_OUT)

    @property
    def records(self) -> int | None:
        """How many records the releases are computed from, where the plan counts them."""
        field = "units" if self.is_held_out else "records"  # a held-out record is a unit that is scored
        counts = [getattr(release.mechanism, field, None) for release in self.releases]
        return max((count for count in counts if isinstance(count, int)), default=None)

    @property
    def event(self) -> DpEvent:
        """The cost of the whole plan."""
        return self.executed({release.name: release.times for release in self.releases})

    def executed(self, counts: Mapping[str, int]) -> DpEvent:
        """The cost of having run each named release so many times."""
        ran = ((self.release(name), times) for name, times in counts.items() if times)
        return events.composed([events.repeated(each.mechanism.event, times) for each, times in ran])

    def release(self, name: str) -> PlannedRelease:
        """The release of that name; a name that was not planned is an error."""
        for release in self.releases:
            if release.name == name:
                return release
        known = ", ".join(release.name for release in self.releases) or "nothing"
        raise PlanError(f"plan of {self.subject}: release {name!r} is not declared, declared are: {known}")

    def planned(self, kind: type[_M], name: str) -> _M:
        """The mechanism of that name, if it is one of this kind that an engine can execute."""
        found = self.release(name).mechanism
        if not isinstance(found, kind) or found.kind != kind.kind:
            raise PlanError(f"release '{name}' is planned as {found.name}: not {kind.kind}")
        return found

    def without(self, *names: str) -> Self:
        """The plan less some of its releases."""
        return replace(self, releases=tuple(r for r in self.releases if r.name not in names))


@dataclass(frozen=True)
class PrivacyPlan(Plain):
    """All mechanisms of an algorithm, for every unit, with what its guarantee will say.

    `persons` says how many records of a person count and at how many clients it may be, where that is the
    unit. A subject is then a client, as it is for records, and what its mechanisms count are its persons.
    """

    called = "plan"
    unit: Unit
    adjacency: Adjacency
    threat: ThreatModel
    units: tuple[UnitPlan, ...]
    caveats: tuple[str, ...] = ()
    persons: PersonBounds | None = None

    def __post_init__(self) -> None:
        if (self.unit is Unit.PERSON) is (self.persons is None):
            raise PlanError(
                f"plan: unit {self.unit} with {self.persons or 'no bounds of a person'}; a plan for persons, "
                "and no other, says how many records of one count"
            )
        subjects = [unit.subject for unit in self.units]
        if len(set(subjects)) != len(subjects):
            raise PlanError("plan: two units have the same subject")
        for unit in self.units:
            for release in unit.releases:
                if unit.is_held_out and not isinstance(release.mechanism, NoisyScores | JointScores):
                    raise PlanError(
                        f"plan of {unit.subject}: a name kept for held-out records, of which only scores "
                        f"are released; {release.name!r} is planned"
                    )
                if release.mechanism.adjacency is not self.adjacency:
                    raise PlanError(
                        f"plan of {unit.subject}: release {release.name!r} is built for "
                        f"{release.mechanism.adjacency}, the plan for {self.adjacency}"
                    )

    @cached_property
    def _by_subject(self) -> dict[str, UnitPlan]:
        return {unit.subject: unit for unit in self.units}

    def for_subject(self, subject: str) -> UnitPlan:
        """The plan of one subject."""
        if subject not in self._by_subject:
            raise PlanError(f"plan: no unit is called {subject!r}")
        return self._by_subject[subject]

    def subjects_of(self, members: Sequence[str]) -> tuple[str, ...]:
        """Whom a release on these members is charged to: each of them, or the population.

        Charging the population for a release on some of it costs nobody less than is spent.
        """
        return (POPULATION,) if POPULATION in self._by_subject else tuple(members)

    def planned(self, kind: type[_M], name: str, *members: str) -> _M:
        """The one mechanism that all of these members planned under this name, if it is of this kind."""
        found = {self.for_subject(each).planned(kind, name) for each in self.subjects_of(members)}
        if len(found) != 1:
            raise PlanError(f"plan: release {name!r} is planned differently by members of one cohort")
        return found.pop()

    def to_json(self) -> Json:
        """The plan as plain data; subjects with the same releases share one entry."""
        groups: dict[tuple[PlannedRelease, ...], list[str]] = {}
        for unit in self.units:
            groups.setdefault(unit.releases, []).append(unit.subject)
        alike = tuple(_PlannedAlike(tuple(subjects), releases) for releases, subjects in groups.items())
        order = tuple(unit.subject for unit in self.units)
        written = _WrittenPlan(
            self.unit, self.adjacency, self.threat, order, alike, self.caveats, self.persons
        )
        return cast(Json, record(_WrittenPlan).write(written))

    @classmethod
    def read(cls, data: object) -> Self:
        found = cast(_WrittenPlan, record(_WrittenPlan).read(data))
        releases = {subject: alike.releases for alike in found.plans for subject in alike.subjects}
        if not set(found.subjects) <= releases.keys():
            raise MalformedError("plans: a subject has none")
        units = tuple(UnitPlan(subject, releases[subject]) for subject in found.subjects)
        return cls(found.unit, found.adjacency, found.threat, units, found.caveats, found.persons)

    def digest(self) -> str:
        """A fingerprint of the plan that every process computes alike."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()

    def computed(self) -> str:
        """A fingerprint of what is computed under the plan, to which noise and coins are bound.

        A person of whom one record counts is a record in all but its name, and draws what a record would.
        """
        if self.persons is None or self.persons.records > 1:
            return self.digest()
        return replace(self, unit=Unit.RECORD, persons=None).digest()


@dataclass(frozen=True)
class _PlannedAlike:
    """Subjects with the same releases, as a file has them."""

    subjects: tuple[str, ...]
    releases: tuple[PlannedRelease, ...]


@dataclass(frozen=True)
class _WrittenPlan:
    """A plan as a file has it."""

    unit: Unit
    adjacency: Adjacency
    threat: ThreatModel
    subjects: tuple[str, ...]
    plans: tuple[_PlannedAlike, ...]
    caveats: tuple[str, ...]
    persons: Annotated[PersonBounds | None, Key(optional=True)] = None


def canonical_json(data: object) -> str:
    """One spelling for equal data: sorted keys, no spaces, shortest round-trip numbers."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
