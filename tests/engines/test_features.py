"""Public features: computed once, kept for their owner within a limit, and each record's from it alone."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import coterie as ct
from coterie.data import Client, Federation, Records, Task, load_dataset
from coterie.engines import features
from coterie.engines.feature_cache import FeatureCache
from coterie.engines.features import encoded, featured
from coterie.errors import CoterieError, InputError
from coterie.experiment import local
from coterie.experiment.schema import Experiment
from coterie.models import ModelSettings, build_model, public_features, scattering
from coterie.models.features import UnitNorm
from coterie.models.scattering import Scattering
from coterie.models.settings import OWN_FEATURES

TASK = Task("classification", (1, 12, 12), 3)
CPU = torch.device("cpu")


def records(count: int, seed: int) -> Records:
    rng = np.random.default_rng(seed)
    return Records(rng.random((count, *TASK.shape), dtype=np.float32), rng.integers(3, size=count))


def federation(seed: int = 0) -> Federation:
    clients = (Client(f"c{k}", records(9 + k, seed + k), records(0, 0), records(4, 50 + k)) for k in range(3))
    return Federation(tuple(clients), TASK)


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "features")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records went through a transform, call by call."""
    counted: list[int] = []
    forward = Scattering.forward

    def count(self: Scattering, images: torch.Tensor) -> torch.Tensor:
        counted.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(Scattering, "forward", count)
    return counted


# --- what a federation becomes ------------------------------------------------------------------------


def test_every_part_of_every_client_is_transformed_and_nothing_else_changes(cache: FeatureCache) -> None:
    raw = federation()
    seen = featured(raw, "scattering", CPU, cache).federation
    assert seen.task == Task("classification", (81, 3, 3), 3)
    whole = Scattering(TASK)
    for before, after in zip(raw.clients, seen.clients, strict=True):
        assert before.name == after.name
        for part in ("train", "validation", "test"):
            own, made = getattr(before, part), getattr(after, part)
            np.testing.assert_array_equal(made.targets, own.targets)
            assert made.features.shape == (len(own), 81, 3, 3)
            for one, seen_of_it in zip(own.features, made.features, strict=True):
                np.testing.assert_array_equal(seen_of_it, whole(torch.from_numpy(one[None]))[0].numpy())
    assert featured(raw, "none", CPU, cache).federation is raw


def test_the_table_is_the_file_and_holds_what_clients_train_on(cache: FeatureCache) -> None:
    seen = featured(federation(), "scattering", CPU, cache)
    table = seen.table(CPU)
    assert table is not None
    assert table.file is not None
    train = [client.train for client in seen.federation.clients]
    np.testing.assert_array_equal(table.features.numpy(), np.concatenate([own.features for own in train]))
    np.testing.assert_array_equal(table.targets.numpy(), np.concatenate([own.targets for own in train]))
    assert all(isinstance(own.features, np.memmap) for own in train), "no copy in memory"


def test_records_without_a_cache_have_the_same_features(cache: FeatureCache) -> None:
    own = records(5, 1)
    found = encoded(own, "scattering", TASK, CPU, cache), encoded(own, "scattering", TASK, CPU)
    np.testing.assert_array_equal(found[0].features, found[1].features)
    assert encoded(own, "none", TASK, CPU) is own
    assert encoded(records(0, 1), "scattering", TASK, CPU).features.shape == (0, 81, 3, 3)


# --- the cache ------------------------------------------------------------------------------------------


def test_features_are_computed_once_for_the_same_records(cache: FeatureCache, computed: list[int]) -> None:
    digests = {featured(federation(), "scattering", CPU, cache).digest for _ in range(3)}
    assert len(digests) == 1
    assert sum(computed) == 9 + 10 + 11 + 3 * 4
    other = featured(federation(seed=7), "scattering", CPU, cache)
    assert other.digest not in digests
    assert sum(computed) == 2 * 42


def test_another_version_of_a_transform_does_not_find_the_old_ones_features(
    cache: FeatureCache, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    featured(federation(), "scattering", CPU, cache)
    monkeypatch.setattr("coterie.models.scattering.VERSION", scattering.VERSION + 1)
    monkeypatch.setattr("coterie.models.features._built", {})
    featured(federation(), "scattering", CPU, cache)
    assert sum(computed) == 2 * 42


def test_files_are_for_their_owner_alone(cache: FeatureCache) -> None:
    featured(federation(), "scattering", CPU, cache)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in cache.folder.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_a_computation_that_stops_leaves_nothing_that_could_be_taken_for_features(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def stop(self: Scattering, images: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Scattering, "forward", stop)
        with pytest.raises(KeyboardInterrupt):
            featured(federation(), "scattering", CPU, cache)
    assert calls
    assert not list(cache.folder.glob("*.f32"))
    featured(federation(), "scattering", CPU, cache)


@pytest.mark.parametrize("harm", ["short", "no lines", "bad lines"])
def test_a_damaged_entry_is_computed_again(cache: FeatureCache, computed: list[int], harm: str) -> None:
    digest = featured(federation(), "scattering", CPU, cache).digest
    [numbers], [about] = cache.folder.glob("*.f32"), cache.folder.glob("*.json")
    if harm == "short":
        os.truncate(numbers, numbers.stat().st_size - 4)
    elif harm == "no lines":
        about.unlink()
    else:
        about.write_text("{")
    assert featured(federation(), "scattering", CPU, cache).digest == digest
    assert sum(computed) == 2 * 42


def test_the_oldest_that_nobody_uses_goes_when_there_is_no_more_room(tmp_path: Path) -> None:
    each = 42 * 81 * 9 * 4
    cache = FeatureCache(tmp_path, gib=2.5 * each / 2**30)
    held = featured(federation(seed=1), "scattering", CPU, cache)
    featured(federation(seed=2), "scattering", CPU, cache)
    featured(federation(seed=3), "scattering", CPU, cache)
    assert len(list(tmp_path.glob("*.f32"))) == 2
    assert held.mapped is not None
    assert held.mapped.path.exists(), "in use, though the oldest"
    assert sum(path.stat().st_size for path in tmp_path.glob("*.f32")) <= cache.limit


def test_more_than_the_limit_is_refused_in_one_line(tmp_path: Path, computed: list[int]) -> None:
    cache = FeatureCache(tmp_path, gib=1e-5)
    with pytest.raises(
        InputError, match=r"model.features: scattering would take .* COTERIE_CACHE_GIB allows"
    ):
        featured(federation(), "scattering", CPU, cache)
    assert not computed


def test_a_limit_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_CACHE_GIB", "much")
    with pytest.raises(InputError, match=r"COTERIE_CACHE_GIB: 'much'"):
        FeatureCache(tmp_path)


def test_how_long_it_takes_is_said(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(features, "_WORTH_SAYING", 0.0)
    with caplog.at_level("INFO", "coterie"):
        featured(federation(), "scattering", CPU, cache)
    assert any(
        "computing scattering features of 42 records" in line and "left" in line for line in caplog.messages
    )


# --- runs ---------------------------------------------------------------------------------------------------

RUN = {
    "data": {"name": "glyphs", "size": 240},
    "federation": {"sizes": [2, 2], "records_per_client": 40, "test_per_client": 10},
    "algorithm": {"name": "global"},
    "model": {"features": "scattering"},
    "schedule": {"rounds": 2, "batch": 20, "lr": 2.0},
    "privacy": {"delta": 1e-3},
    "seeds": {"noise": 5},
    "evaluation": {"references": False},
    "engine": {"workers": 1},
}


def state_of(folder: Path) -> dict[str, bytes]:
    [path] = folder.rglob("state.safetensors")
    return {name: value.tobytes() for name, value in load_file(path).items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    local.run(RUN, folder)
    return folder


def test_workers_map_the_file_and_compute_the_same_bits(finished: Path, tmp_path: Path) -> None:
    local.run({**RUN, "engine": {"workers": 2}}, tmp_path / "run")
    assert state_of(tmp_path / "run") == state_of(finished)


def test_models_of_a_run_take_raw_records(finished: Path) -> None:
    run, dataset = ct.load(finished), load_dataset(Experiment.model_validate(RUN).data, 0)
    assert dataset.test is not None
    raw = dataset.test.features[:6]
    model, given = run.model(cluster=0), torch.from_numpy(raw)
    assert model.preprocessing.inputs.raw_shape == (1, 28, 28)
    with torch.no_grad():
        expected = model.network(Scattering(dataset.task)(given))
    torch.testing.assert_close(model(given), expected)
    assert [int(name) for name in run.predict(raw, cluster=0)] == expected.argmax(dim=1).tolist()
    exported = torch.export.export(model, (given[:3],), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.testing.assert_close(exported.module()(given), expected)


def test_noise_is_bound_to_the_bits_of_the_features() -> None:
    plain, seen = (
        local.calibrate(Experiment.model_validate({**RUN, "model": {"features": name}}))
        for name in ("none", "scattering")
    )
    assert seen.featured.digest in seen.context()
    assert "features" not in plain.context(), "what was computed before there were any keeps its noise"


# --- a user's own encoder --------------------------------------------------------------------------------


class Frozen(nn.Module):
    """Batch norms with fixed statistics, as published encoders have."""

    public_data = "pictures of nobody, CC0"

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.conv(images)).relu().flatten(1)
        return found


class Mixing(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) - images.flatten(1).mean(dim=0)


class MixingSometimes(nn.Module):
    """Passes every check of batches, and mixes those of a hundred records."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flat = images.flatten(1)
        return flat - flat.mean(dim=0) if len(flat) == 100 else flat


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        return images.flatten(1) + self.seen


class Trained(nn.Module):
    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        return [images]


def frozen(task: Task) -> nn.Module:
    return Frozen()


def mixing(task: Task) -> nn.Module:
    return Mixing()


def mixing_sometimes(task: Task) -> nn.Module:
    return MixingSometimes()


def remembering(task: Task) -> nn.Module:
    return Remembering()


def no_tensor(task: Task) -> nn.Module:
    return Trained()


HERE = f"{__name__}:"


def test_an_own_encoder_has_norm_one_and_a_record_nothing_of_others(cache: FeatureCache) -> None:
    seen = featured(federation(), f"{HERE}frozen", CPU, cache)
    assert seen.federation.task.shape == (400,)
    made = np.concatenate([client.train.features for client in seen.federation.clients])
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1.0, rtol=1e-6)
    alone = encoded(federation().clients[1].train.take(slice(3, 4)), f"{HERE}frozen", TASK, CPU)
    np.testing.assert_array_equal(alone.features[0], seen.federation.clients[1].train.features[3])


def test_records_that_no_check_found_mixed_stay_apart_all_the_same() -> None:
    many = records(100, 3)
    found = encoded(many, f"{HERE}mixing_sometimes", TASK, CPU).features
    flat = many.features.reshape(100, -1)
    np.testing.assert_allclose(found, flat / np.linalg.norm(flat, axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixing", "depends on the other records of its batch"),
        ("remembering", "changes as records pass|another output when it passes again"),
        ("no_tensor", "fails on records"),
        ("absent", "AttributeError"),
    ],
)
def test_an_encoder_that_does_not_take_records_one_by_one_is_refused(name: str, reason: str) -> None:
    with pytest.raises(InputError, match=rf"model.features: .*{name}.*({reason})"):
        public_features(f"{HERE}{name}", TASK)


def test_a_guarantee_names_the_encoder_and_its_public_data() -> None:
    own = {**RUN, "data": {"name": "digits"}, "model": {"features": f"{HERE}frozen"}}
    said = local.calibrate(Experiment.model_validate(own)).guarantee.caveats
    assert OWN_FEATURES in said
    assert any("pictures of nobody, CC0" in caveat for caveat in said)


def test_a_norm_that_is_none_makes_no_features() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0], [1e30, 1e30]])
    made = UnitNorm()(rows)
    torch.testing.assert_close(made[0], torch.tensor([0.6, 0.8]))
    assert not made[1:4].any()
    assert float(made[4].norm()) == pytest.approx(1.0)


# --- settings -----------------------------------------------------------------------------------------------


def test_settings_without_features_say_what_they_always_said() -> None:
    assert "features" not in repr(ModelSettings())
    assert "features='scattering'" in repr(ModelSettings(features="scattering"))
    assert ModelSettings(features="scattering").given() == {}


@pytest.mark.parametrize("name", ["wavelets", "no spaces:allowed", ""])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(
        CoterieError, match=r"model.features: .*; allowed: none, scattering or package.module"
    ):
        Experiment.model_validate({"model": {"features": name}})


def test_views_cannot_be_made_of_features() -> None:
    views = {**RUN, "schedule": {**RUN["schedule"], "augmentation": {"copies": 2}}}  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"schedule.augmentation: with model.features scattering"):
        local.calibrate(Experiment.model_validate(views))


@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn"])
def test_heads_take_the_features(name: str) -> None:
    task = Task("classification", (1, 16, 16), 3)
    head = build_model(ModelSettings(name=name, features="scattering"), task, 0)
    assert head(torch.zeros(2, 81, 4, 4)).shape == (2, 3)
