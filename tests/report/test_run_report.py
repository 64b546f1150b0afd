"""The page of a run: it says what holds, shows what there is, and lets nothing in or out."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from pathlib import Path

import pytest
from html_outline import outline

from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.scores import PooledScore, scores_to_json
from coterie.files import read_json, write_json
from coterie.report.drawing import Figure
from coterie.report.figures import FIGURES, accuracy_against_round, epsilon_against_round, separation_scores
from coterie.report.record import mean_over, read_run
from coterie.report.run import run_figures, write_run_report
from painting import painted


def report(folder: Path) -> str:
    return write_run_report(folder).read_text(encoding="utf-8")


def test_the_report_is_well_formed_and_fetches_nothing(run_folder: Callable[..., Path]) -> None:
    html = report(run_folder())
    parsed = outline(html)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(parsed.tags)
    assert not {"src", "srcset", "onload", "onclick"} & {name for name, _ in parsed.attributes}
    assert all(str(value).startswith("#") for name, value in parsed.attributes if name == "href")
    assert not re.search(r"https?:|url\(|@import|//", html)


def test_the_guarantee_is_printed_as_it_stands_with_its_caveats(run_folder: Callable[..., Path]) -> None:
    folder = run_folder()
    stored = read_json(RunFolder(folder).guarantee)
    html = report(folder)
    assert escape(stored["line"]) in html
    assert escape(stored["text"]) in html
    assert "Measured outside the guarantee." in html


def test_all_sections_are_there_for_a_run_that_found_clusters(run_folder: Callable[..., Path]) -> None:
    text = outline(report(run_folder())).text
    for heading in (
        "Guarantee",
        "Overview",
        "Accuracy against round",
        "Epsilon spent against round",
        "Releases of round 1",
        "Separation score by number of clusters",
        "Assignment against the truth",
        "Accuracy of every client",
        "Where the budget goes",
    ):
        assert heading in text
    assert "as in truth, all 6 clients" in text
    assert "6 of 6 clients are in the found cluster that stands for their true one" in text


def test_a_hostile_client_name_stays_text(run_folder: Callable[..., Path]) -> None:
    names = ["<script>alert(1)</script>", '"><b>', "ben & co", "d'an", "eve", "finn"]
    html = report(run_folder(clients=names))
    parsed = outline(html)
    assert not {"script", "b"} & set(parsed.tags)
    assert names[0] in parsed.text


def test_a_run_without_findings_lacks_their_figures(run_folder: Callable[..., Path]) -> None:
    folder = run_folder(findings=False, found=(0,) * 6, experiment={"algorithm": {"name": "global"}})
    text = outline(report(folder)).text
    assert "Releases of round 1" not in text
    assert "Assignment against the truth" not in text
    assert "one for all clients" in text


def test_clusters_that_were_given_are_not_called_found(run_folder: Callable[..., Path]) -> None:
    folder = run_folder(
        findings=False, found=(0, 0, 0, 1, 1, 1), experiment={"algorithm": {"name": "oracle"}}
    )
    text = outline(report(folder)).text
    assert "the true ones, given" in text
    assert "Clusters found" not in text


def test_misplaced_clients_are_counted(run_folder: Callable[..., Path]) -> None:
    text = outline(report(run_folder(found=(1, 1, 0, 0, 0, 0)))).text
    assert "not as in truth: 5 of 6 clients in place" in text


def test_clusters_that_collapsed_are_not_called_one_model_by_design(run_folder: Callable[..., Path]) -> None:
    html = report(run_folder(found=(0,) * 6))
    assert "1 of 2" in outline(html).text
    assert "Assignment against the truth" in html


def test_a_found_cluster_has_the_colour_of_the_true_one_it_stands_for(
    run_folder: Callable[..., Path],
) -> None:
    html = report(run_folder(truth=(0, 0, 0, 1, 1, 1), found=(1, 1, 1, 0, 0, 0)))
    assert re.search(r"fill: var\(--c0\)[^>]*><title>ada: component 1", html)
    assert re.search(r"fill: var\(--c1\)[^>]*><title>finn: component 0", html)


def test_an_unfinished_run_says_so_and_shows_what_there_is(run_folder: Callable[..., Path]) -> None:
    text = outline(report(run_folder(finished=False, done=2))).text
    assert "Unfinished: 2 of 6 rounds are done" in text
    assert "Accuracy against round" in text
    assert "Epsilon so far" in text


@pytest.mark.parametrize("findings", [False, True])
def test_a_run_that_has_only_begun_has_a_report(run_folder: Callable[..., Path], findings: bool) -> None:
    text = outline(report(run_folder(finished=False, done=0, findings=findings))).text
    assert "nothing has been measured yet" in text


def test_rounds_that_were_not_evaluated_are_skipped(run_folder: Callable[..., Path]) -> None:
    folder = run_folder(rounds=7, done=7, every=3)
    outline(report(folder))
    (figure,) = accuracy_against_round(read_run(folder))
    assert list(painted(figure)["mean of all clients"].get_xdata()) == [3, 6, 7]


def test_a_torn_last_line_of_metrics_is_left_out(run_folder: Callable[..., Path]) -> None:
    folder = run_folder(finished=False, done=3)
    with RunFolder(folder).metrics.open("a") as handle:
        handle.write('{"round": 4, "accur')
    assert "Unfinished: 3 of 6 rounds" in outline(report(folder)).text


def test_a_regression_tells_its_errors_and_no_accuracy(run_folder: Callable[..., Path]) -> None:
    folder = run_folder(
        task="regression",
        truth=None,
        experiment={
            "data": {"name": "school"},
            "federation": {"kind": "natural"},
            "model": {"name": "linear"},
        },
    )
    text = outline(report(folder)).text
    assert "Bounded score against round" in text
    assert "Mean bounded score0.875" in text, "as folders tell it that know no errors in the label's units"
    assert "accuracy" not in text.lower().split("experiment file")[0]
    content = read_json(folder / "result.json")
    errors = {"rmse": PooledScore(9.25), "mae": PooledScore(7.5), "r2": PooledScore(0.123)}
    write_json(
        folder / "result.json",
        {**content, "accuracy": None, "scores": scores_to_json(errors), "bounded_score": content["accuracy"]},
    )
    text = outline(report(folder)).text
    assert "is wrong by 9.25 in the label's units" in text
    assert "RMSE9.25" in text
    assert "Mean bounded score0.875" not in text
    for told in ("MAE7.5", "R²0.123"):
        assert told in text


def test_a_run_that_shows_no_clusters_does_not_count_any(run_folder: Callable[..., Path]) -> None:
    folder = run_folder()
    findings = RunFolder(folder).findings
    write_json(findings, {**read_json(findings), "clustered": False})
    text = outline(report(folder)).text
    assert "Clusters foundnoneround 1 shows none; clients are served by" in text
    assert "Chosen: " not in text
    assert "None stands out: a single cluster explains round 1 no worse than" in text


def test_warnings_stand_at_the_top(run_folder: Callable[..., Path]) -> None:
    text = outline(report(run_folder(warnings=("the clusters are not clearly apart",)))).text
    assert text.index("The clusters are not clearly apart.") < text.index("Overview")


def test_one_round_and_one_client_have_a_report(run_folder: Callable[..., Path]) -> None:
    folder = run_folder(
        clients=("ada",),
        truth=None,
        found=(0,),
        rounds=1,
        done=1,
        findings=False,
        experiment={"algorithm": {"name": "local"}},
    )
    assert "1 client, 1 round" in outline(report(folder)).text


def test_a_client_that_missed_round_one_is_not_drawn(run_folder: Callable[..., Path]) -> None:
    folder = run_folder()
    files = RunFolder(folder)
    findings = read_json(files.findings)
    findings["points"][0], findings["responsibilities"][0] = [0.0, 0.0], [0.5, 0.5]
    write_json(files.findings, findings)
    html = report(folder)
    assert "ada: component" not in html
    assert "ben: component" in html


def test_many_clusters_still_have_a_report(run_folder: Callable[..., Path]) -> None:
    names = [f"client-{index}" for index in range(40)]
    folder = run_folder(
        clients=names, truth=[index // 2 for index in range(40)], found=[index % 3 for index in range(40)],
        findings=False,
    )  # fmt: skip
    outline(report(folder))


def test_the_same_folder_gives_the_same_bytes(run_folder: Callable[..., Path]) -> None:
    folder = run_folder()
    assert report(folder) == report(folder)


def test_no_scratch_file_is_left_beside_the_report(run_folder: Callable[..., Path]) -> None:
    folder = run_folder()
    before = {path.name for path in folder.iterdir()}
    write_run_report(folder)
    assert {path.name for path in folder.iterdir()} == before | {"report.html"}


def test_a_folder_without_a_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a run folder, experiment\.yaml is missing"):
        write_run_report(tmp_path)


@pytest.mark.parametrize("name", ["federation", "findings", "metrics"])
def test_a_file_of_another_shape_is_named(run_folder: Callable[..., Path], name: str) -> None:
    folder = run_folder()
    path: Path = getattr(RunFolder(folder), name)
    path.write_text('{"round": 1}\n')
    with pytest.raises(InputError, match=path.name):
        write_run_report(folder)


# --- figures ----------------------------------------------------------------------------------------


def test_epsilon_is_drawn_as_charged_and_below_its_budget(run_folder: Callable[..., Path]) -> None:
    run = read_run(run_folder())
    (figure,) = epsilon_against_round(run)
    lines = painted(figure)
    spent = lines["spent by the client that spent most"]
    assert list(spent.get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert list(spent.get_ydata()) == [line.epsilon for line in run.rounds]
    assert set(lines["budget"].get_ydata()) == {run.experiment.privacy.epsilon}
    low, high = spent.axes.get_ylim()
    assert low == 0
    assert high >= run.experiment.privacy.epsilon


def test_a_line_for_the_mean_and_one_for_each_true_cluster(run_folder: Callable[..., Path]) -> None:
    run = read_run(run_folder())
    (figure,) = accuracy_against_round(run)
    lines = painted(figure)
    assert run.accuracy is not None
    assert lines["mean of all clients"].get_ydata()[-1] == pytest.approx(run.accuracy.mean)
    values = list(run.accuracy.per_client.values())
    assert lines["true cluster 0, turned 0°"].get_ydata()[-1] == pytest.approx(sum(values[:3]) / 3)
    assert lines["true cluster 1, turned 90°"].get_ydata()[-1] == pytest.approx(sum(values[3:]) / 3)


def test_a_bar_for_every_number_of_clusters_that_was_tried(run_folder: Callable[..., Path]) -> None:
    (figure,) = separation_scores(read_run(run_folder()))
    axes = painted(figure).axes
    assert [bar.get_height() for bar in axes.patches] == [4.5, 1.5, 1.25]
    assert [text.get_text() for text in axes.texts] == ["4.5", "1.5", "1.2"]


def test_every_figure_is_registered_by_its_name(run_folder: Callable[..., Path]) -> None:
    drawn = run_figures(run_folder())
    assert [figure.name for figure in drawn] == [
        name for name in FIGURES if name not in ("matrix", "growth", "sizes")
    ]
    public = {figure.name for figure in run_figures(run_folder("other"), public=True)}
    assert public == {"epsilon", "releases", "scores"}


def test_a_figure_that_says_it_is_outside_is_marked_and_left_out_for_everybody(
    run_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Figure("odd", "An odd figure", "caption", lambda axes: None, outside=True)
    monkeypatch.setitem(FIGURES, "odd", ("A new section", lambda run: iter([odd])))
    folder = run_folder()
    assert "An odd figureoutside the guarantee" in outline(report(folder)).text
    public = write_run_report(folder, public=True).read_text(encoding="utf-8")
    assert "An odd figure" not in outline(public).text


def test_every_client_is_a_mark(run_folder: Callable[..., Path]) -> None:
    html = report(run_folder())
    for name in ("ada", "ben", "cleo", "dan", "eve", "finn"):
        assert html.count(f"<title>{name}: ") == 2, "its release and its accuracy"


ODD = {"name": "a", "records": "many", "test_records": None, "true_cluster": None}


@pytest.mark.parametrize("clients", [3, [3], {"a": 1}, [ODD], None])
def test_a_damaged_federation_is_named(run_folder: Callable[..., Path], clients: object) -> None:
    folder = run_folder()
    facts = read_json(folder / "federation.json")
    write_json(folder / "federation.json", {**facts, "clients": clients})
    with pytest.raises(InputError, match=r"federation\.json: not written by this version"):
        read_run(folder)


def test_the_worst_cluster_is_the_one_whose_clients_have_the_lowest_mean(
    run_folder: Callable[..., Path],
) -> None:
    folder = run_folder()
    run = read_run(folder)
    assert run.truth is not None
    assert run.accuracy is not None
    means = {
        cluster: mean_over(
            run.accuracy.per_client, [name for name, own in run.truth.items() if own == cluster]
        )
        for cluster in set(run.truth.values())
    }
    lowest = min(value for value in means.values() if value is not None)
    html = write_run_report(folder).read_text(encoding="utf-8")
    tile = re.search(r"<dt>Worst cluster</dt>(.*?)</div>", html)
    assert tile is not None
    assert f"{lowest:.1%}" in tile[1]
