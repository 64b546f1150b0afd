"""What a site checks before it agrees to a contract: cheap things first, a server may propose anything."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from coterie.engines.flower.contract import Contract, Limits, cost, cost_of_scores
from coterie.engines.flower.messages import MOST_CAVEATS, RELEASE, RefusedError, SiteFacts, quoted, site_log
from coterie.engines.flower.shared_code import SharedCode, own_code
from coterie.errors import CoterieError, where
from coterie.groups import Observer
from coterie.models.settings import NONE
from coterie.privacy import EVALUATION, Adjacency, CohortSums, NoisyScores, Unit
from coterie.privacy.ranges import DELTA, EPOCHS, PULL, RECORDS, ROUNDS, SEED, STEP_SIZE, STEPS, Range

if TYPE_CHECKING:
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
BELOW_ONE = Range(0.0, math.nextafter(1.0, 0.0))
MOST_PARAMETERS = 5 * 10**8
"""Of a model: a message with more of them would be beyond what the network carries."""


def learner_of(contract: Contract) -> "Learner":
    """The contract's model, ready to learn. Its code must have been allowed before."""
    import torch  # a site that waits for a contract does without

    from coterie.engines.clients import build_learner
    from coterie.models.registry import parameters_of

    model, task, seed = contract.model, contract.task, contract.public_seed
    RefusedError.when(not model.own and parameters_of(model, task) > MOST_PARAMETERS, "out of range")
    return build_learner(model, task, seed, torch.device("cpu"), additive=contract.additive)


def approve(contract: Contract, limits: Limits, facts: SiteFacts) -> "Learner":
    """The learner of a contract about the site's own records, of a known model, that spends not too much.

    Raises:
        RefusedError: it is not that.
    """
    own, trusts = contract.own, not contract.plan.unit.within_client
    described = (contract.client, contract.records, contract.held_out, contract.task)
    known = (facts.name, facts.records, facts.held_out, facts.task)
    RefusedError.when(described != known, "other data")
    # Its operator says whether rows are persons; what is for records, or for sites, would not protect them.
    persons = contract.plan.persons
    RefusedError.when(
        (None if persons is None else persons.records) != facts.records_per_person, "other data"
    )
    model = contract.model
    foreign = {model.name: model.own, model.features: model.own_features}
    unknown = [name for name, own in foreign.items() if own and name not in limits.models]
    RefusedError.when(bool(unknown), "model code")
    _check_code(contract)
    named = all(RELEASE.fullmatch(release.name) for unit in contract.units for release in unit.releases)
    RefusedError.when(not named or len(contract.plan.caveats) > MOST_CAVEATS, "words")
    _approve_scores(contract, limits)
    # Its own number of records is public, and used.
    unbounded = not trusts and contract.plan.adjacency is Adjacency.ADD_REMOVE
    aimless = trusts != (contract.trusted is not None) or not own.releases
    RefusedError.when(unbounded or aimless, "not planned")
    RefusedError.when(trusts and not limits.trust_server, "not trusted")
    for mechanism in (release.mechanism for release in own.releases):
        if mechanism.kind == NoisyScores.kind:
            continue  # approved above
        clipped = isinstance(mechanism, CohortSums) and not mechanism.drafted
        RefusedError.when(trusts and not clipped, "not planned")
        RefusedError.when(not (trusts or mechanism.at_sites) and limits.budget.is_private, "too much")
        others = mechanism.at_sites and getattr(mechanism, "records", facts.records) != facts.records
        RefusedError.when(others, "other data")
    RefusedError.when(not (_in_range(contract) and _few_releases(contract)), "out of range")
    broken = limits.rules.broken_by(contract)
    if broken is not None:
        raise RefusedError(broken)
    RefusedError.when(not (_sound_views(contract) and _sound_work(contract)), "garbage")
    try:
        learner = learner_of(contract)
    except RefusedError:
        raise
    except Exception as mistake:  # a model meets records that it was not made for in many ways
        said = mistake if isinstance(mistake, CoterieError) else where(mistake)
        log.warning("no model %s for these records: %s", contract.model.name, said)
        raise RefusedError("model") from None
    size = learner.layout.size
    longest = max(release.mechanism.length(size) for release in own.releases)
    RefusedError.when(longest > size, "out of range")
    affordable = _costs_at_most(limits.budget.epsilon, cost, contract, limits)
    RefusedError.when(contract.delta > limits.budget.delta or not affordable, "too much")
    return learner


def _check_code(contract: Contract) -> None:
    """Raise `RefusedError` unless code is installed here as the server has it; none of it is run."""
    theirs = {(code.key, code.name): code for code in contract.code}
    for kind, name in own_code(contract.model):
        found, here = theirs.get((kind.key, name)), SharedCode.here(kind, name)
        if found != here:
            said = "does not say which it has" if found is None else f"has {quoted(str(found))}"
            log.warning(
                "%s %s: the server %s, this site %s; install the same on both sides",
                kind.key,
                quoted(name),
                said,
                here,
            )
            raise RefusedError("code version")


def _costs_at_most(most: float, price: Callable[..., float], contract: Contract, limits: Limits) -> bool:
    """Whether a contract's price, for the neighbours and at the delta of the site's operator, is not more."""
    try:
        return price(contract, limits.budget.delta, limits.adjacency) <= most
    except CoterieError:  # a plan that no accountant can bound
        return False


def _few_releases(contract: Contract) -> bool:
    """Whether pricing the plan is work that a site should do before it has agreed to anything."""
    watched = contract.watched
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
    found: list[tuple[object, Range]] = [
        (contract.lr, STEP_SIZE),
        (contract.rounds, ROUNDS),
        (contract.public_seed, SEED),
        (contract.delta, DELTA),
        (contract.delta, BELOW_ONE),
        *((release.mechanism.steps, STEPS) for release in contract.own.releases),
    ]
    if contract.trusted is not None:
        training, watched = contract.trusted.training, contract.trusted.watched
        found += [
            (1 if watched is None else watched.epochs, ROUNDS),
            (training.epochs, EPOCHS),
            (training.batch, RECORDS),
            (1 if training.iterations is None else training.iterations, STEPS),
            (training.lr, STEP_SIZE),
            (training.momentum, BELOW_ONE),
            (training.proximal or PULL.least, PULL),
        ]
    return all(number in allowed for number, allowed in found)


def _approve_scores(contract: Contract, limits: Limits) -> None:
    """Raise `RefusedError` unless held-out records answer as often, and at most at the price, as allowed."""
    unit, scored, allowed = contract.plan.unit, contract.scored, limits.reported
    among_own = [each for each in contract.own.releases if each.mechanism.kind == NoisyScores.kind]
    unfit = (scored is not None and not unit.within_client) or (among_own and unit is not Unit.CLIENT)
    RefusedError.when(bool(unfit), "not planned")  # scores of a unit that has none
    planned = among_own if scored is None else list(scored.releases)
    if scored is None and not planned:
        return
    RefusedError.when(len(planned) != 1 or planned[0].name != EVALUATION, "not planned")
    mechanism = planned[0].mechanism
    if not isinstance(mechanism, NoisyScores):
        raise RefusedError("not planned")
    if allowed is None or contract.held_out == 0 or planned[0].times > allowed.reports:
        raise RefusedError("not allowed")
    if scored is not None:  # a client's score is part of what its whole plan costs
        RefusedError.when(mechanism.units != contract.held_out, "other data")
        affordable = _costs_at_most(allowed.epsilon, cost_of_scores, contract, limits)
        RefusedError.when(not affordable, "too much")


def _sound_work(contract: Contract) -> bool:
    """Whether what is done for a trusted server is what the plan is about."""
    if contract.trusted is None:
        return True
    doable = all(0 <= first < end for first, end in contract.trusted.personal)
    if contract.watched is not None:
        return doable and _planned_as_watched(contract, contract.watched)
    # Releases of a worker pass through others' groups: what they tell cannot be read off them alone.
    noisy = any(release.mechanism.noise_std > 0 for release in contract.own.releases)  # type: ignore[attr-defined]
    return doable and not (contract.plan.unit is Unit.WORKER and noisy)


def _planned_as_watched(contract: Contract, watched: Observer) -> bool:
    """Whether the groups that epsilon is computed from are those that the plan releases for."""
    structure, schedule, plan = watched.structure, watched.schedule, contract.plan
    if (
        plan.unit is not Unit.WORKER
        or schedule.publishes_drafts
        or contract.client not in structure.names
        or {unit.subject for unit in plan.units} != set(structure.names)
    ):
        return False
    for worker, name in enumerate(structure.names):
        groups, releases = sorted(structure.groups_of(worker)), plan.for_subject(name).releases
        if len(releases) != len(groups):
            return False
        for group, release in zip(groups, releases, strict=True):
            sums, noise = release.mechanism, schedule.noises[group]
            if not isinstance(sums, CohortSums) or sums.histogram_ratio or sums.identifier_ratio:
                return False
            same = (sums.rate, sums.multiplier) == (noise.rate, noise.multiplier)
            if not same or schedule.epochs(release.times) > watched.epochs:
                return False
    return True


def _sound_views(contract: Contract) -> bool:
    """Whether the views of a record, if any, can be made of these records."""
    views, shape = contract.augmentation, contract.task.shape
    if views is None:
        return True
    if contract.model.features != NONE:
        return False  # features are computed once
    images = contract.task.vocabulary is None and len(shape) == 3
    return images and 1 <= views.copies <= 64 and 0 <= views.shift < min(shape[1:])
