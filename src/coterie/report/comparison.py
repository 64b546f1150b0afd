"""The report of a comparison: runs side by side."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from coterie import __version__
from coterie.experiment.claim import RunClaim, with_claim
from coterie.experiment.folder import write_text
from coterie.report import chart, grid_figures, words
from coterie.report.grid import CellRun, Comparison, Setting, read_comparison
from coterie.report.markup import Child, Markup, tag
from coterie.report.numbers import NONE, count, epsilon, fixed, seconds
from coterie.report.outside import (
    LEFT_OUT,
    MUST_NOT,
    MUST_NOT_UNBOUNDED,
    all_tell_times,
    public_comparison,
)
from coterie.report.page import (
    Column,
    facts,
    folded,
    header,
    notice,
    page,
    section,
    side_by_side,
    stacked,
    table,
)

MANY_RUNS = 40
"""From here on the table of runs starts folded."""

TALL = 9


def write_comparison_report(folder: Path, *, public: bool = False) -> Path:
    """Write `report.html` of a comparison, with what failed, and return its path.

    Args:
        public: write `public.html` instead, without any figure outside the guarantees.
    """
    comparison = read_comparison(folder)
    target = folder / ("public.html" if public else "report.html")
    page = comparison_report(public_comparison(comparison) if public else comparison)
    claims = {run.cell.name: RunClaim.of(run.result.folder) for run in _finished(comparison)}
    write_text(target, with_claim(page, claims))
    return target


def comparison_report(comparison: Comparison) -> str:
    """The whole page."""
    title = _title(comparison)
    body = [
        header("comparison", title, _lede(comparison), comparison.name),
        *_notices(comparison),
        _results(comparison),
        _figures(comparison),
        _guarantees(comparison),
        _common(comparison),
        _runs(comparison),
        _warnings(comparison),
        _failures(comparison),
        section(
            "Sweep file",
            folded("Base and grid of this comparison", tag("pre", tag("code", comparison.sweep.to_yaml()))),
        ),
    ]
    return page(title, "coterie comparison", body, f"coterie {__version__}")


def _title(comparison: Comparison) -> str:
    keys = [key for key, values in comparison.sweep.grid.items() if len(values) > 1]
    if not keys:
        return "One setting"
    shown = comparison.sweep.grid[keys[0]]
    names = [str(value) for value in shown]
    if keys[0] == "algorithm.name" and len(names) <= 5:
        return f"{', '.join(names[:-1])} and {names[-1]}, side by side"
    return f"Runs by {words.key_name(keys[0])}"


def _lede(comparison: Comparison) -> str:
    finished = comparison.cells - len(comparison.failures)
    done = f"{finished} of {count(comparison.cells, 'run')} finished"
    if not comparison.settings:
        return f"{done}."
    judged = [setting for setting in comparison.settings if not math.isnan(setting.row.accuracy)]
    if not judged:
        return f"{done}; no score is shown."
    best = max(judged, key=lambda each: each.row.accuracy)
    reached = comparison.measure.text(best.row.accuracy)
    name = words.setting(best.values)
    exact = " (exact, outside the guarantee)" if best.row.kind == "exact" else ""
    return f"{done}. The highest mean {comparison.measure.name} is that of {name}: {reached}{exact}."


def _is_exact(comparison: Comparison) -> bool:
    """Whether figures outside the guarantees are shown."""
    return not comparison.public and any(setting.row.kind == "exact" for setting in comparison.settings)


def _notices(comparison: Comparison) -> Iterator[Markup]:
    if comparison.public:
        yield notice("info", LEFT_OUT)
    elif any(cell.experiment.own_records for cell in comparison.sweep.cells()):
        if not comparison.has_privacy:
            yield notice("warn", MUST_NOT_UNBOUNDED)
        elif _is_exact(comparison) or not all_tell_times(comparison):
            yield notice("warn", MUST_NOT)
    if comparison.failures:
        yield notice(
            "warn", f"{count(len(comparison.failures), 'run')} did not finish; see the end of this page."
        )
    warned = sum(bool(run.result.warnings) for run in _finished(comparison))
    if warned:
        yield notice("warn", f"{count(warned, 'run')} with warnings; see the end of this page.")


def _time_column(comparison: Comparison) -> Column:
    return Column("Time" if all_tell_times(comparison) else "Time (outside the guarantee)", figures=True)


def _finished(comparison: Comparison) -> list[CellRun]:
    return [run for setting in comparison.settings for run in setting.runs]


def _results(comparison: Comparison) -> Markup | None:
    if not comparison.settings:
        return None
    measure, settings = comparison.measure, comparison.settings
    several = any(setting.row.runs > 1 for setting in settings)
    first, *others = comparison.varying or ["setting"]
    columns = [
        Column(words.key_name(first)),
        *(Column(words.key_name(key), figures=True) for key in others),
        *([Column("Runs", figures=True)] if several else []),
        Column(f"Mean {measure.name}", figures=True),
        Column("Worst client", figures=True),
        Column("Best client", figures=True),
        Column("Worst cluster", figures=True),
        Column("Disparity", figures=True),
        Column("F_acc", figures=True),
        Column("F_loss", figures=True),
        Column("Clusters found", figures=True),
        Column("Proven epsilon", figures=True),
        Column("Noise", figures=True),
        _time_column(comparison),
    ]
    rows = []
    for setting in settings:
        row = setting.row
        spread = "" if row.accuracy_std is None else f" ± {_bare(comparison, row.accuracy_std)}"
        rows.append(
            [
                _chip(comparison, setting),
                *(str(setting.values[key]) for key in others),
                *([str(row.runs)] if several else []),
                NONE if math.isnan(row.accuracy) else tag("strong", f"{measure.text(row.accuracy)}{spread}"),
                measure.text(row.worst_client),
                measure.text(row.best_client),
                measure.text(row.worst_cluster),
                _bare(comparison, row.disparity),
                _bare(comparison, row.f_acc),
                fixed(row.f_loss),
                _clusters_found(setting),
                epsilon(row.epsilon),
                fixed(row.noise_multiplier),
                seconds(row.seconds),
            ]
        )
    over = (
        "Means over seeds; after ± the standard deviation between seeds" if several else "One run per setting"
    )
    columns, rows = _without_empty(columns, rows)
    if comparison.public:
        return section("Results", table(over, columns, rows))
    return section(
        "Results",
        table(f"{over}; all on held-out records", columns, rows),
        outside=_is_exact(comparison),
        intro="Disparity is the distance between best and worst client in points. F compares clients by what "
        "each lacks to the best model of its cluster, trained centrally without privacy. Smaller is fairer.",
    )


def _without_empty(
    columns: Sequence[Column], rows: Sequence[Sequence[Child]]
) -> tuple[list[Column], list[list[Child]]]:
    """The table less the columns in which no row has anything."""
    kept = [place for place in range(len(columns)) if any(row[place] != NONE for row in rows)]
    return [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]


def _bare(comparison: Comparison, value: float | None) -> str:
    if value is None or math.isnan(value):
        return NONE
    return f"{100 * value:.1f}" if comparison.measure.is_share else fixed(value)


def _clusters_found(setting: Setting) -> str:
    if setting.row.clusters_found is None:
        return NONE
    if all(run.knows_truth for run in setting.runs):
        return "given"
    found = setting.row.clusters_found
    if found is None or not any(run.looked_for_clusters for run in setting.runs):
        return NONE
    if setting.row.runs == 1:
        return "yes" if found else "no"
    return f"{found} of {setting.row.runs}"


def _chip(comparison: Comparison, setting: Setting) -> Child:
    if not comparison.varying:
        return "all runs"
    text = str(setting.values[comparison.varying[0]])
    if comparison.leading != comparison.varying[0]:
        return text
    return chart.chip(text, setting.colour)


def _figures(comparison: Comparison) -> Markup | None:
    by_setting = grid_figures.accuracy_by_setting(comparison)
    if by_setting is None:
        return None
    others = [*grid_figures.accuracy_against_epsilon(comparison), *grid_figures.curves(comparison)]
    # The dots grow with the number of settings: beside a tall card there is room for two.
    beside = 2 if len(comparison.settings) >= TALL else 1
    exact = _is_exact(comparison)
    right = [figure.html(exact) for figure in others[:beside]]
    rest = [figure.html(exact) for figure in others[beside:]]
    return section(
        "Side by side",
        side_by_side([by_setting.html(exact), *([stacked(right)] if right else [])]),
        side_by_side(rest) if rest else None,
    )


def _guarantees(comparison: Comparison) -> Markup | None:
    if not comparison.settings:
        return None
    promises = [
        tag("li", tag("strong", words.setting(setting.values)), setting.row.guarantee)
        for setting in comparison.settings
    ]
    return tag(
        "section",
        tag("h2", "Guarantee of every row"),
        tag("p", comparison.total.text) if comparison.total else None,
        tag("ul", promises, class_="sentences"),
        class_="promise",
    )


def _common(comparison: Comparison) -> Markup | None:
    """What the grid left alone, as it was in every run."""
    if comparison.example is None:
        return None
    varied = {key.partition(".")[0] for key, values in comparison.sweep.grid.items() if len(values) > 1}
    shared = [(name, text) for name, text in words.what_ran(comparison.example) if name.lower() not in varied]
    return section("What all runs share", facts(shared)) if shared else None


def _runs(comparison: Comparison) -> Markup | None:
    runs = _finished(comparison)
    if not runs:
        return None
    measure = comparison.measure
    rows = [
        [
            _link(run),
            *(str(value) for value in run.cell.values.values()),
            measure.text(run.result.accuracy.mean if run.result.accuracy else None),
            measure.text(run.result.accuracy.min if run.result.accuracy else None),
            seconds(run.result.seconds),
        ]
        for run in runs
    ]
    columns = [
        Column("Report"),
        *(Column(words.key_name(key)) for key in comparison.sweep.grid),
        Column(f"Mean {measure.name}", figures=True),
        Column("Worst client", figures=True),
        _time_column(comparison),
    ]
    columns, rows = _without_empty(columns, rows)
    return section(
        "Runs",
        folded(
            f"All {count(len(runs), 'finished run')}",
            table("Every finished run", columns, rows),
            is_open=len(runs) < MANY_RUNS,
        ),
        outside=_is_exact(comparison),
    )


def _link(run: CellRun) -> Child:
    if not run.has_report:
        return run.cell.name
    return tag("a", run.cell.name, href=f"cells/{quote(run.cell.name)}/report.html")


def _warnings(comparison: Comparison) -> Markup | None:
    warned = [
        (run.cell.name, [tag("div", warning) for warning in run.result.warnings])
        for run in _finished(comparison)
        if run.result.warnings
    ]
    return section("Warnings", facts(warned)) if warned else None


def _failures(comparison: Comparison) -> Markup | None:
    if not comparison.failures:
        return None
    return section(
        "Not finished",
        facts(
            (
                failure.cell.name,
                f"{failure.reason} ({failure.rounds} of "
                f"{count(failure.cell.experiment.schedule.rounds, 'round')} done)",
            )
            for failure in comparison.failures
        ),
    )
