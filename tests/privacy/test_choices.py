"""Choices on one's own records: their probabilities, what several cost, and a chain that only grows."""

import json
import math
import stat
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from coterie.privacy import Adjacency, LedgerError, SecretKey, epsilon_of
from coterie.privacy.choices import ChargedChoice, ChoiceLedger, composed_choices
from coterie.privacy.errors import CoterieError
from coterie.privacy.events import composed

ERROR_RATE = 1e-6
DELTA = 1e-4


def choice(epsilon: float = 0.5, records: int = 100) -> ChargedChoice:
    return ChargedChoice(epsilon, "0" * 64, candidates=3, records=records)


def probabilities(counts: np.ndarray, epsilon: float) -> np.ndarray:
    weights = np.exp(epsilon * (counts - counts.max()))
    return weights / weights.sum()


def test_models_are_chosen_with_the_probabilities_of_the_exponential_mechanism() -> None:
    """A chi-squared test that errs once in a million; noise of another scale is seen."""
    counts, draws = np.array([50.0, 52.0, 47.0]), 6000
    noise = SecretKey.from_seed(3).stream("selection", subject="a", round=1, release="c", input_hash="0")
    chosen = [choice().selection.choose(counts, counts, noise) for _ in range(draws)]
    seen = np.bincount(chosen, minlength=3)
    assert stats.chisquare(seen, probabilities(counts, 0.5) * draws).pvalue > ERROR_RATE
    for wrong in (0.25, 0.4, 0.65, 1.0):
        assert stats.chisquare(seen, probabilities(counts, wrong) * draws).pvalue < ERROR_RATE


@pytest.mark.parametrize("moved", [(0, 0, -1), (-1, 0, -1), (-1, -1, -1), (-0.3, 0, -1)])
def test_a_record_less_moves_log_probabilities_within_epsilon(moved: tuple[float, ...]) -> None:
    counts = np.array([50.0, 52.0, 47.0])
    ratios = np.log(probabilities(counts, 0.5) / probabilities(counts + np.array(moved), 0.5))
    assert np.ptp(ratios) <= 0.5 + 1e-12
    assert np.abs(ratios).max() <= 0.5 + 1e-12


def test_choices_compose() -> None:
    made = [choice(0.5), choice(0.5), choice(1.5), choice(0.5)]
    together = composed_choices(made, "north", DELTA)
    event = composed([each.selection.event for each in made])
    assert together.epsilon == pytest.approx(epsilon_of(event, DELTA, "rdp", Adjacency.ZERO_OUT))
    assert [release.times for release in together.releases] == [3, 1]
    alone = composed_choices([choice(1.5)], "north", DELTA).epsilon
    assert alone <= 1.5 * (1 + 1e-3)  # by orders that end somewhere
    assert alone < together.epsilon <= 3.0 * (1 + 1e-3)
    many = composed_choices([choice(0.1)] * 200, "north", DELTA)
    assert 1.0 < many.epsilon < 20.0
    assert "one record of north" in many.line
    assert many.epsilon_replace_one > many.epsilon


def test_every_choice_is_a_line_that_stays(tmp_path: Path) -> None:
    path, spent = tmp_path / "choices.jsonl", []
    for _ in range(3):
        with ChoiceLedger.open(path) as ledger:
            ledger.charge(choice())
            spent.append(ledger.guarantee("north", DELTA).epsilon)
    assert spent[0] < spent[1] < spent[2]
    assert len(path.read_text().splitlines()) == 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_changed_dropped_or_doubled_line_is_found(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    with ChoiceLedger.open(path) as ledger:
        for epsilon in (0.5, 0.7, 0.9):
            ledger.charge(choice(epsilon))
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in (
        [*lines[:2], lines[2].replace(b"0.7", b"0.1"), lines[3]],
        [lines[0], *lines[2:]],
        [*lines[:2], lines[1], *lines[2:]],
        lines[1:],
        [b"{}\n", *lines],
    ):
        path.write_bytes(b"".join(changed))
        with pytest.raises(LedgerError, match="line"):
            ChoiceLedger.open(path)
    path.write_bytes(b"".join(lines) + lines[3][:40])  # a crash inside a line: nothing was answered
    with ChoiceLedger.open(path) as ledger:
        assert [each.epsilon for each in ledger.choices] == [0.5, 0.7, 0.9]


def test_one_process_chooses_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    with ChoiceLedger.open(path), pytest.raises(LedgerError, match="another run has this ledger open"):
        ChoiceLedger.open(path)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan])
def test_no_choice_is_charged_that_no_mechanism_makes(epsilon: float, tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    with ChoiceLedger.open(path) as ledger, pytest.raises(CoterieError, match="epsilon"):
        ledger.charge(choice(epsilon))
    assert len(path.read_text().splitlines()) == 1


def test_a_line_of_something_else_is_no_choice(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    with ChoiceLedger.open(path) as ledger:
        line, _ = ledger.link({"choice": {**json.loads(json.dumps(choice().to_json())), "epsilon": -1}})
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(LedgerError, match="line 2 is not a choice"):
        ChoiceLedger.open(path)


def test_nothing_is_charged_to_a_ledger_that_was_replaced_under_it(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    with ChoiceLedger.open(path) as ledger:
        ledger.charge(choice())
        path.rename(tmp_path / "aside")
        with pytest.raises(LedgerError, match="removed or replaced by somebody else"):
            ledger.charge(choice())
    assert len((tmp_path / "aside").read_text().splitlines()) == 2
