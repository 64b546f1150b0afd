"""One audit: every kind of release of a plan under attack, and what that says of the claims."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from coterie import __version__
from coterie.audit.arena import Audited
from coterie.audit.cohort_games import CohortGame, asked_at_site, asked_by
from coterie.audit.declared import audited_contract, audited_run
from coterie.audit.games import Game
from coterie.audit.group_game import GroupGame
from coterie.audit.page import write_audit_report
from coterie.audit.playing import Effort, Outcome, play
from coterie.audit.record_games import SelectionGame, TrainingGame
from coterie.audit.result import AuditResult, ReleaseAudit, points
from coterie.audit.score_games import ScoresGame
from coterie.audit.whole_run import NAME as WHOLE_RUN
from coterie.audit.whole_run import attack_whole_run, no_room
from coterie.errors import InputError
from coterie.experiment.experiment_file import ExperimentSource, experiment_of
from coterie.experiment.folder import default_folder
from coterie.privacy import CohortSums, PlannedRelease, Unit, UnitPlan, epsilon_of

CONFIDENCE = 0.95
SECONDS = 60.0
"""What an audit takes where nobody says otherwise."""
NOTHING_CLAIMED = "no privacy is claimed of it"
NO_GAME = "no game is known for such a release"
NOT_EXECUTED = "no engine executes it"
NOT_ASKED = "the algorithm does not ask for it in its first round"

NOT_ASKED_FOR = "not asked for"
BETWEEN_WORKERS = "between workers"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Attacked:
    """A kind of release: of whom it is attacked."""

    unit: UnitPlan
    release: PlannedRelease


def attacked_releases(audited: Audited) -> Iterator[Attacked]:
    """Every release by its name and kind, of the subject that it costs most."""
    kinds: dict[tuple[str, str], dict[PlannedRelease, UnitPlan]] = {}
    groups = audited.plan.unit is Unit.WORKER  # each has a release of its own, all of one kind
    for unit in audited.plan.units:
        for release in unit.releases:
            name = "" if groups else release.name
            kinds.setdefault((name, release.mechanism.name), {}).setdefault(release, unit)

    def cost(release: PlannedRelease, unit: UnitPlan) -> float:
        delta, adjacency = audited.deltas[unit.subject], release.mechanism.adjacency
        return epsilon_of(release.event, delta, audited.accountant, adjacency)

    for found in kinds.values():
        one = next(iter(found))
        if len(found) > 1:
            one = max(found, key=lambda release: cost(release, found[release]))
        yield Attacked(found[one], one)


def game_of(audited: Audited, attacked: Attacked) -> Game | str:
    """The game of a release, or why there is none."""
    unit, release = attacked.unit, attacked.release
    delta = audited.deltas[unit.subject]
    if epsilon_of(release.event, delta, audited.accountant, release.mechanism.adjacency) == float("inf"):
        return NOTHING_CLAIMED
    match release.mechanism.kind:
        case "trainable":
            return TrainingGame(audited, unit, release)
        case "a selection":
            return SelectionGame(audited, unit, release)
        case "a score" | "several scores":
            return ScoresGame(audited, unit, release)
        case "one of a cohort":
            asked = asked_by(audited).get(release.name) or asked_at_site(audited)
            if asked is None:
                return NOT_ASKED
            return CohortGame(audited, unit, release, unit.planned(CohortSums, release.name), asked)
        case "executed":
            return NOT_EXECUTED
    return NO_GAME


def attack(
    audited: Audited,
    called: str,
    *,
    release: str | None = None,
    seconds: float = SECONDS,
    trials: int | None = None,
    confidence: float = CONFIDENCE,
    tell: Tell = lambda text: None,
) -> AuditResult:
    """Attack the releases of a plan.

    Args:
        release: the only one to attack, by its name in the plan.
        seconds: that all games together may take, about.
        trials: of each release in both worlds together, instead of seconds.
        tell: is told what is being played.
    """
    began = time.monotonic()
    all_of_them = list(attacked_releases(audited))
    known = [each.release.name for each in all_of_them]
    known += [name for name, there in _beside(audited).items() if there]
    if release is not None and release not in known:
        raise InputError(f"--release: '{release}' is not in the plan; allowed: {', '.join(known)}")
    wanted = [each for each in all_of_them if release in (None, each.release.name)]
    found = {each: game_of(audited, each) for each in wanted}
    games = [game for game in found.values() if isinstance(game, Game)]
    skipped = [(each.release.name, why) for each, why in found.items() if isinstance(why, str)]
    if release in (None, BETWEEN_WORKERS) and (seen := between_workers(audited)) is not None:
        games.append(seen)
    whole = NOT_ASKED_FOR if release not in (None, WHOLE_RUN) else no_room(audited)
    if whole not in (None, NOT_ASKED_FOR):
        skipped.append((WHOLE_RUN, whole))
    tests = len(games) + (whole is None)
    share = (1.0 - confidence) / max(1, tests)
    each_effort = Effort(trials, seconds / max(1, tests))
    rows = [told(play(game, each_effort, share, tell), 1.0 - share) for game in games]
    if whole is None:
        rows.append(attack_whole_run(audited, share, tell))
    return AuditResult(
        called,
        tuple(rows),
        confidence,
        f"Bonferroni over {tests} releases",
        time.monotonic() - began,
        __version__,
        datetime.now(UTC).date().isoformat(),
        tuple(skipped),
    )


def _beside(audited: Audited) -> dict[str, bool]:
    """What is attacked beside single releases."""
    return {
        BETWEEN_WORKERS: audited.observer is not None and audited.algorithm is not None,
        WHOLE_RUN: no_room(audited) is None,
    }


def between_workers(audited: Audited) -> Game | None:
    """The game of the worker that leaks most, where workers observe each other."""
    if audited.observer is None or audited.algorithm is None or audited.facts is None:
        return None
    delta = min(audited.deltas.values())
    pair = audited.observer.leakage(delta=delta, adjacency=audited.plan.adjacency).most_exposed()
    return None if pair is None else GroupGame(audited, audited.observer, *pair)


def told(outcome: Outcome, confidence: float) -> ReleaseAudit:
    """The outcome of a game as the result tells it."""
    game, found = outcome.game, outcome.found
    false, true = outcome.scores.receiver_curve()
    claimed = 1.0 - game.claim.false_negatives(false)
    return ReleaseAudit(
        name=game.name,
        what=game.what,
        uses=game.uses,
        adjacency=str(game.claim.adjacency),
        claimed_epsilon=found.claimed,
        lower_bound=found.lower,
        delta=found.delta,
        accountant=game.claim.accountant,
        confidence=confidence,
        trials=found.trials,
        verdict=found.verdict,
        canary=outcome.scene,
        statistic=outcome.statistic,
        trials_needed=found.trials_needed,
        mu_lower=found.mu_lower,
        mu_estimate=found.mu_estimate,
        curve=points(false, true),
        claimed_curve=points(false, claimed),
    )


def audit(
    experiment: ExperimentSource = None,
    out: str | Path | None = None,
    *,
    data: str | Path | None = None,
    contract: str | Path | None = None,
    allow_models: Sequence[str] = (),
    release: str | None = None,
    trials: int | None = None,
    seconds: float = SECONDS,
    tell: Tell = lambda text: None,
) -> AuditResult:
    """Attack what an experiment would release, write `audit.json` and a page, return what was found.

    No record of anybody is read, so it costs no budget.

    Args:
        experiment: its file, its sections as a dict, an `Experiment`, or None for the built-in one.
        out: the folder to write into, also that of a run; by default a new one under `runs/`.
        data: at a site, its folder; `contract` is then the contract that it is asked to sign.
        contract: what the site would agree to.
        allow_models: models of the contract whose code may run here.
        release: the only one to attack, by its name in the plan.
        trials: of each release; by default as many as `seconds` allow.
        seconds: that all games together may take, about.
        tell: is told what is being played.

    Example:
        >>> import coterie as ct
        >>> ct.audit("experiment.yaml", seconds=300).verdict  # doctest: +SKIP
    """
    if (data is None) != (contract is None):
        raise InputError("--data and --contract: a site gives both; allowed: both, or an experiment")
    if data is not None and contract is not None:
        if experiment is not None:
            raise InputError("--contract: says all that an experiment would; allowed: one of them")
        audited, called = audited_contract(Path(data), Path(contract), allow_models)
    else:
        audited, called = audited_run(experiment_of(experiment))
    target = InputError.path_of("out", out) if out is not None else default_folder("audit")
    found = attack(audited, called, release=release, trials=trials, seconds=seconds, tell=tell)
    target.mkdir(parents=True, exist_ok=True)
    found.save(target)
    write_audit_report(target)
    return replace(found, folder=target)
