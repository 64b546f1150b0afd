"""`coterie leakage`: the promised keys, known figures, plain answers, and the exit code of each mistake."""

import json
from functools import partial

import pytest
import typer
from command import invoke

from coterie.cli.leakage import at_least, leakage

app = typer.Typer()
app.command()(leakage)

NOISE = ["--rate", "0.7", "--noise", "2", "--delta", "1e-5"]
SHAPE = ["--structure", "ring", "--groups", "4"]
RING = [*SHAPE, "--workers", "100", "--period", "10", "--epochs", "200", *NOISE]
SMALL = [*SHAPE, "--workers", "12", "--period", "2", "--epochs", "12", *NOISE]
THREE = ["--period", "2", "--epochs", "4", "--rate", "1", "--noise", "2", "--delta", "1e-5"]


run = partial(invoke, app)


def facts(*arguments):
    """The one JSON object."""
    return json.loads(run(*arguments, "--json"))


@pytest.fixture
def three(tmp_path):
    path = tmp_path / "three.json"
    path.write_text('{"groups": [[0, 1], [1, 2]]}')
    return ["--structure", path, *THREE]


def test_json_has_the_promised_keys_by_target_and_observer():
    found = facts(*RING)
    assert {"counts", "epsilon_counts", "epsilon", "per_worker", "guarantee"} <= found.keys()
    for key in ("counts", "epsilon_counts", "epsilon"):
        assert len(found[key]) == 100
        assert all(len(row) == 100 for row in found[key])
        assert all(found[key][worker][worker] is None for worker in range(100))
    assert max(value for row in found["counts"] for value in row if value is not None) == 389
    by_counts = max(value for row in found["epsilon_counts"] for value in row if value is not None)
    assert by_counts == pytest.approx(57.09, abs=0.02)
    assert max(found["per_worker"]) == pytest.approx(43.43, abs=0.02)
    assert found["guarantee"].startswith("(eps=43.43, delta=1e-5)-DP for worker 0 of 100")


def test_one_group_is_the_baseline():
    found = facts("--structure", "global", "--workers", 100, "--epochs", 200, *NOISE)
    assert found["per_worker"] == pytest.approx([35.834] * 100, abs=0.01)
    assert found["counts"][0][1] == 199


def test_three_workers(three):
    assert facts(*three)["counts"] == [[None, 3, 2], [5, None, 5], [2, 3, None]]
    plus = [*three, "--algorithm", "dp-ogl-plus"]
    assert facts(*plus)["counts"][0] == [None, None, 0]
    assert facts(*plus)["epsilon"][0] == [None, None, 0]
    assert facts(*plus, "--threat-model", 1)["counts"][0] == [None, 1, 0]
    published = facts(*plus, "--mode", "paper")
    assert published["counts"][0] == [None, None, 1]
    assert published["published_counts"][0] == [None, None, 0]
    assert "members exchange models without noise" in published["guarantee_text"]


def test_targets_come_first_and_observers_second(tmp_path):
    """Worker 0 is in one group and worker 1 in two: what 0 sees of 1 is more than what 1 sees of 0."""
    path = tmp_path / "three.json"
    path.write_text('{"groups": [[0, 1], [1, 2]]}')
    counts = facts("--structure", path, *THREE)["counts"]
    assert counts[1][0] == 5
    assert counts[0][1] == 3


def test_text_answers_in_plain_words():
    text = run(*RING)
    for words in ("most exposed: worker 0", "holds 389 releases", "sees most: worker", "57.09", "43.43"):
        assert words in text
    assert "(eps=43.43, delta=1e-5)-DP for worker 0 of 100" in text


def test_target_pair_is_solved_for_noise_and_period():
    found = facts(*SMALL, "--target-pair", "1,8", "--epsilon", 4)["target_pair"]
    assert found["wanted"] == 4 < found["epsilon"]
    assert found["noise"] > 2
    assert facts(*SMALL, "--noise", found["noise"])["epsilon"][1][8] <= 4
    assert facts(*SMALL, "--period", found["period"])["epsilon"][1][8] <= 4
    text = run(*SMALL, "--target-pair", "1,8", "--epsilon", 4)
    assert "epsilon at most 4: noise " in text
    assert "a merge every" in text
    assert "against worker 8, trusting the group masters" in text


def test_pair_without_a_target_is_described():
    found = facts(*SMALL, "--target-pair", "1,2")["target_pair"]
    assert found["counts"] == 11
    assert found["first_epoch"] == 2
    assert "noise" not in found


def test_target_that_cannot_be_reached_exits_3():
    assert "cannot be met" in run(*SMALL, "--target-pair", "1,2", "--epsilon", 1e-4, fails=3)


def test_coalition_is_one_observer():
    found = facts(*SMALL, "--coalition", "1,8")["coalition"]
    assert found["members"] == [1, 8]
    assert found["counts"][1] is None
    single = facts(*SMALL)
    assert found["counts"][4] >= max(single["counts"][4][1], single["counts"][4][8])
    assert "(2 colluding)" in found["guarantee"]
    assert "coalition of 1, 8: learns most about worker" in run(*SMALL, "--coalition", "1,8")


def test_requirements_are_checked_and_a_design_is_found(tmp_path):
    path = tmp_path / "demands.yaml"
    path.write_text("- {epsilon: 6}\n- {observer: out-of-group, epsilon: 3}\n")
    found = facts(*SMALL, "--requirements", path)
    assert [entry["met"] for entry in found["requirements"]] == [False, False]
    noises = [design["noise"][0] for design in found["designs"]]
    assert noises == sorted(noises)
    assert "What meets them all" in run(*SMALL, "--requirements", path)
    path.write_text("- {observer: in-group, epsilon: 0}\n")
    run(*SMALL, "--requirements", path, fails=3)


def test_a_demand_about_members_of_a_group_is_refused_where_these_are_trusted(tmp_path):
    path = tmp_path / "demands.yaml"
    path.write_text("- {observer: in-group, epsilon: 0.001}\n")
    message = run(*SMALL, "--algorithm", "dp-ogl-plus", "--requirements", path, fails=2)
    assert "threat model 2 trusts" in message
    path.write_text("- {epsilon: 100}\n")
    text = run(*SMALL, "--algorithm", "dp-ogl-plus", "--requirements", path)
    assert "pairs that a requirement speaks of were not looked at" in text


def test_noise_to_be_typed_in_again_is_never_rounded_down():
    assert [at_least(noise) for noise in (1.85249, 9.99951, 0.0074801, 123456.0, 2.0)] == [
        "1.853",
        "10",
        "0.007481",
        "1.235e+05",
        "2",
    ]


def test_label_structure_says_that_it_tells_labels():
    found = facts(
        "--structure", "label", "--workers", 12, "--groups", 5, "--period", 3, "--epochs", 9, *NOISE
    )
    assert "The groups were formed from labels" in found["guarantee_text"]


def test_groups_may_have_their_own_rate_and_noise(three):
    arguments = [*three[:-6], "--rate", "0.5,1", "--noise", "4,1", "--delta", "1e-5"]
    found = facts(*arguments)
    assert found["epsilon"][0][1] < found["epsilon"][2][1]
    assert found["noise"] == [4, 1]


def test_plot_is_written(tmp_path):
    path = tmp_path / "leakage.svg"
    run(*SMALL, "--plot", path)
    assert path.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "options",
    [
        ["--structure", "circle", "--workers", 10, "--groups", 2, "--epochs", 5, *NOISE],
        ["--structure", "missing.json", "--epochs", 5, *NOISE],
        ["--structure", "ring", "--workers", 10, "--epochs", 5, *NOISE],
        ["--structure", "ring", "--groups", 2, "--epochs", 5, *NOISE],
        ["--structure", "ring", "--workers", 2, "--groups", 5, "--epochs", 5, *NOISE],
        ["--structure", "global", "--workers", 10, "--groups", 2, "--epochs", 5, *NOISE],
        ["--structure", "label", "--workers", 0, "--groups", 2, "--epochs", 5, *NOISE],
        ["--structure", "ring", "--workers", 10_001, "--groups", 2, "--epochs", 5, *NOISE],
        [*SMALL, "--period", 0],
        [*SMALL, "--period", -3],
        [*SMALL, "--epochs", 0],
        [*SMALL, "--rate", 0],
        [*SMALL, "--rate", 1.2],
        [*SMALL, "--rate", "much"],
        [*SMALL, "--rate", "0.5,0.5"],
        [*SMALL, "--noise", 0],
        [*SMALL, "--noise", "nan"],
        [*SMALL, "--delta", 0],
        [*SMALL, "--delta", 2],
        [*SMALL, "--algorithm", "dp-fedavg"],
        [*SMALL, "--mode", "wrong"],
        [*SMALL, "--threat-model", 3],
        [*SMALL, "--algorithm", "dp-ogl-plus", "--mode", "paper", "--threat-model", 1],
        [*SMALL, "--coalition", "1,99"],
        [*SMALL, "--coalition", "1,1"],
        [*SMALL, "--coalition", "x"],
        [*SMALL, "--target-pair", "1"],
        [*SMALL, "--target-pair", "1,1"],
        [*SMALL, "--target-pair", "1,12"],
        [*SMALL, "--target-pair", "1," + "9" * 5000],
        [*SMALL, "--target-pair", "1,2", "--epsilon", 0],
        [*SMALL, "--target-pair", "1,2", "--algorithm", "dp-ogl-plus"],
        [*SMALL, "--epsilon", 3],
        [*SMALL, "--labels", "labels.json"],
        [*SMALL, "--seed", 3],
        [*SMALL, "--seed", 0],
        [*SMALL, "--requirements", "missing.yaml"],
        [*SMALL, "--plot", "figure.bmp"],
        [*SMALL, "--plot", "nowhere/figure.png"],
    ],
)
def test_wrong_input_exits_2(options):
    run(*options, fails=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"groups": [[0, 1], []]}', "empty"),
        ('{"groups": [[0, 7]], "workers": 3}', "unknown"),
        ('{"groups": [[0, 2]]}', "in no group"),
        ("not json", "not JSON"),
    ],
)
def test_broken_structure_files_exit_2_in_one_line(tmp_path, text, words):
    path = tmp_path / "groups.json"
    path.write_text(text)
    message = run("--structure", path, *THREE, fails=2)
    assert words in message
    assert "\n" not in message.strip()
