"""Cards: every field that a claim must state, from material that verifies, and what is still open."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_lifetime import experiment, write_clients
from trained_runs import SMALL

from coterie.errors import CoterieError, InputError, LedgerError
from coterie.experiment import local
from coterie.experiment.card import CARD, FIELDS, Card, check_card, commit, write_card
from coterie.experiment.card_answers import ANSWERS, CLAIMS, QUESTIONS, OperatorAnswers, ask
from coterie.experiment.exporting import export
from coterie.experiment.recorded import RecordedRun
from coterie.experiment.registry_card import registry
from coterie.experiment.trained import TrainedRun
from coterie.experiment.verify import verify
from coterie.privacy import Unit
from coterie.report.card import card_markdown
from coterie.report.model_card import model_card

REGISTRY = {
    "": ("url_slug", "status", "tier"),
    "basic": (
        *("name", "data_curators", "intended_use", "data_product_type", "data_product_region", "description"),
        *("publication_date", "data_product_sector"),
    ),
    "dp_variant": ("variant_name", "data_domain", "unprotected_quantities"),
    "privacy_loss": (
        *("privacy_unit", "privacy_unit_details", "privacy_parameters", "privacy_parameters_details"),
    ),
    "deployment_model": (
        *("model_name", "model_name_details", "actors", "release_type", "release_type_details"),
        *("data_source_type", "data_source_type_details", "access_type", "access_type_details"),
    ),
    "accounting": ("post_processing", "composition"),
    "implementation": ("preprocessing_and_hyperparameter_tuning", "mechanisms", "justification"),
    "administrative": ("sources", "notes", "registry_authors"),
}
"""What the registry asks for, by section."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local.run(SMALL, tmp_path_factory.mktemp("runs") / "mine").folder


@pytest.fixture
def own(register: Path, tmp_path: Path) -> Path:
    data = write_clients(tmp_path / "mine", 0)
    local.run(experiment(data), tmp_path / "first")
    return local.run(experiment(data), tmp_path / "second").folder


def test_every_field_is_there_and_open_questions_are_named(published: Path) -> None:
    told = Card.of(published).content
    assert set(FIELDS) <= set(told)
    assert told["missing"] == list(QUESTIONS)
    assert told["complete"] is False
    promise = Card.of(published).promise
    assert told["epsilon"] == promise.epsilon
    assert told["epsilon_at_1e-5"] == told["profile"]["epsilon_at_delta"]["1e-05"] > promise.epsilon
    assert told["mu"]["value"] > 0
    assert told["audit"] == "none"
    assert any("held-out" in line for line in told["not_private"])
    assert told["history"]["total_epsilon"] is None
    assert "published" in told["history"]["text"]
    text = card_markdown(Card.of(published))
    assert all(f"| {name} |" in text for name in FIELDS if name not in ("mechanisms", "per_client"))
    assert "incomplete" in text


def test_the_history_is_that_of_all_runs_on_the_records_as_it_was_then(own: Path, tmp_path: Path) -> None:
    told = write_card(Card.of(own))
    assert told["history"]["experiments"] == 2
    assert told["history"]["total_epsilon"] > told["epsilon"]
    local.run(experiment(tmp_path / "mine"), tmp_path / "third")
    assert verify(own).verdict == "holds"  # as it was when the card was written
    assert Card.of(own).content["history"]["experiments"] == 3


def test_a_changed_figure_of_a_card_is_found(
    own: Path, register: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = write_card(Card.of(own))
    for name in ("epsilon_at_1e-5", "mu", "history", "worst_client", "unprotected", "complete"):
        changed: dict[str, Any] = json.loads(json.dumps(told))
        changed[name] = (
            {"total_epsilon": 0.1, "register": told["history"]["register"]} if name == "history" else 1
        )
        (own / CARD).write_text(json.dumps(changed))
        found = verify(own)
        assert found.verdict == "broken"
        assert f"{CARD}: {name} is" in found.problems[0]
    (own / CARD).write_text(json.dumps({key: value for key, value in told.items() if key != "delta"}))
    with pytest.raises(LedgerError, match="delta is None"):
        check_card(RecordedRun.of_this_version(own))
    (own / CARD).write_text(json.dumps(told | {"commit": "another", "library": {}}))
    assert verify(own).verdict == "holds"  # other programs may have written it
    monkeypatch.setenv("COTERIE_REGISTER", str(register) + "-elsewhere")
    assert verify(own).verdict == "holds"


def test_a_card_holds_wherever_its_folder_is_moved(own: Path, tmp_path: Path) -> None:
    write_card(Card.of(own))
    moved = Path(shutil.copytree(own, tmp_path / "archived"))
    assert verify(moved).verdict == "holds"


def test_a_run_that_does_not_hold_has_no_card(own: Path) -> None:
    path = own / "guarantee.json"
    path.write_text(path.read_text().replace('"delta": 0.001', '"delta": 0.0001'))
    with pytest.raises(LedgerError, match=r"guarantee\.json"):
        Card.of(own)


def test_operators_are_asked_once(own: Path) -> None:
    questions: list[str] = []

    def answer(text: str) -> str:
        questions.append(text)
        return "" if "region" in text else "yes, it is"

    ask(own, Unit.RECORD, answer)
    assert questions == list(QUESTIONS.values())
    ask(own, Unit.RECORD, answer)
    assert len(questions) == len(QUESTIONS)
    told = Card.of(own).content
    assert (told["complete"], told["missing"]) == (True, ["data_product_region"])
    assert told["justification"] == told["records_per_person"] == "yes, it is"
    assert "complete but for a registry's fields" in card_markdown(Card.of(own))
    assert set(CLAIMS) <= set(QUESTIONS)
    assert "records_per_person" not in OperatorAnswers({}).asked(Unit.CLIENT)


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: 1\n", "key 'a'"), ("- 1\n", "allowed: keys"), ("name: [x]\n", "name"), ("name: 'x", "not YAML")],
)
def test_answers_that_cannot_be_read_are_one_line(own: Path, text: str, said: str) -> None:
    (own / ANSWERS).write_text(text)
    with pytest.raises(InputError, match=said):
        Card.of(own).content  # noqa: B018


def test_an_audit_beside_the_run_is_quoted(own: Path) -> None:
    release = {"name": "training", "claimed_epsilon": 2.0, "lower_bound": 1.2, "delta": 1e-3}
    audit = {
        "when": "2026-01-02",
        "verdict": "holds",
        "releases": [release | {"confidence": 0.95, "verdict": "holds"}],
    }
    (own / "audit.json").write_text(json.dumps(audit))
    card = Card.of(own)
    assert card.content["audit"]["releases"][0]["lower_bound"] == 1.2
    assert "training: at least 1.20 of 2.00 (holds)" in card_markdown(card)
    (own / "audit.json").write_text("{}")
    with pytest.raises(InputError, match="not an audit"):
        Card.of(own).content  # noqa: B018


def test_the_registrys_fields_are_all_filled(own: Path) -> None:
    content = yaml.safe_load(yaml.safe_dump(registry(Card.of(own))))
    assert set(content) == {*REGISTRY[""], "deployment"}
    assert (content["status"], content["tier"]) == ("Draft", 3)
    assert set(content["deployment"]) == set(REGISTRY) - {""}
    for section, names in REGISTRY.items():
        part = content if not section else content["deployment"][section]
        for name in names:
            assert part[name] not in (None, "", []), name
    assert set(content["deployment"]["privacy_loss"]["privacy_parameters"]) == {"epsilon", "delta", "rho"}
    assert content["deployment"]["basic"]["data_product_type"] == "Machine learning model"
    for section, names in REGISTRY.items():
        assert not section or set(content["deployment"][section]) == set(names)


def test_exported_models_carry_a_header_that_model_hubs_read(published: Path, tmp_path: Path) -> None:
    trained = TrainedRun.open(published)
    export(trained, tmp_path / "out", card=lambda signature: model_card(trained, signature))
    _, header, text = (tmp_path / "out" / "CARD.md").read_text().split("---\n", 2)
    known = yaml.safe_load(header)
    assert known["library_name"] == "coterie"
    assert known["pipeline_tag"] == "image-classification"
    assert "differential-privacy" in known["tags"]
    assert text.lstrip().startswith("# Models of")


def test_a_folder_without_a_run_has_no_card(tmp_path: Path) -> None:
    with pytest.raises(CoterieError):
        Card.of(tmp_path)


def test_the_commit_is_ours_or_unknown() -> None:
    found = commit()
    assert found is None or len(found) == 40
