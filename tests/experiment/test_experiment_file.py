"""The experiment file: defaults, overrides, and mistakes in one line that names the key."""

from pathlib import Path

import pytest
import yaml

from coterie.algorithms.record.r_dpcfl import RDPCFLSettings
from coterie.errors import InputError
from coterie.experiment.experiment_file import commented_default, override, read_experiment, to_yaml
from coterie.experiment.schema import Experiment
from coterie.files import parse_yaml


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    return path


def test_the_commented_default_is_the_default(tmp_path: Path) -> None:
    text = commented_default()
    assert read_experiment(written(tmp_path, text)) == Experiment()
    for section in Experiment.model_fields:
        assert f"\n{section}:\n" in text


def test_every_key_of_the_commented_default_is_explained() -> None:
    keys = [line for line in commented_default().splitlines() if line.startswith("  ")]
    assert len(keys) > 25
    assert [line for line in keys if "#" not in line] == []


def test_an_experiment_survives_its_file(tmp_path: Path) -> None:
    experiment = read_experiment(None, ["algorithm.clusters=4", "privacy.epsilon=.inf", "seeds.noise=3"])
    assert read_experiment(written(tmp_path, to_yaml(experiment))) == experiment


def test_overrides_take_the_file_s_place() -> None:
    experiment = read_experiment(None, ["schedule.rounds=7", "privacy.delta=1e-5", "federation.sizes=[2, 2]"])
    assert experiment.schedule.rounds == 7
    assert experiment.privacy.delta == 1e-5
    assert isinstance(experiment.algorithm, RDPCFLSettings)


def test_changing_a_selector_drops_the_options_of_the_old_choice() -> None:
    base = {"algorithm": {"name": "r-dpcfl", "clusters": 4}, "federation": {"kind": "clusters", "sizes": [2]}}
    changed = override(base, {"algorithm.name": "global", "federation.kind": "natural"})
    assert changed == {"algorithm": {"name": "global"}, "federation": {"kind": "natural"}}
    kept = override(base, {"algorithm.name": "r-dpcfl"})
    assert kept["algorithm"] == {"name": "r-dpcfl", "clusters": 4}
    assert base["algorithm"] == {"name": "r-dpcfl", "clusters": 4}


MISTAKES = {
    "schedule: {round: 3}": r"schedule.round: unknown key; did you mean 'rounds'\?",
    "shedule: {rounds: 3}": r"shedule: unknown key; did you mean 'schedule'\?",
    "federation: {kind: clusters, size: [3]}": r"federation.size: unknown key; did you mean 'sizes'\?",
    "algorithm: {name: r-dpcfl, cluster: 3}": r"algorithm.cluster: unknown key; did you mean 'clusters'\?",
    "algorithm: {name: global, clusters: 3}": r"algorithm.clusters: unknown key",
    "algorithm: {name: dpcfl}": r"algorithm.name: 'dpcfl' .* allowed: dp-ifca, global, .*, r-dpcfl",
    "data: {name: mnst}": r"data.name: 'mnst' \(did you mean mnist\?\)",
    "model: {name: cn}": r"model.name: 'cn'",
    "federation: {kind: ring}": r"federation: .*ring",
    "privacy: {epsilon: -1}": r"privacy.epsilon: -1 is not allowed, .*greater than 0",
    "privacy: {epsilon: .nan}": r"privacy.epsilon: nan is not allowed",
    "privacy: {epsilon: many}": r"privacy.epsilon: 'many' is not allowed",
    "privacy: {delta: 1}": r"privacy.delta: 1 is not allowed",
    "privacy: {unit: person}": r"privacy.unit: 'person' is not allowed",
    "privacy: {clip: 0}": r"privacy.clip: 0 is not allowed",
    "privacy: {clip: 5.0e-324}": r"privacy.clip: 5e-324 is not allowed, should be a number from 1e-06 to",
    "privacy: {clip: 1.0e+9}": r"privacy.clip: 1000000000.0 is not allowed, should be a number from",
    "privacy: {clip: .nan}": r"privacy.clip: nan is not allowed",
    "schedule: {lr: 1.0e-300}": r"schedule.lr: 1e-300 is not allowed",
    "schedule: {lr: .inf}": r"schedule.lr: inf is not allowed",
    "schedule: {rounds: 10000000}": r"schedule.rounds: 10000000 is not allowed",
    "schedule: {epochs: 1000000}": r"schedule.epochs: 1000000 is not allowed",
    "algorithm: {name: r-dpcfl, first_round_noise: 1.0e-300}": r"auto, shared or a number from 1e-12",
    "algorithm: {name: mr-mtl, pull: 1.0e-300}": r"algorithm.pull: 1e-300 .*0 or a number from 1e-09",
    "privacy: {unit: worker}\nalgorithm: {name: dp-ogl, clip: 0}": r"algorithm.clip: 0 is not allowed",
    "privacy: {unit: worker}\nalgorithm: {name: dp-ogl, clip: [1, 5.0e-324]}": r"algorithm.clip.*5e-324",
    "privacy: {unit: worker}\nalgorithm: {name: dp-ogl, noise: 1.0e-300}": r"algorithm.noise: 1e-300",
    "privacy: {unit: client}\nalgorithm: {name: dp-fedavg, rate: 1.0e-300}": r"algorithm.rate: 1e-300",
    "privacy: {unit: client}\nalgorithm: {name: dp-fedavg, server_step: 1.0e-300}": r"algorithm.server_step",
    "privacy: {unit: client}\nalgorithm: {name: dp-fedavg, adaptive_clip: {count_ratio: 1.0e-300}}": (
        r"algorithm.adaptive_clip.count_ratio: 1e-300"
    ),
    "model: {name: lstm, hidden: 1000000000}": r"model.hidden: 1000000000 is not allowed",
    "model: {name: lstm, layers: 1000000000}": r"model.layers: 1000000000 is not allowed",
    "privacy: {adjacency: add-remove}": r"privacy.adjacency: add-remove would make",
    "privacy: {adjacency: swap}": r"privacy.adjacency: 'swap' is not allowed",
    "schedule: {rounds: 0}": r"schedule.rounds: 0 is not allowed",
    "schedule: {rounds: 2.5}": r"schedule.rounds: 2.5 is not allowed",
    "schedule: 30": r"schedule: 30 is not allowed",
    "algorithm: {name: r-dpcfl, first_round_noise: -2}": r"algorithm.first_round_noise: -2",
    "algorithm: {name: r-dpcfl, clusters: 1}": r"algorithm.clusters: 1 is not allowed, should be auto or",
    "engine: {device: tpu}": r"engine.device: 'tpu' is not allowed",
    "seeds: {noise: -1}": r"seeds.noise: -1 is not allowed",
    "- a\n- b": r"should hold sections",
    "schedule: {rounds: 3": r"not YAML, line 1",
    "schedule: {rounds: 3}\nschedule: {rounds: 4}": r"key 'schedule' stands twice",
    "schedule: {rounds: 2020-01-01}": r"schedule.rounds: 2020-01-01 is not allowed, should be",
    "1: {rounds: 3}": r"line 1: key 1 must be a string",
    "schedule: {3: 4}": r"line 1: key 3 must be a string",
    "schedule: {rounds: 3}\nnull: {}": r"line 2: key null must be a string",
    "schedule: {true: 4}": r"key true must be a string",
    "privacy: {budgets: {2020-01-01: {epsilon: 2}}}": r"key 2020-01-01 must be a string; quote it",
    "? [a]\n: 3": r"key a list or a mapping must be a string",
    "schedule:\n\trounds: 3": r"line 2: .*indent with spaces",
    "schedule: {rounds: 2020-13-45}": r"not YAML, month must be in 1..12",
    "schedule: &loop {rounds: *loop}": r"schedule.rounds: .* is not allowed, should be a valid integer",
    "schedule: *nowhere": r"line 1: found undefined alias",
    "schedule: !!python/object:os.system {}": r"could not determine a constructor",
    "seeds: {simulation: 9223372036854775808}": r"seeds.simulation: 9223372036854775808 is not allowed",
    "a: " + 3000 * "[": r"not YAML, it is nested too deeply",
    "schedule: {rounds: 3, lr: 1, bacth: 2, epoch: 1}": r"unknown key.* \(and 1 more mistake\)",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text.replace("\n", " ")[:90])
def test_a_mistake_is_one_line_that_names_the_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=MISTAKES[text]) as caught:
        read_experiment(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_anchors_and_merge_keys_mean_what_yaml_says(tmp_path: Path) -> None:
    text = "seeds: &both {simulation: 3, noise: 5}\nschedule: {rounds: 7}\n"
    assert read_experiment(written(tmp_path, text)).seeds.noise == 5
    merged = parse_yaml("a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: [*b], x: 4, z: 5}")
    assert merged["b"] == {"x": 1, "y": 3}
    assert merged["c"] == {"x": 4, "y": 3, "z": 5}
    with pytest.raises(ValueError, match="line 2: key 'y' stands twice"):
        parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 3, y: 4}")


def test_a_missing_or_binary_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_experiment(tmp_path / "nothing.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match=r"binary.yaml"):
        read_experiment(binary)
    with pytest.raises(InputError, match=r"cannot be read"):
        read_experiment(tmp_path)


@pytest.mark.parametrize("text", ["rounds", "=3", "schedule.rounds=[1"])
def test_a_malformed_override_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match="--set"):
        read_experiment(None, [text])


def test_python_users_get_the_same_line() -> None:
    with pytest.raises(InputError, match=r"schedule.round: unknown key"):
        Experiment(schedule={"round": 3})  # type: ignore[arg-type]


def test_a_file_may_hold_a_part_of_the_sections(tmp_path: Path) -> None:
    experiment = read_experiment(written(tmp_path, yaml.safe_dump({"schedule": {"rounds": 4}})))
    assert experiment.schedule.rounds == 4
    assert experiment.data == Experiment().data
