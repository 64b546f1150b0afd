"""What a site agrees to once, before its first release, and what it checks before it agrees.

The server proposes; nothing in a proposal is believed. The site computes from its own code what the plan
would spend of its own records, and signs nothing that spends more than its operator allowed. After that
the contract is on its disk, and messages only name it: mechanism, clip, noise and number of releases are
read from there, never from a message.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from flwr.app import RecordDict
from pydantic import ValidationError

from coterie.data.records import Task
from coterie.engines.flower.messages import GarbageError, RefusedError, Split, pack, plain_of, task_from_json
from coterie.errors import CoterieError
from coterie.models import ModelSettings
from coterie.privacy import (
    Budget,
    FullBatchSketch,
    FullBatchSteps,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    Unit,
    UnitPlan,
    epsilon_of,
)
from coterie.privacy.plan import canonical_json
from coterie.training.augmentation import Augmentation

_COUNTED = (PoissonSteps, FullBatchSteps, FullBatchSketch)
_ALLOWED = (*_COUNTED, PrivateSelection)
_SMALLEST_DELTA = 1e-30


@dataclass(frozen=True)
class Contract:
    """Everything that decides what a site computes and what that costs, beside its records.

    Args:
        experiment: a name that no other run of the server has.
        client: the site's own name, its subject in the plan.
        plan: of all clients: it is public, and noise is bound to all of it.
        delta: at which the site's epsilon is stated.
        evaluate: whether accuracy on held-out records will be asked for, outside the guarantee.
    """

    experiment: str
    algorithm: str
    client: str
    records: int
    task: Task
    split: Split
    model: ModelSettings
    lr: float
    augmentation: Augmentation | None
    public_seed: int
    rounds: int
    plan: PrivacyPlan
    accountant: str
    delta: float
    evaluate: bool = False

    @property
    def own(self) -> UnitPlan:
        """What is released of this site's records."""
        return self.plan.for_subject(self.client)

    @property
    def own_plan(self) -> PrivacyPlan:
        """The plan as far as it concerns this site: what its ledger enforces."""
        plan = self.plan
        return PrivacyPlan(plan.unit, plan.adjacency, plan.threat, (self.own,), plan.caveats)

    def to_json(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "algorithm": self.algorithm,
            "client": self.client,
            "records": self.records,
            "task": {**asdict(self.task), "shape": list(self.task.shape)},
            "split": asdict(self.split),
            "model": self.model.model_dump(mode="json"),
            "lr": self.lr,
            "augmentation": None if self.augmentation is None else asdict(self.augmentation),
            "public_seed": self.public_seed,
            "rounds": self.rounds,
            "plan": self.plan.to_json(),
            "accountant": self.accountant,
            "delta": self.delta,
            "evaluate": self.evaluate,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        try:
            contract = cls(
                experiment=str(data["experiment"]),
                algorithm=str(data["algorithm"]),
                client=str(data["client"]),
                records=int(data["records"]),
                task=task_from_json(data["task"]),
                split=Split.from_json(data["split"]),
                model=ModelSettings.model_validate(data["model"]),
                lr=float(data["lr"]),
                augmentation=None if data["augmentation"] is None else Augmentation(**data["augmentation"]),
                public_seed=int(data["public_seed"]),
                rounds=int(data["rounds"]),
                plan=PrivacyPlan.from_json(data["plan"]),
                accountant=str(data["accountant"]),
                delta=float(data["delta"]),
                evaluate=bool(data["evaluate"]),
            )
            contract.own  # noqa: B018  a client that the plan does not know is an error
            whole = canonical_json(contract.to_json()) == canonical_json(data)
        except (KeyError, TypeError, ValueError, ValidationError, CoterieError):
            raise GarbageError("a contract that is none") from None
        if not whole:
            raise GarbageError("a contract with more in it than we know")
        return contract

    def digest(self) -> str:
        """The name by which messages refer to it."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()

    def to_content(self) -> RecordDict:
        return pack({"contract": canonical_json(self.to_json())})

    @classmethod
    def from_content(cls, content: RecordDict) -> Self:
        try:
            data = json.loads(plain_of(content, {"contract": str})["contract"])
        except (ValueError, RecursionError):
            raise GarbageError("a contract that is none") from None
        if not isinstance(data, dict):
            raise GarbageError("a contract that is none")
        return cls.from_json(data)


@dataclass(frozen=True)
class Limits:
    """What a site's operator allows, said once when joining.

    Args:
        budget: the most that may ever be spent of the site's records.
        models: models of the form package.module:function whose code the operator has read and installed.
        evaluate: whether accuracy on held-out records may be reported, outside the guarantee.
    """

    budget: Budget
    models: tuple[str, ...] = ()
    evaluate: bool = False


def cost(contract: Contract, delta: float) -> float:
    """Epsilon of the whole plan for this site's records, by this site's own accountant."""
    return epsilon_of(contract.own.event, delta, contract.accountant, contract.plan.adjacency)


def approve(contract: Contract, limits: Limits, *, name: str, records: int, task: Task) -> None:
    """Raise `RefusedError` unless it is about the site's own records, a known model, and not too much."""
    if contract.client != name or contract.records != records or contract.task != task:
        raise RefusedError("other data")
    if ":" in contract.model.name and contract.model.name not in limits.models:
        raise RefusedError("model code")
    if contract.evaluate and not limits.evaluate:
        raise RefusedError("not allowed")
    if contract.plan.unit is not Unit.RECORD or not contract.own.releases:
        raise RefusedError("not planned")
    for release in contract.own.releases:
        mechanism = release.mechanism
        if not isinstance(mechanism, _ALLOWED) and limits.budget.is_private:
            raise RefusedError("too much")
        if isinstance(mechanism, _COUNTED) and mechanism.records != records:
            raise RefusedError("other data")
    sound = (
        math.isfinite(contract.lr)
        and contract.lr > 0
        and contract.rounds >= 1
        and contract.public_seed >= 0
        and _sound_views(contract)
        and _SMALLEST_DELTA < contract.delta < 1
    )
    if not sound:
        raise RefusedError("garbage")
    try:
        spends = cost(contract, limits.budget.delta)
    except CoterieError:  # a plan that no accountant can bound
        raise RefusedError("too much") from None
    if contract.delta > limits.budget.delta or not spends <= limits.budget.epsilon:
        raise RefusedError("too much")


def _sound_views(contract: Contract) -> bool:
    """Whether the views of a record, if any, can be made of these records."""
    views, shape = contract.augmentation, contract.task.shape
    if views is None:
        return True
    whole = type(views.copies) is int and type(views.shift) is int and type(views.flip) is bool
    images = contract.task.vocabulary is None and len(shape) == 3
    return whole and images and 1 <= views.copies <= 64 and 0 <= views.shift < min(shape[1:])
