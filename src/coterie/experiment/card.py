"""The card of a run: everything that a privacy claim must state, by name, from material that verifies.

Every figure follows from the run's plan, ledger and register and is computed here; `coterie verify` computes
it again for a card that lies in the folder. What nobody but the operator knows is read from `card.yaml`, and
stays open until it is there.
"""

import math
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from coterie import __version__
from coterie.errors import InputError, LedgerError
from coterie.experiment.card_answers import CLAIMS, OperatorAnswers
from coterie.experiment.recorded import RecordedRun, alike
from coterie.experiment.registered import History, history_of
from coterie.experiment.result import RunResult
from coterie.files import json_text, read_json, write_text
from coterie.groups import Observer
from coterie.privacy import Adjacency, Custody, Guarantee, PrivacyPlan, Unit
from coterie.privacy.accounting import Accountant, accountant_named
from coterie.privacy.divergences import INTEGER_ORDERS, Floats
from coterie.privacy.errors import PlanError, PrivacyInputError
from coterie.privacy.gaussian_bound import LEAST, gaussian_mu
from coterie.privacy.rdp import divergences_of
from coterie.privacy.units import number_to_json

FORMAT = 1
CARD, AUDIT = "card.json", "audit.json"
AT = 1e-5
DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
"""Deltas of the profile."""
ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
"""Orders of the divergences that are told."""
FIELDS = (
    *("epsilon", "delta", "epsilon_at_1e-5", "epsilon_replace_one", "meaning", "variant", "profile", "mu"),
    *("unit", "records_per_person", "neighbours", "unprotected", "observer", "trusted", "collusion"),
    *("not_private", "history", "data", "tuning", "mechanisms", "library", "version", "commit"),
    *("side_channels", "utility", "worst_client", "audit", "per_client", "justification", "contact"),
)
"""What a claim must state, in the order in which it is shown."""
OF_THIS_MACHINE = ("library", "commit", "run")
"""Fields about where the card was written: versions of programs, and what the folder was called there."""
_SIDE_CHANNELS = (
    "floating point: norms are added up in double precision and clipped with a margin, and noise in double "
    "precision is put together from several points so that its values are dense; it is not discrete noise, "
    "and no proof covers the last bits",
    "timing: not defended",
    "crashes: a run that is killed repeats the same noise on the same input, and is charged once; that it "
    "crashed, and who was online, is not hidden",
)


class PrivacyClaim(ABC):
    """What a privacy claim must state, of a run or of a site's part in one."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """The folder that it is about, and lies in."""

    @property
    def name(self) -> str:
        """What it is about is called."""
        return self.path.resolve().name

    @property
    @abstractmethod
    def promise(self) -> Guarantee: ...

    @property
    @abstractmethod
    def plan(self) -> PrivacyPlan: ...

    @property
    @abstractmethod
    def accountant(self) -> str: ...

    @property
    @abstractmethod
    def watched(self) -> Observer | None:
        """Who sees what when, where workers see the models of their own groups alone."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Of the program that ran."""

    @property
    @abstractmethod
    def history(self) -> History | None:
        """What the same records have paid in all experiments; None where no register counts them."""

    @cached_property
    def answers(self) -> OperatorAnswers:
        return OperatorAnswers.read(self.path)

    @abstractmethod
    def unprotected(self) -> list[str]:
        """What is public, beside what was released."""

    @abstractmethod
    def data(self) -> dict[str, Any]:
        """What the records are."""

    @abstractmethod
    def scores(self) -> dict[str, Any]:
        """How well it serves whom, as far as that is known."""

    @abstractmethod
    def no_history(self) -> str:
        """Why nobody knows what the same records have paid elsewhere."""

    def missing(self) -> list[str]:
        """Questions that the operator has not answered."""
        return self.answers.missing(self.promise.unit)

    @cached_property
    def content(self) -> dict[str, Any]:
        """All fields by name, with what is still open."""
        fields = self._figures() | self._words() | self._found()
        ordered = {name: fields[name] for name in FIELDS}
        missing = self.missing()
        return {
            "card": FORMAT,
            "run": self.name,
            "guarantee": self.promise.line,
            "guarantee_text": self.promise.text,
            **ordered,
            "operator": {key: self.answers.get(key) for key in self.answers.asked(self.promise.unit)},
            "complete": not set(missing) & set(CLAIMS),
            "missing": missing,
        }

    # --- figures ------------------------------------------------------------------------------------

    @cached_property
    def _accounts(self) -> list[Accountant]:
        """What the plan costs each kind of unit, by the run's accountant."""
        method, plan = accountant_named(self.accountant), self.plan
        kinds = {unit.releases: unit for unit in plan.units}
        return [method(unit.event, plan.adjacency) for unit in kinds.values()]

    def epsilon_at(self, delta: float) -> float:
        """Epsilon of the unit that spends most, at another delta; never less than what is proven."""
        if self.watched is not None:
            return self.watched.guarantee(delta=delta, adjacency=self.plan.adjacency).epsilon
        return max(account.epsilon(delta) for account in self._accounts)

    def _deltas(self, epsilons: Floats) -> Floats:
        found: Floats = np.max([account.deltas(epsilons) for account in self._accounts], axis=0)
        return found

    def _figures(self) -> dict[str, Any]:
        promise = self.promise
        return {
            "epsilon": number_to_json(promise.epsilon),
            "delta": promise.delta,
            "epsilon_at_1e-5": number_to_json(self.epsilon_at(AT)),
            "epsilon_replace_one": number_to_json(promise.epsilon_replace_one),
            "meaning": promise.meaning.to_json(),
            "variant": f"approximate differential privacy, {promise.accountant}, {promise.mode} arithmetic",
            "profile": self._profile(),
            "mu": self._mu(),
            "per_client": promise.per_client_json(),
            "mechanisms": [release.to_json() for release in promise.releases],
        }

    def _profile(self) -> dict[str, Any]:
        """Epsilon at several deltas, and divergences at several orders where each unit's plan is all."""
        points = {f"{delta:.0e}": number_to_json(self.epsilon_at(delta)) for delta in DELTAS}
        found: dict[str, Any] = {"accountant": self.accountant, "epsilon_at_delta": points}
        if self.watched is None:
            curves = [divergences_of(unit.event, self.plan.adjacency) for unit in self.plan.units]
            largest = np.max(curves, axis=0)[np.isin(INTEGER_ORDERS, ORDERS)]
            found["rdp"] = {
                "orders": list(ORDERS),
                "divergences": [number_to_json(float(value)) for value in largest],
            }
        return found

    def _mu(self) -> dict[str, Any] | None:
        """Where there is one: pairs of workers are bounded one by one, and without noise nothing is."""
        if self.watched is not None or math.isinf(self.promise.epsilon):
            return None
        try:
            mu = gaussian_mu(self._deltas)
        except (PlanError, PrivacyInputError):
            return None
        return None if mu is None else {"value": mu, "for_delta_from": LEAST}

    # --- words --------------------------------------------------------------------------------------

    def _words(self) -> dict[str, Any]:
        promise, threat, answers = self.promise, self.promise.threat, self.answers
        outside = ("outside the guarantee", "outside, too", "not covered", "must not be given away")
        return {
            "unit": {"name": promise.unit.value, "protected": promise.protected},
            "records_per_person": self._records_per_person(),
            "neighbours": {"name": promise.adjacency.value, "text": _NEIGHBOURS[promise.adjacency]},
            "unprotected": self.unprotected(),
            "observer": {"who": threat.watchers, "sees": threat.sees},
            "trusted": {
                "who": threat.trusted,
                "held_by": promise.held_by.value,
                "text": _HELD[promise.held_by],
            },
            "collusion": threat.collusion,
            "not_private": [caveat for caveat in promise.caveats if any(word in caveat for word in outside)],
            "data": self.data(),
            "tuning": answers.get("tuning"),
            "library": {
                "coterie": __version__,
                **{name: version(name) for name in ("torch", "dp-accounting", "numpy")},
            },
            "version": self.version,
            "commit": commit(),
            "side_channels": list(_SIDE_CHANNELS),
            "justification": answers.get("justification"),
            "contact": answers.get("contact"),
        }

    def _records_per_person(self) -> Any:
        bounds = self.promise.persons
        if bounds is not None:
            across = self.promise.epsilon_across_clients
            return {
                "counted_at_a_client": bounds.records,
                "clients": bounds.clients,
                "epsilon_at_all_clients": None if across is None else number_to_json(across),
            }
        if self.promise.unit is Unit.RECORD:
            return self.answers.get("records_per_person")
        return f"all of a {self.promise.unit}: they are protected together"

    # --- what was found -----------------------------------------------------------------------------

    def _found(self) -> dict[str, Any]:
        return {**self.scores(), "audit": self._audit(), "history": self._history()}

    def _history(self) -> dict[str, Any]:
        known = self.history
        if known is not None:
            return known.to_json()
        return {"total_epsilon": None, "text": f"unknown: {self.no_history()}"}

    def _audit(self) -> Any:
        path = self.path / AUDIT
        if not path.exists():
            return "none"
        told, keys = (
            read_json(path),
            ("name", "claimed_epsilon", "lower_bound", "delta", "confidence", "verdict"),
        )
        try:
            releases = [{key: release[key] for key in keys} for release in told["releases"]]
            return {"when": told["when"], "verdict": told["verdict"], "releases": releases}
        except (KeyError, TypeError):
            raise InputError(f"{path}: not an audit of this version") from None


@dataclass(frozen=True)
class Card(PrivacyClaim):
    """The card of the run in a folder.

    Args:
        lines: of the register, when the card was written; None: as it is now.
    """

    run: RecordedRun
    lines: int | None = None

    @classmethod
    def of(cls, path: Path) -> "Card":
        """That of a run that has begun, if every file and figure of it holds."""
        run = RecordedRun.of_this_version(path)
        InputError.when(not run.files.exists, f"{path}: not the folder of a run")
        for check in run.checks():
            check()
        InputError.when(not run.begun, f"{path}: nothing was released yet, so there is nothing to state")
        for check in run.recount_checks():
            check()
        return cls(run)

    @property
    def path(self) -> Path:
        return self.run.files.path

    @property
    def promise(self) -> Guarantee:
        return self.run.guarantee

    @property
    def plan(self) -> PrivacyPlan:
        return self.run.plan

    @property
    def accountant(self) -> str:
        return self.run.ledger.accountant

    @property
    def watched(self) -> Observer | None:
        return self.run.proven.observer

    @property
    def version(self) -> str:
        return str(self.federation.get("coterie"))

    @property
    def history(self) -> History | None:
        return history_of(self.run.files, self.lines)

    @cached_property
    def federation(self) -> dict[str, Any]:
        return read_json(self.run.files.federation)

    def unprotected(self) -> list[str]:
        clients, schedule = self.federation["clients"], self.run.experiment.schedule
        records = sum(int(client["records"]) for client in clients)
        rows = "persons" if self.promise.unit is Unit.PERSON else "records"
        told = [
            f"the number of clients ({len(clients)}), their names, and how many {rows} each has "
            f"({records:,} to train on together)",
            f"the schedule: {schedule.rounds} rounds, batch, step size, clip and noise",
            "the shape of a record, the classes or the range of the label, declared ranges and categories",
        ]
        if self.promise.unit.within_client:
            told.append("which client took part in which round")
        return told

    def data(self) -> dict[str, Any]:
        settings = self.run.experiment.data
        served = self.run.files.sites.exists()
        return {
            "source": "the sites' own records" if served else settings.name,
            "own_records": served or settings.own_records,
            "type": "static",
            "access": "non-interactive",
            "declared_columns_only": declared_columns(self.run.files.task),
        }

    def scores(self) -> dict[str, Any]:
        result = RunResult.load(self.run.files.path) if self.run.files.finished else None
        reached = None if result is None else result.reached
        worst = None
        if reached is not None and reached.per_client:
            name = min(reached.per_client, key=lambda client: reached.per_client[client])
            worst = {"client": name, "score": reached.per_client[name], "kind": reached.kind}
        utility = None
        if reached is not None:
            utility = {"mean": reached.mean, "min": reached.min, "max": reached.max, "kind": reached.kind}
        return {"utility": utility, "worst_client": worst}

    def no_history(self) -> str:
        if self.run.files.sites.exists():
            return "every site has a register of its own, and tells nobody what is in it"
        return "published records, which no register counts; other runs on them add up"


def declared_columns(task: Path) -> str:
    """Which columns a record has, by the file that describes the task."""
    if not task.exists():
        return "as the sites declare them"
    described = read_json(task).get("preprocessing", {}).get("inputs", {})
    names = [column["column"] for column in described.get("columns", ())]
    return ", ".join(names) if names else "arrays of a declared shape and range"


_NEIGHBOURS = {
    Adjacency.ZERO_OUT: "one of them contributes nothing, and all public numbers stay as they are",
    Adjacency.ADD_REMOVE: "one of them takes part or not",
    Adjacency.REPLACE_ONE: "any other is in the place of one of them",
}
_HELD = {
    Custody.PLAN: "nobody yet: nothing has been run",
    Custody.ONE_PROCESS: "one process held all records and the noise key",
    Custody.EACH_SITE: "each site held its own records and its own noise key",
    Custody.TRUSTED_SERVER: "a trusted server saw clipped updates in the clear and added the noise",
}


def commit() -> str | None:
    """The commit of the code that runs here, where it runs from a repository."""
    package = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(package), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    root, found = done.stdout.split("\n")[:2]
    # An environment may lie in a repository of somebody else's.
    return found if (Path(root) / "src" / "coterie").resolve() == package else None


def write_card(card: PrivacyClaim) -> dict[str, Any]:
    """Put the card into its folder; in that of a run `coterie verify` computes its figures again."""
    content = card.content
    write_text(card.path / CARD, json_text(content))
    return content


def check_card(run: RecordedRun) -> None:
    """Refuse a card in a run's folder of which a field does not follow from the folder and the register."""
    path = run.files.path / CARD
    if not path.exists():
        return
    stored = read_json(path)
    head = stored.get("history", {}).get("register") if isinstance(stored.get("history"), Mapping) else None
    lines = head.get("count") if isinstance(head, Mapping) else None
    follows = dict(Card(run, lines if isinstance(lines, int) else None).content)
    if head is not None and follows["history"].get("register") is None:
        follows["history"] = stored["history"]  # the register is on another machine
    for name in (name for name in {**stored, **follows} if name not in OF_THIS_MACHINE):
        same = name in stored and name in follows and alike(stored[name], follows[name])
        if not same:
            said = " ".join(str(stored.get(name)).split())[:80]
            raise LedgerError(f"{path}: {name} is {said}; computed again it is {str(follows.get(name))[:80]}")
