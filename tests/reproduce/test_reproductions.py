"""Published experiments: declared in files, run in parts, set beside the printed numbers, movable."""

import csv
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import RunResult
from coterie.experiment.verify import verify
from coterie.files import read_json
from coterie.privacy import LedgerError
from coterie.report.record import read_run
from coterie.reproduce import curves, table
from coterie.reproduce.declared import (
    EVERYTHING,
    PublishedExperiment,
    ScaleName,
    Subset,
    find,
    names,
    parse,
    sweep_of,
)
from coterie.reproduce.printed import Printed, read_publication
from coterie.reproduce.running import render, reproduce
from coterie.reproduce.runs import QUANTITIES, Charged
from coterie.reproduce.table import Entry, Line, Reproduction, best_lines
from tiny_reproduction import tiny_text

TINY = tiny_text(
    rounds=4,
    epsilons="[10]",
    algorithms="[{name: r-dpcfl, seeds: [1], set: {algorithm.clusters: 2}}, {name: local, seeds: [1]}]",
    figures="[budgets, rounds]",
    references=2,
)


@pytest.fixture(scope="module")
def tiny() -> Iterator[PublishedExperiment]:
    """A reproduction that is found under its name like those in the package."""
    reproduction = parse("tiny", TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "find", lambda name: reproduction if name == "tiny" else find(name))
        yield reproduction


@pytest.fixture(scope="module")
def finished(tiny: PublishedExperiment, tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    return reproduce(tiny, tmp_path_factory.mktemp("reproduce") / "out")


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("scale", ScaleName)
def test_every_declared_run_is_a_valid_experiment(name: str, scale: ScaleName) -> None:
    reproduction = find(name)
    sweep = sweep_of(reproduction, scale, EVERYTHING)
    assert (sweep is None) == (not reproduction.scales[scale].algorithms)
    for cell in sweep.cells() if sweep else ():
        assert cell.experiment.evaluation.references is False, "the central models are trained once for all"


@pytest.mark.parametrize("name", ["rdpcfl-mnist", "rdpcfl-fmnist"])
def test_the_paper_scale_is_the_papers(name: str) -> None:
    sweep = sweep_of(find(name), ScaleName.PAPER, EVERYTHING)
    assert sweep is not None
    cells = sweep.cells()
    counts = {
        algorithm: sum(cell.values["algorithm.name"] == algorithm for cell in cells)
        for algorithm in sweep.grid["algorithm.name"]
    }
    assert counts["r-dpcfl"] == counts["oracle"] == 15  # five budgets, three seeds
    assert counts["global"] == counts["local"] == counts["mr-mtl"] == counts["dp-ifca"] == 5
    shared = {(cell.experiment.schedule, cell.experiment.privacy.clip) for cell in cells}
    assert len(shared) == 1, "step size and clip are the same for every algorithm"
    experiment = cells[0].experiment
    assert experiment.schedule.rounds == 200
    assert experiment.schedule.batch == 32
    assert experiment.privacy.delta == 1e-4
    assert experiment.federation.model_dump()["records_per_client"] == 8000


@pytest.mark.parametrize("name", [name for name in names() if find(name).publication and "rdpcfl" in name])
def test_the_publication_prints_what_stands_beside_r_dpcfl(name: str) -> None:
    source = find(name).publication
    assert source is not None
    publication = read_publication(source.source)
    for figure in ("mean", "majority", "minority", "min", "disparity", "f_acc", "f_loss"):
        for epsilon in (3, 10):
            theirs = source.rows["r-dpcfl"]
            assert publication.printed(source.data, source.shift, theirs, figure, epsilon) is not None


def test_a_part_is_chosen_by_budget_algorithm_and_seed() -> None:
    sweep = sweep_of(find("rdpcfl-mnist"), ScaleName.PAPER, Subset((2, 4.5), ("oracle", "local"), (7,)))
    assert sweep is not None
    assert [tuple(cell.values.values()) for cell in sweep.cells()] == [
        (algorithm, epsilon, 7) for algorithm in ("oracle", "local") for epsilon in (2, 4.5)
    ]
    with pytest.raises(
        InputError, match=r"--algorithms: 'oracles' is not part of rdpcfl-mnist; allowed: r-dpcfl"
    ):
        sweep_of(find("rdpcfl-mnist"), ScaleName.PAPER, Subset(algorithms=("oracles",)))


def test_overrides_reach_every_run_and_mistakes_in_them_are_found() -> None:
    sweep = sweep_of(find("rdpcfl-mnist"), ScaleName.QUICK, EVERYTHING, ["schedule.rounds=3"])
    assert sweep is not None
    assert {cell.experiment.schedule.rounds for cell in sweep.cells()} == {3}
    wrong = sweep_of(find("rdpcfl-mnist"), ScaleName.QUICK, EVERYTHING, ["schedule.round=3"])
    assert wrong is not None
    with pytest.raises(InputError, match=r"schedule.round: unknown key"):
        wrong.cells()


def test_unknown_names_and_malformed_files_are_one_line() -> None:
    with pytest.raises(InputError, match=r"nix: no such reproduction; allowed: .*rdpcfl-"):
        find("nix")
    with pytest.raises(InputError, match=r"reproduction odd: .*seed: unknown key"):
        parse("odd", TINY.replace("name: local, seeds: [1]", "name: local, seed: [1], seeds: [1]"))


def test_the_package_is_also_the_function_of_the_python_interface(tmp_path: Path) -> None:
    import coterie as ct

    for _ in range(2):
        with pytest.raises(InputError, match="nix: no such reproduction"):
            ct.reproduce("nix", tmp_path / "out")


def test_an_override_is_stronger_than_what_a_row_sets_and_than_what_varies() -> None:
    """In the base it would be lost, with the base's algorithm or under what the cells say."""
    published, rows = find("rr-fmnist-balanced"), ("dp-ifca with route", "dp-fedper with the network")
    overrides = ["algorithm.server_step=2", "privacy.clip=0.3", "schedule.rounds=7", "seeds.simulation=5"]
    sweep = sweep_of(published, ScaleName.PAPER, Subset(algorithms=rows, epsilons=(4.0,)), overrides)
    assert sweep is not None
    cells = [cell.experiment for cell in sweep.checked()]
    assert len(cells) == 2
    for cell in cells:
        assert cell.algorithm.model_dump()["server_step"] == 2
        assert (cell.privacy.clip, cell.schedule.rounds, cell.seeds.simulation) == (0.3, 7, 5)
    assert {cell.model.name for cell in cells} == {"softmax", "cnn"}
    assert any("memory" in str(cell.algorithm.model_dump().get("rebalance")) for cell in cells)


@pytest.mark.parametrize(
    ("selection", "override", "said"),
    [
        (
            Subset(),
            "algorithm.name=global",
            "--set algorithm.name: --algorithms says which; allowed: dp-fedavg, ",
        ),
        (Subset(epsilons=(3.0,)), "privacy.epsilon=4", "--set privacy.epsilon: --epsilon says which"),
        (Subset(seeds=(1,)), "seeds.simulation=2", "--set seeds.simulation: --seeds says which"),
    ],
)
def test_what_an_option_decides_is_not_set_twice(selection: Subset, override: str, said: str) -> None:
    with pytest.raises(InputError) as mistake:
        sweep_of(find("rr-cifar10"), ScaleName.PAPER, selection, [override])
    assert str(mistake.value).startswith(said)


def test_labels_separate_two_settings_of_one_algorithm() -> None:
    text = TINY.replace("{name: local, seeds: [1]}", "{name: r-dpcfl, seeds: [2], label: M unknown}")
    sweep = sweep_of(parse("tiny", text), ScaleName.QUICK, EVERYTHING)
    assert sweep is not None
    assert [cell.values["label"] for cell in sweep.cells()] == ["r-dpcfl", "M unknown"]
    assert [cell.experiment.algorithm.model_dump()["clusters"] for cell in sweep.cells()] == [2, "auto"]


# --- a finished folder ------------------------------------------------------------------------------


def test_ours_stand_beside_the_printed_numbers(finished: Reproduction) -> None:
    ours, alone = finished.lines
    result = RunResult.load(finished.sweep_folder / "cells" / ours.runs[0].record.name)
    entry = ours.entries[0]
    assert entry.quantity.key == "mean"
    assert entry.ours == pytest.approx(100 * result.accuracy.mean)
    assert entry.printed is not None
    assert (entry.printed.mean, entry.printed.table) == (92.28, 3)
    assert entry.verdict == f"below by {92.28 - 100 * result.accuracy.mean:.1f}"
    assert ours.printed_as == "RC-DPFL"
    assert alone.row == "local"
    assert all(entry.printed is None and entry.verdict == "" for entry in alone.entries)
    assert alone.clusters_found == "–"
    with (finished.folder / "table.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 2 * len(QUANTITIES)
    assert {row["printed"] for row in rows if row["algorithm"] == "local"} == {""}
    text = (finished.folder / "table.md").read_text()
    assert "r-dpcfl beside RC-DPFL" in text
    assert result.guarantee in text


def test_fairness_comes_from_one_central_model_for_all_runs(finished: Reproduction) -> None:
    (reference,) = (finished.folder / "references").iterdir()
    best = read_json(reference)["clients"]
    for run in finished.runs:
        assert run.result.fairness.f_acc is None
        missing = [best[name]["accuracy"] - own for name, own in run.result.accuracy.per_client.items()]
        assert run.fairness.f_acc == pytest.approx(max(missing) - min(missing))


def test_the_folder_is_small_and_every_run_charged_its_plan(finished: Reproduction) -> None:
    assert finished.is_sound
    for run in finished.runs:
        assert run.charged.exact
        assert not RunFolder(run.result.folder).checkpoint.exists()
    # 5 clients: 1 first round, 3 of training and one selection each; local trains 4 times.
    assert [run.charged.planned for run in finished.runs] == [25, 20]


def test_runs_whose_models_were_dropped_hold_by_themselves_and_together(finished: Reproduction) -> None:
    for run in finished.runs:
        found = verify(Path(run.result.folder))
        assert (found.problems, found.models_dropped) == ((), 1)
    together = verify(finished.sweep_folder)
    assert (together.problems, together.models_dropped) == ((), len(finished.runs))


def test_a_folder_grows_without_touching_what_is_finished(
    finished: Reproduction, tiny: PublishedExperiment, tmp_path: Path
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished.folder, out)
    before = {path: path.read_bytes() for path in sorted(out.glob("runs/cells/*/*.json*"))}
    grown = reproduce(tiny, out, selection=Subset((5,), ("local",)), resume=True)
    assert [(line.row, line.setting["privacy.epsilon"]) for line in grown.lines] == [
        ("local", 5),
        ("r-dpcfl", 10),
        ("local", 10),
    ]
    assert all(path.read_bytes() == content for path, content in before.items())
    again = reproduce(tiny, out, resume=True)
    assert again.to_json() == grown.to_json()


def test_a_folder_renders_elsewhere_even_unfinished(finished: Reproduction, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(finished.folder, moved)
    (moved / "table.md").unlink()
    result = render(moved)
    assert (moved / "table.md").read_text() == (finished.folder / "table.md").read_text()
    cell = finished.runs[0].record.name
    (moved / "runs" / "cells" / cell / "result.json").unlink()
    result = render(moved)
    assert result.missing == (cell,)
    assert f"Not finished: {cell}" in (moved / "table.md").read_text()
    many = replace(result, missing=tuple(f"run {number}" for number in range(20)))
    assert many.not_finished == "Not finished: 20 runs."


def test_curves_are_kept_and_replaced_by_row(
    finished: Reproduction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "names", lambda: [finished.experiment.name])
    path = curves.store_curves(finished, tmp_path)
    assert path is not None
    kept = curves.read_curves(tmp_path)[finished.experiment.name]
    found = {curve.key: curve for curve in curves.curves_of(finished)}
    assert {curve.key: curve for curve in kept} == found
    before = path.read_text()
    first = next(iter(found.values()))
    path.write_text(before.replace(f",{first.points['accuracy'][-1][1]}", ",0.125"))
    assert curves.store_curves(finished, tmp_path) == path
    assert path.read_text() == before
    path.write_text("algorithm,round\nx,1\n")
    with pytest.raises(InputError, match="not a table of curves"):
        curves.read_curves(tmp_path)


def test_a_folder_is_never_taken_for_another(
    finished: Reproduction, tiny: PublishedExperiment, tmp_path: Path
) -> None:
    out = finished.folder
    with pytest.raises(InputError, match="exists already"):
        reproduce(tiny, out)
    with pytest.raises(InputError, match="holds tiny at scale quick"):
        reproduce(tiny, out, scale="paper", resume=True)
    with pytest.raises(InputError, match="holds tiny at scale quick"):
        reproduce(find("rdpcfl-mnist"), out, resume=True)
    with pytest.raises(InputError, match="was begun with --set nothing"):
        reproduce(tiny, out, overrides=["schedule.rounds=9"], resume=True)
    with pytest.raises(InputError, match=r"reproduction.yaml is missing"):
        render(tmp_path)


# --- ledger against plan ----------------------------------------------------------------------------


def test_a_ledger_with_fewer_charges_is_said_to_have_fewer(finished: Reproduction, tmp_path: Path) -> None:
    run = finished.runs[0]
    path = tmp_path / "run"
    shutil.copytree(run.result.folder, path)
    ledger = RunFolder(path).ledger
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:-1]))
    charged = Charged.of(read_run(path))
    assert charged.holds
    assert not charged.exact
    assert "fewer than planned" in str(charged)
    ledger.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(LedgerError, match="does not follow"):
        Charged.of(read_run(path))


def test_spending_more_than_promised_voids_a_run() -> None:
    good = Charged(planned=5, executed=5, exact=True, within=True, spent=3.0, promised=3.0)
    assert good.holds
    over = Charged(planned=5, executed=5, exact=True, within=True, spent=3.01, promised=3.0)
    assert not over.holds
    assert "BROKEN" in str(over)
    more = Charged(planned=5, executed=6, exact=False, within=False, spent=3.0, promised=3.0)
    assert not more.holds


@pytest.mark.parametrize(
    ("key", "ours", "verdict"),
    [
        ("mean", 89.0, "at least"),
        ("mean", 88.9, "below by 0.1"),
        ("disparity", 2.9, "at most"),
        ("disparity", 3.1, "above by 0.1"),
    ],
)
def test_verdicts_know_which_way_is_better(key: str, ours: float, verdict: str) -> None:
    quantity = next(quantity for quantity in QUANTITIES if quantity.key == key)
    theirs = {"mean": 89.0, "disparity": 3.0}[key]
    entry = Entry(quantity, ours, None, Printed(theirs, 0.1, 3))
    assert entry.verdict == verdict
    assert entry.is_no_worse == verdict.startswith("at")
    assert Entry(quantity, ours, None, None).is_no_worse is None
    assert Entry(quantity, ours, None, Printed(None, None, 3)).printed_text() == "unreadable"


def test_the_publications_experiments_are_all_there() -> None:
    assert {"rdpcfl-mnist", "rdpcfl-fmnist", "rdpcfl-cifar10-covariate", "rdpcfl-cifar10-concept"} <= set(
        names()
    )


@pytest.mark.parametrize("name", [name for name in names() if find(name).publication and name[:3] == "rr-"])
def test_the_publication_prints_an_accuracy_beside_every_clustered_row(name: str) -> None:
    reproduction = find(name)
    source = reproduction.publication
    assert source is not None
    publication = read_publication(source.source)
    figure = "clustering" if name == "rr-clustering-accuracy" else "mean"
    for scale in reproduction.scales.values():
        budgets = scale.vary["privacy.epsilon"]
        for row in (contender.row for contender in scale.algorithms if "route" in contender.row):
            theirs = source.rows.get(row, row)
            if row == "softmax regression with route":
                continue  # ours alone
            assert theirs in publication.algorithms
            for epsilon in budgets:
                assert publication.printed(source.data, source.shift, theirs, figure, float(epsilon)), row


def test_a_table_may_have_budgets_of_its_own() -> None:
    publication = read_publication("rr-cluster")
    for key, mean in (
        (("fashion-mnist", "balanced", "rr-ifca", "mean", 2), 65.69),
        (("shakespeare", "roles", "rr-ifca", "mean", 16), 16.25),
        (("shakespeare", "roles", "dp-fedcam", "mean", 4), None),
    ):
        printed = publication.printed(*key)
        assert printed is not None
        assert printed.mean == mean
    assert publication.printed("shakespeare", "roles", "rr-ifca", "mean", 2) is None
    assert publication.printed("fashion-mnist", "balanced", "dp-ifca", "clustering", float("inf")) is not None


def test_a_row_may_be_shown_at_its_best_setting_alone() -> None:
    lines = [
        Line("dp-ifca", {"privacy.epsilon": epsilon, "privacy.clip": clip}, (), (average(mean),), None)
        for epsilon, clip, mean in [(2, 0.1, 70.0), (2, 0.2, 71.0), (8, 0.1, 80.0), (8, 0.2, 79.0)]
    ]
    best = best_lines(lines, "privacy.clip")
    assert [(line.name, line.setting) for line in best] == [
        ("dp-ifca (clip 0.2)", {"privacy.epsilon": 2}),
        ("dp-ifca (clip 0.1)", {"privacy.epsilon": 8}),
    ]


def average(value: float) -> Entry:
    return Entry(QUANTITIES[0], value, None, None)


def test_an_epsilon_in_a_table_is_never_rounded_down() -> None:
    by_key = {quantity.key: quantity for quantity in QUANTITIES}
    assert by_key["epsilon"].text(35.961) == "35.97"
    assert by_key["mean_epsilon"].text(23.1901) == "23.20"
    assert by_key["mean"].text(23.14) == "23.1"


ON_FEATURES = [
    ("rdpcfl-cifar10-covariate", "r-dpcfl"),
    ("rdpcfl-cifar10-concept", "r-dpcfl"),
    ("rdpcfl-fmnist", "r-dpcfl"),
    ("rdpcfl-mnist", "r-dpcfl"),
    ("rr-fmnist-balanced", "dp-ifca with route"),
    ("rr-fmnist-imbalanced", "dp-ifca with route"),
]


@pytest.mark.parametrize(("name", "row"), ON_FEATURES)
def test_public_features_bring_the_schedule_that_suits_a_head(name: str, row: str) -> None:
    chosen, wanted = Subset(algorithms=(row,), seeds=(0,)), ("model.features=scattering",)
    plain, on_features = (
        sweep_of(find(name), ScaleName.PAPER, chosen, overrides) for overrides in ((), wanted)
    )
    assert plain is not None
    assert on_features is not None
    before, after = plain.cells()[0].experiment, on_features.cells()[0].experiment
    assert (before.model.features, after.model.features) == ("none", "scattering")
    assert after.model.name == "softmax"
    assert after.schedule.lr >= 8 > before.schedule.lr
    assert (before.data, before.federation) == (after.data, after.federation)
    said = find(name).at(ScaleName.PAPER, wanted).differs
    assert any("unaccounted" in sentence for sentence in said)
    assert find(name).at(ScaleName.PAPER, ("model.features=none",)) == find(name).scales[ScaleName.PAPER]


def test_what_is_set_beside_features_counts() -> None:
    sweep = sweep_of(
        find("rdpcfl-mnist"),
        ScaleName.PAPER,
        Subset(seeds=(0,)),
        ("model.features=scattering", "schedule.lr=3", "model.name=mlp"),
    )
    assert sweep is not None
    chosen = sweep.cells()[0].experiment
    assert (chosen.schedule.lr, chosen.model.name, chosen.schedule.batch) == (3.0, "mlp", 1024)
