"""The experiment file: defaults, overrides, and mistakes in one line that names the key."""

from pathlib import Path

import pytest
import yaml

from coterie.algorithms.rdpcfl import RDPCFLSettings
from coterie.errors import InputError
from coterie.experiment.files import commented_default, override, read_experiment, to_yaml
from coterie.experiment.schema import Experiment


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
    "privacy: {adjacency: add-remove}": r"privacy.adjacency: add-remove would make",
    "privacy: {adjacency: swap}": r"privacy.adjacency: 'swap' is not allowed",
    "schedule: {rounds: 0}": r"schedule.rounds: 0 is not allowed",
    "schedule: {rounds: 2.5}": r"schedule.rounds: 2.5 is not allowed",
    "schedule: 30": r"schedule: 30 is not allowed",
    "algorithm: {name: r-dpcfl, first_round_noise: -2}": r"algorithm.first_round_noise: -2",
    "algorithm: {name: r-dpcfl, clusters: 1}": r"algorithm.clusters: 1 is not allowed, must be auto or",
    "engine: {device: tpu}": r"engine.device: 'tpu' is not allowed",
    "seeds: {noise: -1}": r"seeds.noise: -1 is not allowed",
    "- a\n- b": r"should hold sections",
    "schedule: {rounds: 3": r"not YAML in line",
    "schedule: {rounds: 3}\nschedule: {rounds: 4}": r"key 'schedule' stands twice",
    "schedule: {rounds: 3, lr: 1, bacth: 2, epoch: 1}": r"unknown key.* \(and 1 more mistake\)",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text.replace("\n", " ")[:50])
def test_a_mistake_is_one_line_that_names_the_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=MISTAKES[text]) as caught:
        read_experiment(written(tmp_path, text))
    assert "\n" not in str(caught.value)


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
