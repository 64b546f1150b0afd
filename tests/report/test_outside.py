"""What is outside the guarantee is marked on a run's page, and absent from the page that is for everybody."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from html_outline import outline

from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.sweep import Part, Sweep
from coterie.files import read_json, read_lines, write_json, write_text
from coterie.privacy import Budget, Custody, Ledger, PrivacyPlan, guarantee
from coterie.privacy.plan import canonical_json
from coterie.report.comparison import comparison_report, write_comparison_report
from coterie.report.grid import read_comparison
from coterie.report.outside import LEFT_OUT, MUST_NOT, MUST_NOT_UNBOUNDED, public_comparison, public_run
from coterie.report.record import read_run
from coterie.report.run import run_report, write_run_report

BADGE = "outside the guarantee"
DELTA = 4e-4
OWN = {"data": {"name": "folder", "path": "hospitals"}, "federation": {"kind": "natural"}}


def page(folder: Path, *, public: bool = False) -> str:
    return outline(write_run_report(folder, public=public).read_text(encoding="utf-8")).text


def make_private(folder: Path) -> None:
    """The scores of this folder, as if they were noisy sums within the guarantee."""
    files = RunFolder(folder)
    result = read_json(files.result)
    private = {"kind": "private", "interval": [0.1, 0.9]}
    result["accuracy"].update(private)
    result.update(loss=None, fairness=None, cluster_accuracy=None)
    write_json(files.result, result)
    lines = [{**line, "loss": None} for line in read_lines(files.metrics)]
    for line in lines:
        line["accuracy"].update(private)
    write_text(files.metrics, "".join(f"{canonical_json(line)}\n" for line in lines))


def test_figures_outside_the_guarantee_are_marked(run_folder: Callable[..., Path]) -> None:
    html = write_run_report(run_folder()).read_text(encoding="utf-8")
    marked = re.findall(r"<(?:h2|h3|dt)[^>]*>([^<]*)(?:<span class=\"badge\">|</dt>.*?</div>)", html)
    for heading in (
        "Clients",
        "Accuracy against round",
        "Assignment against the truth",
        "Releases of round 1",
    ):
        assert heading in marked, heading
    tiles = re.findall(r"<div><dt>([^<]*)</dt>(.*?)</div>", html)
    assert {name for name, rest in tiles if BADGE in rest} == {
        "Mean accuracy",
        "Worst cluster",
        "Worst client",
        "Best client",
        "Clusters found",
    }
    assert "Epsilon spent against round<" in html, "an epsilon is what the guarantee states"


def test_a_page_about_own_records_says_at_its_top_that_it_must_not_be_published(
    run_folder: Callable[..., Path],
) -> None:
    text = page(run_folder("own", experiment=OWN, truth=None))
    assert MUST_NOT in text
    assert text.index(MUST_NOT) < text.index("Guarantee")
    assert MUST_NOT not in page(run_folder("published"))


def test_private_scores_are_inside(run_folder: Callable[..., Path]) -> None:
    folder = run_folder(experiment=OWN, truth=None)
    make_private(folder)
    for public in (False, True):
        text = page(folder, public=public)
        assert MUST_NOT not in text
        assert "10.0% to 90.0%" in text
        assert text.count(BADGE) == text.count("Measured outside the guarantee"), "a caveat of this folder"


def test_the_public_page_has_no_figure_outside_the_guarantee(run_folder: Callable[..., Path]) -> None:
    folder = run_folder()
    text = page(folder, public=True)
    assert RunFolder(folder).public.exists()
    assert not RunFolder(folder).report.exists()
    assert LEFT_OUT in text
    assert read_json(RunFolder(folder).guarantee)["line"] in text
    for heading in ("Guarantee", "Where the budget goes", "Epsilon spent against round", "Clusters"):
        assert heading in text, heading
    run = read_run(folder)
    assert run.accuracy is not None
    exact = {f"{100 * value:.1f}%" for value in run.accuracy.per_client.values()}
    exact |= {f"{100 * line.accuracy.mean:.1f}%" for line in run.rounds if line.accuracy}
    for figure in exact:
        assert figure not in text, figure
    text = text.replace(LEFT_OUT, "")
    for word in ("in truth", "the truth", "rue cluster", "F_acc", "Disparity", "Worst cl", "Mean loss"):
        assert word not in text, word


def test_nothing_outside_the_guarantee_changes_the_public_page(run_folder: Callable[..., Path]) -> None:
    """Other scores, another truth, other fairness: the page for everybody stays the same, byte for byte."""
    first = run_folder("a/run")
    other = run_folder("b/run", level=0.4, truth=(0, 1, 0, 1, 0, 1))
    pages = [write_run_report(folder, public=True).read_bytes() for folder in (first, other)]
    assert pages[0] == pages[1]
    assert write_run_report(first).read_bytes() != write_run_report(other).read_bytes()


def test_own_choices_of_protected_clients_are_left_out(run_folder: Callable[..., Path]) -> None:
    folder = run_folder(findings=False, truth=None)
    run = read_run(folder)
    experiment = run.experiment.model_copy(
        update={"algorithm": run.experiment.algorithm.model_copy(update={"name": "oracle"})}
    )
    told = dataclasses.replace(run, experiment=experiment)
    assert public_run(run).clusters == run.clusters, "released, by record"
    assert public_run(told).clusters == {}, "the true ones, which it was given"
    assert "Clusters" not in outline(run_report(public_run(told))).text.split("What ran")[0]


def test_a_comparison_marks_what_is_exact_and_leaves_it_out_in_public(
    comparison_folder: Callable[..., Path],
) -> None:
    folder = comparison_folder({"algorithm.name": ["r-dpcfl", "local"]})
    full = outline(write_comparison_report(folder).read_text(encoding="utf-8")).text
    assert f"Results{BADGE}" in full
    assert "85.0%" in full or "90.0%" in full
    path = write_comparison_report(folder, public=True)
    text = outline(path.read_text(encoding="utf-8")).text
    assert path == folder / "public.html"
    assert LEFT_OUT in text
    assert "Runs on the same data add up" in text
    assert "Proven epsilon" in text
    assert not re.search(r"\d\d\.\d%", text)
    for word in ("Worst client", "Disparity", "F_acc", "Clusters found", "Side by side", f"Results{BADGE}"):
        assert word not in text, word


@pytest.mark.parametrize("public", [False, True])
def test_a_comparison_on_own_records_says_that_it_must_not_be_published(
    comparison_folder: Callable[..., Path], public: bool
) -> None:
    folder = comparison_folder({"algorithm.name": ["local"]}, base=OWN, truth=None)
    text = outline(write_comparison_report(folder, public=public).read_text(encoding="utf-8")).text
    assert (MUST_NOT in text) is not public


UNITS: dict[str, dict[str, Any]] = {
    "client": {
        "algorithm": {"name": "dp-fedavg", "rate": 0.5},
        "privacy": {"unit": "client", "epsilon": 8.0, "delta": DELTA},
    },
    "worker": {
        "algorithm": {"name": "dp-ogl", "period": 2, "rate": 0.7, "noise": 2.0, "iterations": 1},
        "federation": {"kind": "groups", "structure": "ring", "workers": 6, "groups": 3},
        "privacy": {"unit": "worker", "epsilon": 50.0, "delta": DELTA},
    },
}


def took(folder: Path, seconds: float) -> None:
    files = RunFolder(folder)
    content = read_json(files.result)
    write_json(files.result, {**content, "seconds": seconds, "sample_gradients_per_second": 9e5 / seconds})


@pytest.mark.parametrize("unit", UNITS)
def test_how_long_a_run_took_tells_nobody_who_was_sampled(run_folder: Callable[..., Path], unit: str) -> None:
    folder = run_folder(experiment=UNITS[unit], findings=False, truth=None)
    pages = {False: set(), True: set()}
    for seconds in (2.0, 700.0):
        took(folder, seconds)
        run = read_run(folder)
        pages[False].add(run_report(run))
        pages[True].add(run_report(public_run(run)))
    assert len(pages[False]) == 2, "its owner may know"
    assert len(pages[True]) == 1
    assert "second" not in outline(pages[True].pop()).text


@pytest.mark.parametrize("unit", UNITS)
def test_how_long_the_runs_of_a_comparison_took_is_left_out_too(
    comparison_folder: Callable[..., Path], unit: str
) -> None:
    """Also of its record-level runs, which ran beside the others."""
    others = {"set": UNITS[unit], "label": "whole", "grid": {"schedule.lr": [0.1]}}
    records = {"set": {"algorithm.name": "local"}, "label": "records", "grid": {"schedule.lr": [0.1]}}
    parts = [Part(part["grid"], part["set"], part["label"]) for part in (others, records)]
    folder = comparison_folder({}, sweep=Sweep.of_parts({"schedule": {"rounds": 6}}, parts), truth=None)
    pages = {False: set(), True: set()}
    for seconds in (2.0, 700.0):
        for cell in (folder / "cells").iterdir():
            took(cell, seconds)
        comparison = read_comparison(folder)
        pages[False].add(comparison_report(comparison))
        pages[True].add(comparison_report(public_comparison(comparison)))
    assert (len(pages[False]), len(pages[True])) == (2, 1)
    assert "Time" not in outline(pages[True].pop()).text


def test_a_page_that_tells_who_was_sampled_must_not_be_published(
    run_folder: Callable[..., Path], comparison_folder: Callable[..., Path]
) -> None:
    """By how long it took, where every score is noisy."""
    run = run_folder(experiment={**UNITS["client"], **OWN}, findings=False, truth=None)
    base = {**UNITS["client"], **OWN}
    several = comparison_folder({"schedule.lr": [0.1]}, base=base, findings=False, truth=None)
    for folder in (run, *(several / "cells").iterdir()):
        make_private(folder)
        result = read_json(RunFolder(folder).result)
        write_json(RunFolder(folder).result, {**result, "clusters": {}})
    text = page(run)
    assert MUST_NOT in text
    assert f"per second ({BADGE})" in text
    text = outline(write_comparison_report(several).read_text(encoding="utf-8")).text
    assert MUST_NOT in text
    assert f"Time ({BADGE})" in text


def without_bound(folder: Path) -> Path:
    """The folder, as if one of its clients had no budget."""
    files = RunFolder(folder)
    plan = PrivacyPlan.from_json(read_json(files.plan))
    names = [unit.subject for unit in plan.units]
    budgets = {name: Budget(math.inf if name == "eve" else 8.0, DELTA) for name in names}
    units = [
        dataclasses.replace(
            unit,
            releases=tuple(
                dataclasses.replace(
                    release, mechanism=dataclasses.replace(release.mechanism, noise_multiplier=0.0)
                )
                for release in unit.releases
                if release.name == "training"
            ),
        )
        if unit.subject == "eve"
        else unit
        for unit in plan.units
    ]
    plan = dataclasses.replace(plan, units=tuple(units))
    promise = guarantee(plan, budget=budgets, held_by=Custody.ONE_PROCESS)
    assert math.isinf(promise.epsilon)
    write_json(files.plan, plan.to_json())
    write_json(files.guarantee, promise.to_json())
    files.ledger.unlink()
    with Ledger.open(files.ledger, plan, budget=budgets, accountant="rdp"):
        pass
    if files.finished:
        write_json(files.result, {**read_json(files.result), "epsilon": "inf"})
    return folder


def test_no_public_page_tells_of_releases_without_privacy(
    run_folder: Callable[..., Path], comparison_folder: Callable[..., Path]
) -> None:
    folder = without_bound(run_folder(experiment=OWN, truth=None))
    with pytest.raises(InputError, match="--public: run released figures without privacy"):
        write_run_report(folder, public=True)
    assert not RunFolder(folder).public.exists()
    several = comparison_folder({"algorithm.name": ["local", "global"]}, base=OWN, truth=None)
    without_bound(several / "cells" / "name=global")
    with pytest.raises(InputError, match="--public: comparison released figures without privacy"):
        write_comparison_report(several, public=True)
    assert not (several / "public.html").exists()


def test_a_run_begun_without_privacy_keeps_its_comparison_from_everybody(
    comparison_folder: Callable[..., Path],
) -> None:
    folder = comparison_folder({"algorithm.name": ["local", "global"]}, base=OWN, truth=None)
    RunFolder(without_bound(folder / "cells" / "name=global")).result.unlink()
    with pytest.raises(InputError, match="without privacy"):
        write_comparison_report(folder, public=True)


def test_what_was_released_without_privacy_is_marked_and_must_not_be_published(
    run_folder: Callable[..., Path], comparison_folder: Callable[..., Path]
) -> None:
    """Even where every score is noisy and no truth is known."""
    folder = run_folder(experiment=OWN, truth=None)
    make_private(folder)
    assert "within the guarantee" in page(folder)
    text = page(without_bound(folder))
    assert MUST_NOT_UNBOUNDED in text
    assert "within the guarantee" not in text
    html = RunFolder(folder).report.read_text(encoding="utf-8")
    for heading in ("Releases of round 1", "Separation"):
        assert re.search(rf"<h3>{heading}[^<]*<span class=\"badge\">", html), heading
    tiles = re.findall(r"<div><dt>([^<]*)</dt>(.*?)</div>", html)
    assert "Clusters found" in {name for name, rest in tiles if BADGE in rest}
    several = comparison_folder({"algorithm.name": ["local"]}, base=OWN, truth=None)
    without_bound(several / "cells" / "name=local")
    make_private(several / "cells" / "name=local")
    assert MUST_NOT_UNBOUNDED in write_comparison_report(several).read_text(encoding="utf-8")
