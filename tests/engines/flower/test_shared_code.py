"""Code of packages between sites: the same version on both sides, by the operator's consent, never sent."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_site import LIMITS, contract, deliver, site

from coterie.engines.flower import messages
from coterie.engines.flower.contract import promised
from coterie.engines.flower.review import in_words, model_source
from coterie.engines.flower.shared_code import SharedCode, own_code
from coterie.models import ModelSettings
from coterie.plugins import ALGORITHM, MODEL

CODE = """
from torch import nn

def network(task):
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
"""
_names = (f"nets_of_test_{number}" for number in itertools.count())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that is installed here, in version 1.2."""
    name = next(_names)
    folder = tmp_path / "site-packages"
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(CODE)
    told = folder / f"{name}-1.2.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (told / "top_level.txt").write_text(f"{name}\n")
    monkeypatch.syspath_prepend(str(folder))
    return name


def offered(folder: Path, package: str, code: tuple[SharedCode, ...]) -> str | None:
    """Why a site that allows the model refuses it."""
    model = ModelSettings(name=f"{package}:network")
    made = site(folder, replace(LIMITS, models=(model.name,)))
    answer = deliver(made, messages.OFFER, contract(model=model, code=code).to_content())
    made.close()
    return messages.is_refusal(answer)


def test_the_same_version_on_both_sides_is_signed(tmp_path: Path, package: str) -> None:
    name = f"{package}:network"
    here = SharedCode.here(MODEL, name)
    assert here == SharedCode("model.name", name, package, "1.2", None)
    assert package not in sys.modules  # nothing of it is run to find that out
    assert offered(tmp_path / "state", package, (here,)) is None


@pytest.mark.parametrize("theirs", ["1.3", None], ids=["another version", "no version"])
def test_another_version_is_refused_with_one_line_at_both_ends(
    tmp_path: Path, package: str, theirs: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    here = SharedCode.here(MODEL, f"{package}:network")
    code = () if theirs is None else (replace(here, version=theirs),)
    assert offered(tmp_path / "state", package, code) == "code version"
    assert "install the same package on both sides" in messages.REFUSALS["code version"]
    [line] = [each.getMessage() for each in caplog.records if "install the same" in each.getMessage()]
    assert f"this site {package} 1.2" in line
    assert theirs is None or f'"{package} 1.3"' in line
    assert package not in sys.modules
    assert not (tmp_path / "state" / "contract.json").exists()


def test_files_that_are_from_no_package_are_compared_by_what_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loose_nets.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    here = SharedCode.here(MODEL, "loose_nets:network")
    assert here.version is None
    assert here.sha256 is not None
    assert offered(tmp_path / "a", "loose_nets", (replace(here, sha256="0" * 64),)) == "code version"
    assert offered(tmp_path / "b", "loose_nets", (here,)) is None


def test_the_operator_reads_package_and_version(package: str) -> None:
    model = ModelSettings(name=f"{package}:network")
    code = tuple(SharedCode.here(kind, name) for kind, name in own_code(model))
    assert f"of {package} 1.2, the same on both sides" in model_source(contract(model=model, code=code))


def test_the_operator_reads_where_the_server_says_its_algorithm_is_from() -> None:
    agreed = contract(code=(SharedCode(ALGORITHM.key, "theirs", "pack", "2.0", None),))
    told = dict(in_words(agreed, promised(agreed, []), 18))
    assert 'which the server says is from "pack 2.0"' in told["what is computed"]


def test_contracts_without_such_code_say_nothing_of_it() -> None:
    assert "code" not in contract().to_json()
