"""`coterie plan`: the figures it prints, one JSON object, and the exit code of each mistake."""

import json
from functools import partial

import numpy as np
import pytest
import yaml
from command import invoke

from coterie.cli.plan import plan_app
from coterie.experiment import local
from coterie.experiment.experiment_file import read_experiment

SAMPLE = ["sample", "--records", "8000", "--batch", "32", "--rounds", "200", "--delta", "1e-4"]
CLIENT = ["client", "--clients", "1000", "--rate", "0.1", "--rounds", "100", "--delta", "1e-3"]


run = partial(invoke, plan_app)


def facts(*arguments):
    """The one JSON object."""
    return json.loads(run(*arguments, "--json"))


def test_json_has_the_promised_keys_and_nothing_else_on_stdout():
    found = facts(*SAMPLE, "--epsilon", 5)
    promised = {
        "noise_multiplier",
        "first_round_noise_multiplier",
        "epsilon",
        "delta",
        "epsilon_replace_one",
        "accountant",
        "mode",
        "guarantee",
        "guarantee_text",
    }
    assert promised <= found.keys()
    assert found["accountant"] == "rdp"
    assert found["mode"] == "sound"
    assert found["guarantee"].startswith("(eps=5.00, delta=1e-4)-DP")
    assert found["epsilon"] <= 5 < found["epsilon_replace_one"]


@pytest.mark.parametrize(
    ("options", "noise"),
    [
        (["--epsilon", 5], 1.2519),
        (["--epsilon", 5, "--selections", 21, "--selection-epsilon", 0.15], 1.3008),
        (["--epsilon", 5, "--selections", 21], 1.3008),
        (["--epsilon", 5, "--first-round", "none"], 1.0120),
        (["--epsilon", 5, "--sampling", "shuffle"], 12.1415),
        (["--epsilon", 5, "--selections", 21, "--adjacency", "replace-one"], 2.4106),
        (["--epsilon", 3, "--selections", 21, "--first-round-noise", 8], 1.4301),
        (["--epsilon", 3, "--selections", 21, "--mode", "paper"], 2.9081),
        (["--epsilon", 5, "--selections", 21, "--mode", "paper"], 1.8509),
    ],
)
def test_budget_gives_the_known_noise(options, noise):
    found = facts(*SAMPLE, *options)["noise_multiplier"]
    assert noise * (1 - 1e-4) <= found <= noise * (1 + 3e-3)


def test_noise_gives_back_the_budget():
    noise = facts(*SAMPLE, "--epsilon", 5)["noise_multiplier"]
    assert facts(*SAMPLE, "--noise", noise)["epsilon"] == pytest.approx(5, rel=1e-6)


def test_pld_needs_less_noise_than_rdp_for_the_same_budget():
    rdp, pld = (
        facts(*SAMPLE, "--epsilon", 2, "--accountant", name)["noise_multiplier"] for name in ("rdp", "pld")
    )
    assert 0.85 * rdp < pld < rdp


def test_auto_first_round_is_found_from_a_budget_or_from_a_noise():
    options = ["--selections", 21, "--selection-epsilon", 0.09, "--first-round-noise", "auto"]
    found = facts(*SAMPLE, "--epsilon", 3, *options)
    assert found["first_round_noise_multiplier"] == pytest.approx(6.2035, rel=3e-3)
    again = facts(*SAMPLE, "--noise", found["noise_multiplier"], *options)
    assert again["first_round_noise_multiplier"] == pytest.approx(
        found["first_round_noise_multiplier"], rel=1e-4
    )


def test_paper_mode_labels_its_number_and_prints_the_true_one():
    found = facts(*SAMPLE, "--epsilon", 5, "--selections", 21, "--mode", "paper")
    assert found["published_epsilon"] == pytest.approx(5, rel=1e-6)
    assert found["epsilon"] < 5 < found["epsilon_replace_one"]
    assert "paper: published eps=5.00 (replace-one claimed), sound: (eps=" in found["guarantee"]
    assert "As published" in found["guarantee_text"]


def test_alternatives_stand_beside_the_answer():
    found = facts(*SAMPLE, "--epsilon", 3, "--selections", 21, "--first-round-noise", 8)
    assert found["shared_noise_multiplier"] == pytest.approx(1.9145, rel=3e-3)
    assert found["published_noise_multiplier"] == pytest.approx(2.9081, rel=3e-3)
    assert found["replace_one_noise_multiplier"] > found["noise_multiplier"]


def test_table_shows_each_part_and_the_guarantee():
    text = run(*SAMPLE, "--epsilon", 5, "--selections", 21)
    for word in ("first-round", "training", "selection", "together", "publication", "replace-one"):
        assert word in text
    assert "(eps=5.00, delta=1e-4)-DP for one record of one client" in text


@pytest.mark.parametrize(
    ("options", "noise"),
    [
        (["--epsilon", 4, "--histogram-ratio", 10], 1.2088),
        (["--epsilon", 4], 1.2398),
        (["--epsilon", 4, "--mechanism", "rebalance"], 4.1665),
        (["--epsilon", 4, "--mechanism", "paper"], 7.2755),
        (["--epsilon", 4, "--mechanism", "fedavg"], 1.2028),
        (["--epsilon", 2, "--mechanism", "rebalance"], 6.4343),
    ],
)
def test_client_budget_gives_the_known_noise_on_a_cluster_sum(options, noise):
    found = facts(*CLIENT, *options)["noise_on_sum"]
    assert noise * (1 - 1e-4) <= found <= noise * (1 + 3e-3)


def test_published_rule_counts_its_noise_in_halves_of_the_sum():
    found = facts(*CLIENT, "--noise", 2, "--identifier-noise", 3, "--mechanism", "rebalance")
    assert found["noise_multiplier"] == 2
    assert found["noise_on_sum"] == 4
    assert found["identifier_noise_multiplier"] == 3


def test_budget_below_the_published_floor_exits_3_and_names_the_floor():
    assert "2.23" in run(*CLIENT, "--epsilon", 2, "--mechanism", "paper", fails=3)


def test_selections_beyond_the_budget_exit_3_and_name_their_cost():
    text = run(*SAMPLE, "--epsilon", 1, "--selections", 21, "--selection-epsilon", 2, fails=3)
    assert "selection alone" in text


def test_large_delta_is_a_caveat():
    assert "Delta is not below 1/1000" in facts(*CLIENT, "--epsilon", 4)["guarantee_text"]
    assert "Delta is not below" not in facts(*SAMPLE, "--epsilon", 4)["guarantee_text"]


def test_no_noise_is_no_privacy():
    found = facts(*SAMPLE, "--noise", 0)
    assert found["epsilon"] == "inf"
    assert found["guarantee"].startswith("no privacy")
    assert facts(*SAMPLE, "--epsilon", "inf")["noise_multiplier"] == 0


@pytest.mark.parametrize(
    "options",
    [
        [*SAMPLE],
        [*SAMPLE, "--epsilon", 3, "--noise", 1],
        [*SAMPLE, "--epsilon", -1],
        [*SAMPLE, "--epsilon", 3, "--first-round-noise", "some"],
        [*SAMPLE, "--epsilon", 3, "--first-round", "none", "--first-round-noise", "auto"],
        [*SAMPLE, "--epsilon", 3, "--first-round-noise", -2],
        [*SAMPLE, "--noise", 1, "--selections", 3],
        [*SAMPLE, "--epsilon", 3, "--mode", "paper", "--sampling", "shuffle"],
        [*SAMPLE, "--epsilon", 3, "--accountant", "guess"],
        [*SAMPLE, "--epsilon", 3, "--plot", "figure.bmp"],
        [*SAMPLE, "--epsilon", 3, "--plot", "nowhere/figure.png"],
        [*CLIENT, "--epsilon", 4, "--identifier-noise", 2],
        [*CLIENT, "--epsilon", 4, "--mechanism", "fedavg", "--histogram-ratio", 2],
        ["client", "--clients", 10, "--rate", 1.5, "--rounds", 1, "--delta", 1e-3, "--epsilon", 1],
        ["sample", "--records", 10, "--batch", 20, "--rounds", 2, "--delta", 1e-3, "--epsilon", 1],
        ["sample", "--records", 10, "--batch", 2, "--rounds", 2, "--delta", 2, "--epsilon", 1],
        [*SAMPLE, "--noise", 5e-324],
        [*SAMPLE, "--noise", 1e300],
        [*SAMPLE, "--noise", 1, "--selections", 3, "--selection-epsilon", 5e-324],
        [*SAMPLE, "--noise", 1, "--epochs", 10**9],
        [*CLIENT, "--noise", 1, "--histogram-ratio", 1e-300],
        [*CLIENT, "--noise", 0, "--mechanism", "rebalance", "--identifier-noise", 1],
        ["client", "--clients", 10, "--rate", 5e-324, "--rounds", 1, "--delta", 1e-3, "--epsilon", 1],
    ],
)
def test_wrong_input_exits_2(options):
    run(*options, fails=2)


def test_plot_is_written(tmp_path):
    path = tmp_path / "noise.svg"
    run(
        "sample",
        "--records",
        300,
        "--batch",
        100,
        "--rounds",
        20,
        "--delta",
        1e-3,
        "--epsilon",
        6,
        "--plot",
        path,
    )
    assert path.read_text().startswith("<?xml")


# --- coterie plan EXPERIMENT.yaml -------------------------------------------------------------------

SMALL = {
    "federation": {"sizes": [2, 3], "records_per_client": 60},
    "schedule": {"rounds": 4, "batch": 20},
    "evaluation": {"references": False},
}
UNITS = {
    "record": {"algorithm": {"name": "r-dpcfl"}, "privacy": {"epsilon": 8}},
    "client": {
        "algorithm": {"name": "gmfsc", "clusters": 2, "rate": 0.5},
        "privacy": {"unit": "client", "epsilon": 8, "delta": 0.01},
    },
    "worker": {
        "federation": {"kind": "groups", "structure": "ring", "workers": 8, "groups": 4},
        "algorithm": {"name": "dp-ogl", "period": 2},
        "privacy": {"unit": "worker", "epsilon": 50, "delta": 1e-3},
    },
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.yaml"


@pytest.mark.parametrize("unit", UNITS)
def test_an_experiment_costs_what_its_run_will_promise_and_nothing_is_written(file, unit):
    file.write_text(yaml.safe_dump(SMALL | UNITS[unit]))
    found = facts(file)
    promised = local.calibrate(read_experiment(file)).guarantee
    assert found["guarantee"] == promised.line
    assert found["guarantee_text"] == promised.text
    assert found["releases"] == [release.to_json() for release in promised.releases]
    assert found["epsilon"] == promised.epsilon <= found["epsilon_replace_one"]
    assert (found["delta"], found["accountant"], found["mode"]) == (promised.delta, "rdp", "sound")
    assert found["noise_multiplier"] > 0
    assert ("first_round_noise_multiplier" in found) == (unit == "record")
    text = " ".join(run(file).replace("│", " ").split())
    for release in promised.releases:
        assert release.name in text
    assert promised.line in text
    assert promised.text in text
    assert list(file.parent.iterdir()) == [file]


def test_an_experiment_and_the_same_numbers_on_the_command_line_need_the_same_noise(file):
    told = SMALL | {"algorithm": {"name": "global"}, "privacy": {"epsilon": 8, "delta": 1e-3}}
    file.write_text(yaml.safe_dump(told))
    numbers = ["sample", "--records", 60, "--batch", 20, "--rounds", 4, "--delta", 1e-3, "--epsilon", 8]
    alike = facts(*numbers, "--first-round", "none")
    found = facts(file)
    assert found["noise_multiplier"] == alike["noise_multiplier"]
    assert found["epsilon"] == alike["epsilon"]


def test_an_experiment_can_be_changed_on_the_command_line_before_or_after_its_name(file):
    file.write_text(yaml.safe_dump(SMALL | UNITS["record"]))
    for arguments in ([file, "--set", "privacy.epsilon=2"], ["--set", "privacy.epsilon=2", file]):
        assert 1.9 < facts(*arguments)["epsilon"] <= 2


def test_what_an_experiment_costs_is_told_by_counts_of_records_alone(file):
    folder = file.parent / "mine"
    folder.mkdir()
    declaration = {
        "task": "classification",
        "label": {"classes": 2},
        "features": {"shape": [4], "range": [-1, 1]},
    }
    (folder / "federation.yaml").write_text(yaml.safe_dump(declaration))
    told = {
        "data": {"name": "folder", "path": str(folder)},
        "federation": {"kind": "natural"},
        "schedule": {"rounds": 3, "batch": 20},
    }
    file.write_text(yaml.safe_dump(told))
    printed = []
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        for site in range(4):
            x = rng.uniform(-1, 1, size=(80, 4)).astype(np.float32)
            np.savez(folder / f"site{site}.npz", x=x, y=rng.integers(2, size=80))
        printed.append(run(file, "--json"))
    assert printed[0] == printed[1]


def test_an_experiment_that_no_noise_allows_exits_3_and_says_which_part_costs_what(file):
    file.write_text(yaml.safe_dump(SMALL | UNITS["record"]))
    greedy = ["--set", "algorithm.selection_share=0.9", "--set", "schedule.rounds=40"]
    assert "selection alone" in run(file, *greedy, fails=3)


def test_an_experiment_that_is_wrong_exits_2_and_names_the_key(file):
    file.write_text("schedule: {round: 3}\n")
    assert "schedule.round" in run(file, fails=2)
    assert "sampel" in run("sampel", fails=2)
