"""The experiment file: defaults, overrides, and mistakes in one line that names the key."""

import math
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from coterie.algorithms.record.r_dpcfl import RDPCFLSettings
from coterie.errors import InputError
from coterie.experiment.experiment_file import commented_default, override, read_experiment, to_yaml
from coterie.experiment.schema import Experiment
from coterie.files import parse_yaml, yaml_text


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
    "schedule: {bogus: 3}": r"schedule.bogus: unknown key; known here: rounds, ",
    "federation: {kind: natural, sizes: [3]}": r"federation.sizes: unknown key; known here: kind, clients",
    "federation: {sizes: 3}": r"federation.sizes: 3 is not allowed, should be a list;",
    "schedule: {augmentation: {kinds: [x]}}": r"kinds\[0\]: 'x' is not allowed, should be 'shift' or 'flip'$",
    "algorithm: {clusters: x}": r"algorithm.clusters: 'x' .* should be an integer or 'auto'; .* auto$",
    "privacy: {unit: worker}\nalgorithm: {name: dp-ogl, rate: [0.5, x]}": r"rate\[1\]: 'x' .* a number$",
    "privacy: {unit: worker}\nalgorithm: {name: dp-ogl, rate: [0.5, 7]}": r"rate\[1\]: 7 .* 1e-09 to 1$",
    "data: {path: 7}": r"data.path: 7 is not allowed, should be a path; ",
    "data: {scale_by_std: 3}": r"^data.scale_by_std: 3; features may be scaled by public constants only",
    "schedule: {round: 3}": r"schedule.round: unknown key; did you mean 'rounds'\?",
    "shedule: {rounds: 3}": r"shedule: unknown key; did you mean 'schedule'\?",
    "federation: {kind: clusters, size: [3]}": r"federation.size: unknown key; did you mean 'sizes'\?",
    "algorithm: {name: r-dpcfl, cluster: 3}": r"algorithm.cluster: unknown key; did you mean 'clusters'\?",
    "algorithm: {name: global, clusters: 3}": r"algorithm.clusters: unknown key",
    "algorithm: {name: dpcfl}": r"algorithm.name: 'dpcfl' .* allowed: dp-ifca, global, .*, r-dpcfl",
    "data: {name: mnst}": r"data.name: 'mnst' \(did you mean mnist\?\)",
    "model: {name: cn}": r"model.name: 'cn'",
    "federation: {kind: ring}": (
        r"federation.kind: 'ring'; allowed: clusters, dirichlet, natural, groups or package.module:function"
    ),
    "privacy: {epsilon: -1}": r"privacy.epsilon: -1 is not allowed, .*inf or a number from 1e-09",
    "privacy: {epsilon: .nan}": r"privacy.epsilon: nan is not allowed",
    "privacy: {epsilon: many}": r"privacy.epsilon: 'many' is not allowed",
    "privacy: {delta: 1}": r"privacy.delta: 1 is not allowed",
    "privacy: {unit: family}": r"privacy.unit: 'family' is not allowed",
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
    "algorithm: {name: global}\nprivacy: text": r"privacy: 'text' is not allowed",
    "algorithm: {name: r-dpcfl, first_round_noise: -2}": r"algorithm.first_round_noise: -2",
    "algorithm: {name: r-dpcfl, clusters: 1}": r"algorithm.clusters: 1 is not allowed, should be auto or",
    "engine: {device: tpu}": r"engine.device: 'tpu' is not allowed",
    "seeds: {noise: -1}": r"seeds.noise: -1 is not allowed",
    "- a\n- b": r"should hold sections",
    "schedule: {rounds: 3": r"not YAML, line 1",
    "schedule: {rounds: 3}\nschedule: {rounds: 4}": r"key 'schedule' stands twice",
    "schedule: {rounds: 2020-01-01}": r"schedule.rounds: '2020-01-01' is not allowed, should be",
    "1: {rounds: 3}": r"line 1: key 1 must be a string",
    "schedule: {3: 4}": r"line 1: key 3 must be a string",
    "schedule: {rounds: 3}\nnull: {}": r"line 2: key null must be a string",
    "schedule: {true: 4}": r"key true must be a string",
    "schedule: {rounds: 1:30}": r"schedule.rounds: '1:30' is not allowed",
    "schedule: {rounds: 017}": r"line 1: 017 begins with a zero; write 17, or '017'",
    "privacy: {epsilon: 1e400}": r"line 1: 1e400 is too large for a number; .inf is infinite",
    "seeds: {simulation: 0x" + 5000 * "f" + "}": r"line 1: a number of 5002 digits",
    "schedule: {rounds: !!int 3}": r"line 1: tag:yaml.org,2002:int is not allowed, values without a tag",
    "? [a]\n: 3": r"key a list or a mapping must be a string",
    "schedule:\n\trounds: 3": r"line 2: .*indent with spaces",
    "schedule: {rounds: 2020-13-45}": r"schedule.rounds: '2020-13-45' is not allowed",
    "schedule: &loop {rounds: *loop}": r"line 1: alias \*loop stands for too much, or for itself",
    "schedule: *nowhere": r"line 1: found undefined alias",
    "schedule: !!python/object:os.system {}": r"python/object:os.system is not allowed",
    "seeds: {simulation: 9223372036854775808}": r"seeds.simulation: 9223372036854775808 is not allowed",
    "a: " + 3000 * "[": r"not YAML, it is nested too deeply",
    "schedule: {rounds: 3, lr: 1, bacth: 2, epoch: 1}": r"unknown key.* \(and 1 more mistake\)",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text.replace("\n", " ")[:90])
def test_a_mistake_is_one_line_that_names_the_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=MISTAKES[text]) as caught:
        read_experiment(written(tmp_path, text))
    assert "\n" not in str(caught.value)


CORE = "[yes, off, 1:30, 2020-01-01, 0o17, 0x1f, 1e3, .5, -3, .inf, ~, null, True, 1_000, 00, '017', =]"
SAID = ["yes", "off", "1:30", "2020-01-01", 15, 31, 1000.0, 0.5, -3, math.inf, None, None, True]


def test_plain_values_mean_what_yaml_1_2_says() -> None:
    assert parse_yaml(CORE) == [*SAID, "1_000", 0, "017", "="]
    assert parse_yaml("2020-01-01: 3\nyes: no") == {"2020-01-01": 3, "yes": "no"}
    assert parse_yaml("a: &a {x: 1}\nb: *a") == {"a": {"x": 1}, "b": {"x": 1}}


def test_what_is_written_is_read_as_it_was() -> None:
    for text in ("1e3", "0o17", "yes", "1:30", "017", "2020-01-01", "", "~", "<<", "=", ".inf", "true", "1."):
        assert parse_yaml(yaml_text({text: [text]})) == {text: [text]}
    assert parse_yaml(yaml_text([1e-300, 1e22, math.inf, 7, None, False])) == [
        *(1e-300, 1e22, math.inf, 7, None, False)
    ]


LISTS = ["a: &a [x, x, x, x, x, x, x, x, x]"]
LISTS += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairwise("abcdefghi")]
MERGED = ["a: &a {x: 1}"]
MERGED += [f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}" for old, new in pairwise("abcdefghi")]
BOMBS = {
    "\n".join(LISTS): "line 5: alias .* too much",
    "\n".join(MERGED): "line 2: merge keys .* not allowed",
}
BOMBS["a: 1\n" + 2**22 * "#"] = "it is too long; allowed: 4 MiB"


@pytest.mark.parametrize("text", BOMBS, ids=["aliases", "merges", "long"])
def test_no_text_takes_longer_than_its_length_says(text: str, tmp_path: Path) -> None:
    before = time.monotonic()
    with pytest.raises(InputError, match=BOMBS[text]) as caught:
        read_experiment(written(tmp_path, text))
    assert time.monotonic() - before < 5
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["3", "[1]", "text", ""])
def test_an_override_repairs_no_section_that_is_wrong(wrong: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"schedule: {wrong}")
    for overrides in ([], ["schedule.rounds=3"], ["algorithm.name=global"]):
        with pytest.raises(InputError, match=r"schedule: .* is not allowed, should be a section of keys"):
            read_experiment(path, overrides)
    nested = written(tmp_path, "schedule: {augmentation: null}")
    assert read_experiment(nested, ["schedule.augmentation.copies=2"]).schedule.augmentation is not None


def test_no_section_hides_an_override_inside_it() -> None:
    for texts in (["schedule.lr=1", "schedule={rounds: 4}"], ["schedule={rounds: 4}", "schedule.lr=1"]):
        with pytest.raises(InputError, match=r"--set: schedule\S* is set beside schedule"):
            read_experiment(None, texts)
    assert read_experiment(None, ["schedule.rounds=3", "schedule.rounds=4"]).schedule.rounds == 4


def test_twenty_thousand_overrides_are_read_in_a_moment() -> None:
    texts = [f"privacy.budgets.client-{number}={{epsilon: 2}}" for number in range(20_000)]
    begun = time.process_time()
    assert len(read_experiment(None, texts).privacy.budgets) == 20_000
    assert time.process_time() - begun < 15  # a copy of all for each takes a minute


def test_an_override_changes_one_of_two_keys_that_name_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, "privacy: {budgets: {a: &one {epsilon: 2}, b: *one}}")
    budgets = read_experiment(path, ["privacy.budgets.a.epsilon=3"]).privacy.budgets
    assert [budgets[name].epsilon for name in "ab"] == [3, 2]


def test_a_missing_or_binary_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_experiment(tmp_path / "nothing.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match=r"binary.yaml"):
        read_experiment(binary)
    with pytest.raises(InputError, match=r"a folder, a pipe or a device"):
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
