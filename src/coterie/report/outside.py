"""What stands outside the guarantee: marked on a page for its owner, left out of one for everybody.

Outside are scores that were computed exactly, whatever compares with the true clusters or with models that
were trained without privacy, and, where clients are protected, which model each of them uses. Numbers of
clients and records, the schedule and timings are public anyway.
"""

import math
from dataclasses import replace

from coterie.experiment.metrics import Spread
from coterie.privacy import Unit
from coterie.report.grid import CellRun, Comparison, Setting
from coterie.report.record import RoundLine, RunRecord

MUST_NOT = (
    "This page must not be published: figures that are marked “outside the guarantee” were computed from "
    "private records without noise. coterie report --public writes public.html, which has none of them."
)
LEFT_OUT = (
    "Every figure on this page is covered by the guarantee or public anyway. Exact scores, comparisons with "
    "true clusters and the like are left out."
)


def tells_choices(run: RunRecord) -> bool:
    """Whether which model a client uses follows from what was released."""
    return run.plan.unit is not Unit.CLIENT and not run.knows_truth


def has_outside(run: RunRecord) -> bool:
    """Whether its page shows anything that the guarantee does not cover."""
    known = any(client.true_cluster is not None for client in run.clients)
    return run.is_exact or known or (bool(run.clusters) and not tells_choices(run))


def public_run(run: RunRecord) -> RunRecord:
    """The run without everything that is outside its guarantee."""
    shown = tells_choices(run)

    def told(line: RoundLine) -> RoundLine:
        clusters = line.clusters if shown else {}
        return replace(line, accuracy=_inside(line.accuracy), loss=None, clusters=clusters)

    result = run.result
    if result is not None:
        result = replace(
            result,
            accuracy=_inside(result.accuracy),
            loss=None,
            fairness=None,
            clusters=result.clusters if shown else {},
        )
    return replace(
        run,
        clients=tuple(replace(client, true_cluster=None) for client in run.clients),
        rounds=tuple(map(told, run.rounds)),
        result=result,
        public=True,
    )


def _inside(spread: Spread | None) -> Spread | None:
    return spread if spread is not None and spread.is_private else None


def public_comparison(comparison: Comparison) -> Comparison:
    """The comparison without everything that is outside the guarantees of its runs."""
    return replace(
        comparison,
        settings=tuple(map(_public_setting, comparison.settings)),
        example=None if comparison.example is None else public_run(comparison.example),
        public=True,
    )


def _public_setting(setting: Setting) -> Setting:
    row = replace(
        setting.row, worst_cluster=None, disparity=math.nan, f_acc=None, f_loss=None, clusters_found=None
    )
    if setting.row.kind != "private":
        row = replace(row, accuracy=math.nan, accuracy_std=None, worst_client=math.nan, best_client=math.nan)
    return replace(setting, row=row, runs=tuple(map(_public_cell, setting.runs)))


def _public_cell(run: CellRun) -> CellRun:
    accuracy = _inside(run.result.accuracy)
    rounds = tuple(replace(line, accuracy=_inside(line.accuracy), loss=None) for line in run.rounds)
    result = replace(
        run.result,
        accuracy=accuracy,
        loss=None,
        fairness=None,
        cluster_accuracy=None,
        clusters_found=None,
        groups=None,
        minority_found=None,
        clustering_accuracy=None,
        whole_tests=None,
    )
    return replace(run, result=result, rounds=rounds, has_report=False)
