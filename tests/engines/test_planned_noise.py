"""An engine that would draw less noise than planned releases nothing, whichever kind of noise it is."""

from pathlib import Path

import pytest
from cohort_setup import ROUTED, SUM, Engine, job_of, names_of, population_plan, rebalanced

from coterie.algorithms.protocol import Cohort, Count, Sum
from coterie.privacy import CohortSums
from coterie.privacy.errors import NoiseError
from coterie.privacy.mechanisms import NoisySum

TWELVE = names_of(12)
LESS = property(lambda self: 0.9 * self.clip * self.multiplier)


def test_sums_with_nine_tenths_of_the_noise_are_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoisySum, "noise_std", LESS)
    with Engine(tmp_path, population_plan(SUM), TWELVE) as engine:
        opened = engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)
        with pytest.raises(NoiseError, match="is planned"):
            engine.cohorts.add_up(Sum(opened))


def test_a_histogram_with_nine_tenths_of_the_noise_is_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    less = property(lambda self: 0.9 * self.histogram_ratio * self.multiplier)
    monkeypatch.setattr(CohortSums, "histogram_multiplier", less)
    with Engine(tmp_path, population_plan(ROUTED), TWELVE) as engine:
        opened = engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)
        with pytest.raises(NoiseError, match="is planned"):
            engine.cohorts.count(Count(opened))


def test_identifiers_with_nine_tenths_of_the_noise_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    less = property(lambda self: 0.9 * self.identifier_ratio * self.multiplier / 2)
    monkeypatch.setattr(CohortSums, "identifier_multiplier", less)
    with Engine(tmp_path, population_plan(rebalanced(12, 6)), TWELVE) as engine:
        opened = engine.cohorts.open(Cohort("sums", job_of(TWELVE)), 1)
        with pytest.raises(NoiseError, match="is planned"):
            engine.cohorts.add_up(Sum(opened))
