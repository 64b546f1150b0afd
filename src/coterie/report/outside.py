"""What stands outside the guarantee: marked on a page for its owner, left out of one for everybody.

Outside are scores that were computed exactly, whatever compares with the true clusters or with models that
were trained without privacy, and, where clients are protected, which model each of them uses. Where clients
or workers are, so is how long anything took: that tells who was sampled, which the noise counts on. Numbers
of clients and records, the schedule and the time that record-level training took are public anyway.

Without a finite epsilon there is no guarantee that anything could be covered by: then every figure is
outside, and there is no page for everybody.
"""

import math
from dataclasses import replace

from coterie.errors import InputError
from coterie.experiment.result import Spread
from coterie.privacy import Unit
from coterie.report.grid import Comparison, Setting
from coterie.report.record import RunRecord

MUST_NOT = (
    "This page must not be published: figures that are marked “outside the guarantee” tell of private "
    "records without noise. coterie report --public writes public.html, which has none of them."
)
MUST_NOT_UNBOUNDED = (
    "This page must not be published: it tells of releases without privacy, and nothing bounds what their "
    "figures reveal of private records."
)
LEFT_OUT = (
    "Every figure on this page is covered by the guarantee or public anyway. Exact scores, comparisons with "
    "true clusters and the like are left out."
)


def tells_choices(run: RunRecord) -> bool:
    """Whether which model a client uses follows from what was released, and that is covered."""
    return run.has_privacy and run.plan.unit is not Unit.CLIENT and not run.knows_truth


def tells_times(unit: Unit) -> bool:
    """Whether how long a run took may be told to everybody."""
    return unit.within_client


def all_tell_times(comparison: Comparison) -> bool:
    """The same of all its runs at once: they share a machine, and where one is slow, others beside it are."""
    return all(tells_times(run.plan.unit) for run in comparison.runs)


def has_outside(run: RunRecord) -> bool:
    """Whether its page shows anything that the guarantee does not cover."""
    known = any(client.true_cluster is not None for client in run.clients)
    timed = run.finished and not tells_times(run.plan.unit)
    chosen = bool(run.clusters) and not tells_choices(run)
    return not run.has_privacy or run.is_exact or known or chosen or timed


def public_run(run: RunRecord, *, timed: bool = True) -> RunRecord:
    """The run without everything that is outside its guarantee.

    Args:
        timed: whether runs beside it let how long it took be told.

    Raises:
        InputError: there is no guarantee, so nothing would be left.
    """
    _check_has_privacy(run.has_privacy, run.name)
    shown = tells_choices(run)

    rounds = [replace(line, accuracy=_inside(line.accuracy), loss=None) for line in run.rounds]
    result = run.result
    if result is not None:
        result = replace(
            result,
            accuracy=_inside(result.accuracy),
            bounded_score=_inside(result.bounded_score),
            scores={name: score for name, score in result.scores.items() if score.kind == "private"},
            loss=None,
            fairness=None,
            clusters=result.clusters if shown else {},
            cluster_accuracy=None,
            clusters_found=None,
            groups=None,
            minority_found=None,
            clustering_accuracy=None,
            whole_tests=None,
        )
        if not timed or not tells_times(run.plan.unit):
            result = replace(result, seconds=math.nan, sample_gradients_per_second=math.nan)
    return replace(
        run,
        clients=tuple(replace(client, true_cluster=None) for client in run.clients),
        rounds=tuple(line if shown else replace(line, clusters={}) for line in rounds),
        result=result,
        public=True,
    )


def _inside(spread: Spread | None) -> Spread | None:
    return spread if spread is not None and spread.is_private else None


def public_comparison(comparison: Comparison) -> Comparison:
    """The comparison without everything that is outside the guarantees of its runs.

    Raises:
        InputError: one of them has no guarantee.
    """
    _check_has_privacy(comparison.has_privacy, comparison.name)
    timed = all_tell_times(comparison)
    return replace(
        comparison,
        settings=tuple(_public_setting(setting, timed) for setting in comparison.settings),
        verdict=comparison.verdict
        if all(each.row.kind == "private" for each in comparison.settings)
        else None,
        public=True,
    )


def _check_has_privacy(has_privacy: bool, name: str) -> None:
    if not has_privacy:
        raise InputError(
            f"--public: {name} released figures without privacy (its epsilon is infinite), so no guarantee "
            "covers what the page would show; allowed: runs with a finite epsilon"
        )


def _public_setting(setting: Setting, timed: bool) -> Setting:
    row = replace(
        setting.row, worst_cluster=None, disparity=math.nan, f_acc=None, f_loss=None, clusters_found=None
    )
    if setting.row.kind != "private":
        none = math.nan
        row = replace(row, reached=none, reached_std=None, worst_client=none, best_client=none)
        row = replace(row, scores={}, worst_rmse=None, best_rmse=None)
    if not timed:
        row = replace(row, seconds=math.nan)
    return replace(setting, row=row, runs=tuple(public_run(run, timed=timed) for run in setting.runs))
