"""An audit finds what was planted: every mistake of the gallery is a violation, and honest code is none."""

from collections.abc import Iterator
from itertools import count
from unittest import mock

import pytest
from planted import GALLERY, Planted, large_batches, routed, scores, selection

from coterie.audit.games import Game
from coterie.audit.playing import Effort, play
from coterie.audit.verdicts import AuditVerdict
from coterie.privacy import SecretKey


@pytest.fixture(autouse=True)
def _repeatable_keys() -> Iterator[None]:
    """An audit draws a key for each engine: here from seeds, so that a verdict does not depend on the day."""
    seeds = count(1)
    with mock.patch.object(SecretKey, "from_os", side_effect=lambda: SecretKey.from_seed(next(seeds))):
        yield


@pytest.mark.parametrize("planted", GALLERY, ids=lambda planted: planted.name)
def test_a_planted_mistake_is_found(planted: Planted) -> None:
    with planted.patch():
        outcome = play(planted.game(), Effort(planted.quick, explore=planted.explore), significance=0.05)
    assert outcome.found.verdict is AuditVerdict.VIOLATED, outcome
    assert outcome.found.lower > outcome.found.claimed


@pytest.mark.parametrize(
    "game",
    [large_batches, selection, routed, scores],
    ids=lambda game: game.__name__,
)
def test_honest_code_is_not_accused(game: "type[Game]") -> None:
    outcome = play(game(), Effort(320, explore=8), significance=0.05)
    assert outcome.found.verdict is not AuditVerdict.VIOLATED, outcome
    assert outcome.found.lower <= outcome.found.claimed


def test_there_are_sixteen_kinds_of_mistakes_and_more() -> None:
    assert len({planted.name for planted in GALLERY}) == len(GALLERY) >= 16
