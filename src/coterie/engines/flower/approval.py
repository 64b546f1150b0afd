"""What a site checks before it agrees to a contract: cheap things first, a server may propose anything."""

import torch

from coterie.data.records import Task
from coterie.engines.clients import build_learner
from coterie.engines.flower.contract import Contract, Limits, cost, cost_of_scores
from coterie.engines.flower.messages import RefusedError
from coterie.engines.flower.words import MOST_CAVEATS, is_release_name, site_log
from coterie.errors import CoterieError, where
from coterie.groups import Observer
from coterie.models import build_model
from coterie.privacy import (
    EVALUATION,
    Adjacency,
    CohortSums,
    NoisyScores,
    Unit,
)
from coterie.privacy.ranges import DELTA, EPOCHS, PULL, RECORDS, ROUNDS, SEED, STEP_SIZE, STEPS, Range
from coterie.training.learner import Learner

log = site_log(__name__)

MOST_RELEASES = 16
"""Kinds of releases of one unit. Each is priced on its own before the plan is signed; algorithms here have at
most four. A worker has one for each of its groups, see below."""
MOST_STEPS = 10**8
"""Of all releases together. Some accountants compose them one power of two after the other."""
MOST_WATCHED = 256
"""Workers, and groups of them: what each tells every other is computed for all pairs."""
MOST_EPOCHS_PRICED = 10**5
"""Epochs of a worker's groups, times the kinds of noise among them: each is priced in every epoch."""
MOST_PARAMETERS = 5 * 10**8
"""Of a model: a message with more of them would be beyond what the network carries."""


def learner_of(contract: Contract) -> Learner:
    """The contract's model, ready to learn. Its code must have been allowed before."""
    model, task, seed = contract.model, contract.task, contract.public_seed
    if not model.own:
        with torch.device("meta"):  # counts without memory
            drawn = build_model(model, task, seed, additive=contract.additive)
        if sum(values.numel() for values in drawn.parameters()) > MOST_PARAMETERS:
            raise RefusedError("out of range")
    return build_learner(model, task, seed, torch.device("cpu"), additive=contract.additive)


def approve(
    contract: Contract, limits: Limits, *, name: str, records: int, held_out: int, task: Task
) -> Learner:
    """The learner of a contract about the site's own records, of a known model, that spends not too much.

    Raises:
        RefusedError: it is not that.
    """
    described = (contract.client, contract.records, contract.held_out, contract.task)
    if described != (name, records, held_out, task):
        raise RefusedError("other data")
    if contract.model.own and contract.model.name not in limits.models:
        raise RefusedError("model code")
    named = all(is_release_name(release.name) for unit in contract.units for release in unit.releases)
    if not named or len(contract.plan.caveats) > MOST_CAVEATS:
        raise RefusedError("words")
    _approve_scores(contract, limits)
    trusts = contract.plan.unit is not Unit.RECORD
    if not trusts and contract.plan.adjacency is Adjacency.ADD_REMOVE:
        raise RefusedError("not planned")  # its own number of records is public, and used
    if trusts != (contract.trusted is not None) or not contract.own.releases:
        raise RefusedError("not planned")
    if trusts and not limits.trust_server:
        raise RefusedError("not trusted")
    for release in contract.own.releases:
        mechanism = release.mechanism
        if mechanism.kind == NoisyScores.kind:
            continue  # approved above
        if trusts and (not isinstance(mechanism, CohortSums) or mechanism.drafted):
            raise RefusedError("not planned")
        if not trusts and not mechanism.at_sites and limits.budget.is_private:
            raise RefusedError("too much")
        if mechanism.at_sites and getattr(mechanism, "records", records) != records:
            raise RefusedError("other data")
    if not (_in_range(contract) and _few_releases(contract)):
        raise RefusedError("out of range")
    if not (_sound_views(contract) and _sound_work(contract)):
        raise RefusedError("garbage")
    try:
        learner = learner_of(contract)
    except RefusedError:
        raise
    except Exception as mistake:  # a model meets records that it was not made for in many ways
        said = mistake if isinstance(mistake, CoterieError) else where(mistake)
        log.warning("no model %s for these records: %s", contract.model.name, said)
        raise RefusedError("model") from None
    size = learner.layout.size
    if any(release.mechanism.length(size) > size for release in contract.own.releases):
        raise RefusedError("out of range")
    try:
        spends = cost(contract, limits.budget.delta, limits.adjacency)
    except CoterieError:  # a plan that no accountant can bound
        raise RefusedError("too much") from None
    if contract.delta > limits.budget.delta or not spends <= limits.budget.epsilon:
        raise RefusedError("too much")
    return learner


def _few_releases(contract: Contract) -> bool:
    """Whether pricing the plan is work that a site should do before it has agreed to anything."""
    watched = None if contract.trusted is None else contract.trusted.watched
    if watched is None:
        releases = contract.own.releases
        steps = sum(release.times * release.mechanism.steps for release in releases)
        return len(releases) <= MOST_RELEASES and steps <= MOST_STEPS
    # One release for each of a worker's groups: `_planned_as_watched` compares them.
    structure, kinds = watched.structure, len(set(watched.schedule.noises))
    few = max(structure.workers, len(structure.groups)) <= MOST_WATCHED
    return few and kinds * watched.epochs <= MOST_EPOCHS_PRICED


def _in_range(contract: Contract) -> bool:
    """Whether the numbers beside the mechanisms, which check their own, are sane ones."""
    found = contract.lr in STEP_SIZE and contract.rounds in ROUNDS and contract.public_seed in SEED
    found = found and contract.delta in DELTA and contract.delta < 1
    for release in contract.own.releases:
        found = found and release.mechanism.steps in STEPS
    if contract.trusted is None:
        return found
    training, watched = contract.trusted.training, contract.trusted.watched
    return (
        found
        and (watched is None or watched.epochs in ROUNDS)
        and training.epochs in EPOCHS
        and training.batch in RECORDS
        and (training.iterations is None or training.iterations in STEPS)
        and training.lr in STEP_SIZE
        and training.momentum in Range(0.0, 1.0)
        and training.momentum < 1
        and (training.proximal == 0 or training.proximal in PULL)
    )


def _approve_scores(contract: Contract, limits: Limits) -> None:
    """Raise `RefusedError` unless held-out records answer as often, and at most at the price, as allowed."""
    own, scored, by_record = contract.own, contract.scored, contract.plan.unit is Unit.RECORD
    among_own = [release for release in own.releases if release.mechanism.kind == NoisyScores.kind]
    if (scored is not None and not by_record) or (among_own and contract.plan.unit is not Unit.CLIENT):
        raise RefusedError("not planned")  # scores of a unit that has none
    planned = among_own if scored is None else list(scored.releases)
    if scored is None and not planned:
        return
    if len(planned) != 1 or planned[0].name != EVALUATION:
        raise RefusedError("not planned")
    mechanism, allowed = planned[0].mechanism, limits.reported
    if not isinstance(mechanism, NoisyScores):
        raise RefusedError("not planned")
    if allowed is None or contract.held_out == 0 or planned[0].times > allowed.reports:
        raise RefusedError("not allowed")
    if scored is None:
        return  # a client's score is part of what its whole plan costs
    if mechanism.units != contract.held_out:
        raise RefusedError("other data")
    try:
        price = cost_of_scores(contract, limits.budget.delta, limits.adjacency)
    except CoterieError:
        raise RefusedError("too much") from None
    if not price <= allowed.epsilon:
        raise RefusedError("too much")


def _sound_work(contract: Contract) -> bool:
    """Whether what is done for a trusted server is what the plan is about."""
    if contract.trusted is None:
        return True
    watched = contract.trusted.watched
    doable = all(0 <= first < end for first, end in contract.trusted.personal)
    if watched is not None:
        return doable and _planned_as_watched(contract, watched)
    # Releases of a worker pass through others' groups: what they tell cannot be read off them alone.
    noisy = any(release.mechanism.noise_std > 0 for release in contract.own.releases)  # type: ignore[attr-defined]
    return doable and not (contract.plan.unit is Unit.WORKER and noisy)


def _planned_as_watched(contract: Contract, watched: Observer) -> bool:
    """Whether the groups that epsilon is computed from are those that the plan releases for."""
    structure, schedule = watched.structure, watched.schedule
    if contract.plan.unit is not Unit.WORKER or contract.client not in structure.names:
        return False
    for worker, name in enumerate(structure.names):
        groups = sorted(structure.groups_of(worker))
        releases = contract.plan.for_subject(name).releases
        if len(releases) != len(groups):
            return False
        for group, release in zip(groups, releases, strict=True):
            sums, noise = release.mechanism, schedule.noises[group]
            if not isinstance(sums, CohortSums) or sums.histogram_ratio or sums.identifier_ratio:
                return False
            if (sums.rate, sums.multiplier) != (noise.rate, noise.multiplier):
                return False
            if schedule.epochs(release.times) > watched.epochs or schedule.publishes_drafts:
                return False
    return {unit.subject for unit in contract.plan.units} == set(structure.names)


def _sound_views(contract: Contract) -> bool:
    """Whether the views of a record, if any, can be made of these records."""
    views, shape = contract.augmentation, contract.task.shape
    if views is None:
        return True
    whole = type(views.copies) is int and type(views.shift) is int and type(views.flip) is bool
    images = contract.task.vocabulary is None and len(shape) == 3
    return whole and images and 1 <= views.copies <= 64 and 0 <= views.shift < min(shape[1:])
