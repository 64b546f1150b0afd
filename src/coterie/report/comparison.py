"""The report of a comparison: runs side by side."""

import math
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from coterie.experiment.comparison import Row
from coterie.experiment.folder import RunFolder
from coterie.experiment.scores import SCORES
from coterie.experiment.shown import release_table
from coterie.experiment.verify import RunClaim, with_claim
from coterie.files import write_text
from coterie.report import grid_figures, words
from coterie.report.clusters import Clusters
from coterie.report.drawing import Figure, chip
from coterie.report.grid import Comparison, Setting, read_comparison
from coterie.report.numbers import capitalised, epsilon, fixed, listed, seconds
from coterie.report.outside import (
    LEFT_OUT,
    MUST_NOT,
    MUST_NOT_UNBOUNDED,
    all_tell_times,
    public_comparison,
)
from coterie.report.page import page
from coterie.report.record import Measure, RunRecord
from coterie.table import NONE, Table

TALL = 9
"""Settings from which there is room for two figures beside that of all settings."""


def write_comparison_report(folder: Path, *, public: bool = False) -> Path:
    """Write `report.html` of a comparison, with what failed, and return its path.

    Args:
        public: write `public.html` instead, without any figure outside the guarantees.
    """
    comparison = read_comparison(folder)
    target = folder / ("public.html" if public else "report.html")
    page = comparison_report(public_comparison(comparison) if public else comparison)
    claims = {run.name: RunClaim.of(run.outcome.folder) for run in comparison.runs}
    write_text(target, with_claim(page, claims))
    return target


def comparison_figures(folder: Path, *, public: bool = False) -> list[Figure]:
    """The figures of the page, in its order."""
    comparison = read_comparison(folder)
    return grid_figures.figures_of(public_comparison(comparison) if public else comparison)


def comparison_report(comparison: Comparison) -> str:
    """The whole page."""
    runs, settings = comparison.runs, comparison.settings
    judged = [setting for setting in settings if not math.isnan(setting.row.reached)]
    told = comparison.is_exact or not all_tell_times(comparison)
    must_not = "" if comparison.has_privacy and not told else MUST_NOT
    own = any(cell.experiment.own_records for cell in comparison.sweep.cells())
    return page(
        "comparison",
        _title(comparison),
        comparison.name,
        comparison=comparison,
        best=max(judged, key=lambda each: each.row.reached, default=None),
        setting=words.setting,
        LEFT_OUT=LEFT_OUT,
        forbidden=(must_not if comparison.has_privacy else MUST_NOT_UNBOUNDED) if own else "",
        promises=[(words.setting(each.values), each.row.guarantee) for each in settings],
        releases=_releases(comparison),
        results=_results(comparison),
        verdict=comparison.verdict.lines if comparison.verdict else [],
        figures=grid_figures.figures_of(comparison),
        beside=2 if len(settings) >= TALL else 1,
        shared=_shared(comparison),
        runs=_runs(comparison),
        warned=[(run.name, warning) for run in runs for warning in run.warnings],
        warned_runs=sum(bool(run.warnings) for run in runs),
        failed=[(failure.cell.name, str(failure)) for failure in comparison.failures],
    )


def _title(comparison: Comparison) -> str:
    choices = {key: values for key, values in comparison.sweep.grid.items() if len(values) > 1}
    if not choices:
        return "One setting"
    key, names = next(iter(choices.items()))
    if key == "algorithm.name" and len(names) <= 5:
        return f"{listed(list(map(str, names)))}, side by side"
    return f"Runs by {words.key_name(key)}"


def _releases(comparison: Comparison) -> Table:
    """One row for every kind of release of every setting."""
    tables = [
        (words.setting(each.values), release_table(each.runs[0].guarantee)) for each in comparison.settings
    ]
    rows = [
        {"Setting": name, **dict(zip(told.headings, row, strict=True))}
        for name, told in tables
        for row in told.rows
    ]
    return Table.of(rows, "Every kind of release, setting by setting", words=["Part", "What is released"])


def _results(comparison: Comparison) -> Table:
    measure, settings = comparison.measure, comparison.settings
    several = any(setting.row.runs > 1 for setting in settings)
    named = words.headings(comparison.sweep.varying or ["setting"], ["Runs", "Noise", "Disparity"])
    first, *others = named
    pooled = [(name, words) for name, words in SCORES.items() if name != "accuracy"]
    rows = []
    for setting in settings:
        row = setting.row
        spread = "" if row.reached_std is None else f" ± {measure.bare(row.reached_std)}"
        strong = Markup("<strong>{}</strong>").format(f"{measure.text(row.reached)}{spread}")
        rows.append(
            {
                named[first]: _chip(comparison, setting),
                **{named[key]: str(setting.values[key]) for key in others},
                **({"Runs": str(row.runs)} if several else {}),
                f"Mean {measure.name}": NONE if math.isnan(row.reached) else strong,
                **{capitalised(words.name): words.text(row.scores.get(name)) for name, words in pooled},
                **_of_clients(row, measure),
                "F_loss": fixed(row.f_loss),
                "Clusters found": _clusters_found(setting),
                "Proven epsilon": epsilon(row.epsilon),
                "Noise": fixed(row.noise_multiplier),
                _time(comparison): seconds(row.seconds),
            }
        )
    over = (
        "Means over seeds; after ± the standard deviation between seeds" if several else "One run per setting"
    )
    return Table.of(rows, over + ("" if comparison.public else "; all on held-out records")).without_empty()


def _of_clients(row: Row, measure: Measure) -> dict[str, str]:
    """The worst and the best client; of a regression by their errors."""
    if row.is_regression:
        ends = {"Worst client’s RMSE": row.worst_rmse, "Best client’s RMSE": row.best_rmse}
        return {name: SCORES["rmse"].text(value) for name, value in ends.items()}
    return {
        "Worst client": measure.text(row.worst_client),
        "Best client": measure.text(row.best_client),
        "Worst cluster": measure.text(row.worst_cluster),
        "Disparity": measure.bare(row.disparity),
        "F_acc": measure.bare(row.f_acc),
    }


def _time(comparison: Comparison) -> str:
    return "Time" if all_tell_times(comparison) else "Time (outside the guarantee)"


def _clusters_found(setting: Setting) -> str:
    found, several = setting.row.clusters_found, setting.row.runs > 1
    if found is not None and all(run.knows_truth for run in setting.runs):
        return "given"
    if found is None or not any(Clusters(run).looked_for for run in setting.runs):
        return NONE
    return f"{found} of {setting.row.runs}" if several else "yes" if found else "no"


def _chip(comparison: Comparison, setting: Setting) -> str:
    if not comparison.sweep.varying:
        return "all runs"
    text = str(setting.values[comparison.sweep.varying[0]])
    return chip(text, setting.colour) if comparison.leading == comparison.sweep.varying[0] else text


def _shared(comparison: Comparison) -> list[tuple[str, str]]:
    """What the grid left alone, as it was in every run."""
    if not comparison.runs:
        return []
    varied = {key.partition(".")[0] for key, values in comparison.sweep.grid.items() if len(values) > 1}
    return [(name, text) for name, text in words.what_ran(comparison.runs[0]) if name.lower() not in varied]


def _runs(comparison: Comparison) -> Table:
    measure, named = comparison.measure, words.headings(list(comparison.sweep.grid))
    values = {cell.name: cell.values for cell in comparison.sweep.cells()}
    rows = [
        {
            "Report": run.name if comparison.public else _link(run),
            **{named[key]: str(value) for key, value in values[run.name].items()},
            f"Mean {measure.name}": measure.text(run.accuracy.mean if run.accuracy else None),
            "Worst client": measure.text(run.accuracy.min if run.accuracy else None),
            _time(comparison): seconds(run.outcome.seconds),
        }
        for run in comparison.runs
    ]
    return Table.of(rows, "Every finished run", words=list(named.values())).without_empty()


def _link(run: RunRecord) -> str:
    if not RunFolder(run.outcome.folder).report.exists():
        return run.name
    return Markup('<a href="cells/{}/report.html">{}</a>').format(quote(run.name), run.name)
