"""The `data` section of an experiment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from coterie.data import DataSettings, FederationSettings, NaturalFederation, load_dataset
from coterie.errors import DataError


def test_digits_are_all_there_and_scaled_by_sixteen() -> None:
    data = load_dataset(DataSettings(), seed=0)
    assert len(data.train) == 1797
    assert data.train.features.shape == (1797, 1, 8, 8)
    assert set(np.unique(data.train.features * 16)) == set(range(17))
    assert np.bincount(data.train.targets).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_unknown_names_suggest_the_nearest_and_list_all() -> None:
    with pytest.raises(ValidationError, match=r"fashion_mnist.*did you mean fashion-mnist.*heart-disease"):
        DataSettings(name="fashion_mnist")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"name": "digits", "length": 3}, "length: digits has no such option; it belongs to shakespeare"),
        ({"name": "shakespeare", "pixels": "unit"}, "it belongs to mnist, fashion-mnist, emnist, cifar10"),
        ({"name": "mnist", "path": "x"}, "it belongs to folder"),
        ({"name": "folder"}, "path: missing; name the folder"),
        ({"name": "glyphs", "classes": 63}, "less than or equal to 62"),
        ({"name": "glyphs", "size": 0}, "greater than 0"),
    ],
)
def test_options_that_do_not_apply_are_refused(options: dict[str, object], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        DataSettings.model_validate(options)


@pytest.mark.parametrize("key", ["scale", "standardize", "normalise", "min-max", "client_mean"])
def test_scaling_by_a_clients_own_statistics_is_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ValidationError, match="breaks the per-record sensitivity"):
        DataSettings.model_validate({"name": "digits", key: "per-client"})


@pytest.mark.parametrize("name", sorted(set(DataSettings.functions) - {"folder"}))
def test_settings_survive_a_round_trip_through_plain_data(name: str) -> None:
    settings = DataSettings(name=name)
    assert DataSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_the_kind_decides_which_federation_settings_are_meant() -> None:
    adapter: TypeAdapter[object] = TypeAdapter(FederationSettings)
    assert isinstance(adapter.validate_python({"kind": "natural", "clients": 3}), NaturalFederation)
    with pytest.raises(ValidationError, match="sizes"):
        adapter.validate_python({"kind": "natural", "sizes": [3]})


@pytest.mark.parametrize(
    "name", ["mnist", "fashion-mnist", "cifar10", "shakespeare", "school", "heart-disease"]
)
def test_absent_files_are_named_with_the_place_they_belong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    with pytest.raises(
        DataError, match=f"data.name: {name}: {tmp_path / name} lacks .*COTERIE_DATA"
    ) as refused:
        load_dataset(DataSettings(name=name), seed=0)
    assert "\n" not in str(refused.value)


def test_without_the_variable_files_belong_in_the_home_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=str(tmp_path / ".cache" / "coterie" / "mnist")):
        load_dataset(DataSettings(name="mnist"), seed=0)


def test_the_data_room_does_without_torch_and_is_quick_to_import() -> None:
    code = "import sys, coterie.data; print([m for m in ('torch', 'sklearn', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("length", "stride"), [(80, None), (80, 81), (80, 200), (80, 40), (20, 1), (3, 3)])
def test_a_character_is_in_as_many_windows_as_the_settings_say(length: int, stride: int | None) -> None:
    settings = DataSettings(name="shakespeare", length=length, stride=stride)
    counts = np.zeros(2000, dtype=int)
    for first in range(0, 2000 - length, stride or length + 1):
        counts[first : first + length + 1] += 1
    assert settings.windows_per_character == counts.max()


def test_other_data_have_no_windows() -> None:
    assert DataSettings().windows_per_character == 1
