"""What tests of every room share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _register_of_all_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test enters what records have paid in anybody's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_REGISTER", str(tmp_path_factory.mktemp("registers") / "all"))
        yield


@pytest.fixture
def register(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A register of what records have paid, for one test alone."""
    folder = tmp_path_factory.mktemp("register") / "register"
    monkeypatch.setenv("COTERIE_REGISTER", str(folder))
    return folder


@pytest.fixture(scope="session", autouse=True)
def _features_of_all_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that tests compute stays in anybody's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real datasets; tests that need it are skipped where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("COTERIE_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no real datasets: {folder} does not exist (set COTERIE_DATA)")
    return folder


@pytest.fixture(params=[False, True], ids=["widest", "narrow"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of the processor's kernels: also the code for a processor with AVX2 alone."""
    from coterie.training import llvm_builder

    if request.param:
        monkeypatch.setattr(llvm_builder, "machine", lambda: (8, 10))
        llvm_builder.compiled.cache_clear()
    yield
    if request.param:
        llvm_builder.compiled.cache_clear()
