"""What a site agrees to once, before its first release, and what it costs and promises (see `approval`).

The server proposes; nothing in a proposal is believed. The site computes from its own code what the plan
would spend of its own records, and signs nothing that spends more than its operator allowed. After that
the contract is on its disk, and messages only name it: mechanism, clip, noise and number of releases are
read from there, never from a message.

Where a unit is a record, or a person, the site trusts nobody. Where it is a client or a worker, a server (in
place of the groups' masters, too) is trusted with clipped updates in the clear, flips the coins and adds the
noise. A site can compute what that promises, not that it is kept; so it signs only if its operator said that
the server is trusted.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.protocol import Choice, LocalTraining, Parts
from coterie.data.records import Task
from coterie.engines.flower.messages import (
    GarbageError,
    RefusedError,
    RequestId,
    Told,
    check_texts,
    quoted,
)
from coterie.engines.flower.shared_code import SharedCode
from coterie.errors import CoterieError
from coterie.groups import Observer
from coterie.models import ModelSettings, code_caveats
from coterie.privacy import (
    Adjacency,
    Budget,
    Custody,
    Guarantee,
    HeldOut,
    NoisyScores,
    PrivacyPlan,
    Unit,
    UnitPlan,
    epsilon_of,
    guarantee,
    held_out,
)
from coterie.privacy.errors import RangeError
from coterie.privacy.plain import Key, Plain, register
from coterie.privacy.plan import canonical_json
from coterie.privacy.threats import THREATS
from coterie.training.augmentation import Augmentation

IN_THE_CLEAR = "the server sees the clipped update of whoever it samples in the clear"
WHO_IS_ASKED = "whom it samples is its secret: whoever watches its network traffic could tell"


@dataclass(frozen=True)
class TrustedWork(Plain):
    """What a site does for a server that it trusts with its clipped update.

    Args:
        training: how it learns when it was sampled, without noise.
        choice: how it finds the model that it starts from.
        personal: ranges of parameters that never leave the site, as pairs of first and one after the last.
        watched: who sees what when, where workers see the models of their own groups alone.
    """

    called = "work for a trusted server"
    training: LocalTraining
    choice: Choice = Choice.GIVEN
    personal: tuple[tuple[int, int], ...] = ()
    watched: Observer | None = None

    def parts(self, parameters: int) -> Parts | None:
        """Which of the parameters stay, as a cohort's job says it."""
        if not self.personal:
            return None
        mask = np.zeros(parameters, dtype=np.bool_)
        for first, end in self.personal:
            mask[first:end] = True
        return Parts(shared=np.zeros_like(mask), personal=mask)


def leaving(parts: Parts | None, parameters: int) -> NDArray[np.bool_]:
    """Which parameters leave a site or a member."""
    return np.ones(parameters, np.bool_) if parts is None else ~parts.personal


def ranges_of(mask: Any) -> tuple[tuple[int, int], ...]:
    """Where a mask is true, as pairs of first and one after the last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True)
class Contract(Told):
    """Everything that decides what a site computes and what that costs, beside its records.

    Args:
        experiment: a name that no other run of the server has.
        client: the site's own name, its subject in the plan.
        plan: of all clients: it is public, and noise is bound to all of it.
        delta: at which the site's epsilon is stated.
        held_out: records that the site trains on nowhere; the plan says whether they score models.
        additive: whether the model is two of its kind, outputs added.
        trusted: what is done for a trusted server; None where nobody is trusted.
        code: packages and versions that the server has of code that is not coterie's own.
    """

    called = "contract"
    experiment: str
    algorithm: str
    client: str
    records: int
    task: Task
    held_out: int
    model: ModelSettings
    lr: float
    augmentation: Augmentation | None
    public_seed: int
    rounds: int
    plan: PrivacyPlan
    accountant: str
    delta: float
    additive: bool = False
    trusted: TrustedWork | None = None
    code: Annotated[tuple[SharedCode, ...], Key(optional=True)] = ()

    @property
    def watched(self) -> Observer | None:
        """Who sees what when, where workers see the models of their own groups alone."""
        return None if self.trusted is None else self.trusted.watched

    @property
    def own(self) -> UnitPlan:
        """What is released of this site's records, under its own name."""
        [subject] = self.plan.subjects_of((self.client,))
        return UnitPlan(self.client, self.plan.for_subject(subject).releases)

    @property
    def scored(self) -> UnitPlan | None:
        """What is released of the records that this site holds out, where they are units of their own."""
        subject = held_out(self.client)
        return next((unit for unit in self.plan.units if unit.subject == subject), None)

    @property
    def units(self) -> tuple[UnitPlan, ...]:
        """Of this site: its records that train, and those held out where they are units of their own."""
        return (self.own,) if self.scored is None else (self.own, self.scored)

    @property
    def own_plan(self) -> PrivacyPlan:
        """The plan as far as it concerns this site: what its ledger enforces."""
        return replace(self.plan, units=self.units)

    @property
    def work(self) -> int:
        """Steps of training in all rounds: what a contract asks of a site's processors."""
        training = None if self.trusted is None else self.trusted.training
        if training is None:
            return sum(release.times * release.mechanism.steps for release in self.own.releases)
        learning = [each for each in self.own.releases if each.mechanism.kind != NoisyScores.kind]
        passes = training.epochs * -(-self.records // training.batch)
        return sum(release.times for release in learning) * (training.iterations or passes)

    @classmethod
    def read(cls, data: object) -> Self:
        check_texts(data)
        try:
            contract = super().read(data)
            contract.own  # noqa: B018  a client that the plan does not know is an error
            whole = canonical_json(contract.to_json()) == canonical_json(data)
        except RangeError:
            raise RefusedError("out of range") from None
        except (ValueError, TypeError, RecursionError, CoterieError):
            whole = False
        GarbageError.when(not whole, "malformed contract")
        return contract

    @cached_property
    def digest(self) -> str:
        """The name by which messages refer to it."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()

    def asked(self, round: int, release: str) -> RequestId:
        """What a release of a round under this contract is called."""
        return RequestId(self.digest, round, release)


register(ModelSettings, lambda settings: settings.model_dump(mode="json"), ModelSettings.model_validate)


MOST_WORK = 10**7
"""Steps of training in all rounds that a site agrees to, unless its operator says otherwise."""


@dataclass(frozen=True)
class Rules:
    """What an operator's policy says beside the budget; None: anything.

    Args:
        models: names of models; a user's own code must be among `Limits.models`, too.
        steps: of training, in all rounds together.
        hours: from the contract on, after which nothing is answered any more.
    """

    algorithms: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    rounds: int | None = None
    steps: int = MOST_WORK
    hours: float | None = None

    def broken_by(self, contract: "Contract") -> str | None:
        """The rule that a contract breaks, as `RefusedError` names it."""
        broken = {
            "rule algorithms": self.algorithms is not None and contract.algorithm not in self.algorithms,
            "rule models": self.models is not None and contract.model.name not in self.models,
            "rule rounds": self.rounds is not None and contract.rounds > self.rounds,
            "rule steps": contract.work > self.steps,
        }
        return next((rule for rule, holds in broken.items() if holds), None)


NO_RULES = Rules()


@dataclass(frozen=True)
class Limits:
    """What a site's operator allows, said once when joining.

    Args:
        budget: the most that may ever be spent of the site's records.
        models: models of the form package.module:function whose code the operator has read and installed.
        reported: how often held-out records may score models, and what all of that may cost them; where the
            server is trusted, it costs a part of the budget. None: never.
        trust_server: whether the server may see this site's clipped updates in the clear.
        adjacency: between which neighbours the budget holds; None: those that the plan names.
        rules: what a policy says beside that.
    """

    budget: Budget
    models: tuple[str, ...] = ()
    reported: HeldOut | None = None
    trust_server: bool = False
    adjacency: Adjacency | None = None
    rules: Rules = NO_RULES


def cost(contract: Contract, delta: float, adjacency: Adjacency | None = None) -> float:
    """Epsilon of the whole plan for this site, by this site's own accountant.

    Of a worker it is what the whole plan tells the one that learns most about it; of a client, what all
    rounds tell, whether it was sampled in them or not.

    Args:
        adjacency: between which neighbours; None: those that the plan names.
    """
    between, watched = adjacency or contract.plan.adjacency, contract.watched
    if watched is not None:
        found = watched.leakage(delta=delta, adjacency=between)
        own = float(found.per_worker[watched.structure.names.index(contract.client)])
        return 0.0 if math.isnan(own) else own  # nobody watches it
    if contract.plan.unit is Unit.WORKER:
        return math.inf
    return epsilon_of(contract.own.event, delta, contract.accountant, between)


def cost_of_scores(contract: Contract, delta: float, adjacency: Adjacency | None = None) -> float:
    """Epsilon of all scores for the records that this site holds out; 0 where they are no units."""
    if contract.scored is None:
        return 0.0
    return epsilon_of(contract.scored.event, delta, contract.accountant, adjacency or contract.plan.adjacency)


def promised(contract: Contract, caveats: Sequence[str]) -> Guarantee:
    """What the contract promises to this site, by its own arithmetic and in its own words.

    Who sees what follows from the unit; what the server's plan adds is quoted.
    """
    plan, trusted, delta = contract.plan, contract.trusted is not None, contract.delta
    said = (IN_THE_CLEAR, WHO_IS_ASKED) if trusted else ()
    theirs = (f"the server says: {quoted(caveat)}" for caveat in plan.caveats)
    from coterie.models.features import public_data_caveats  # brings torch

    declared = public_data_caveats(contract.model.features, contract.task)
    said = (*said, *theirs, *code_caveats(contract.model), *declared, *caveats)
    held_by = Custody.TRUSTED_SERVER if trusted else Custody.EACH_SITE
    if contract.watched is not None:
        found = contract.watched.guarantee(
            delta=delta, adjacency=plan.adjacency, caveats=said, held_by=held_by
        )
        return replace(found, most_exposed=None)  # two names of the server's choice
    units = contract.units
    if trusted:  # one of all, where the plan is the same for all
        units = tuple(plan.for_subject(subject) for subject in plan.subjects_of((contract.client,)))
    # What other sites cost a person who is there, too, is not this site's to say.
    alone = None if plan.persons is None else replace(plan.persons, clients=1)
    own = replace(plan, threat=THREATS[plan.unit], units=units, caveats=(), persons=alone)
    return guarantee(own, delta=delta, accountant=contract.accountant, caveats=said, held_by=held_by)
