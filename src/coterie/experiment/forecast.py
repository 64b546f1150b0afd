"""Before the cells of a sweep run: whether they can, and how long all of them will take."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import cast

from coterie.data import Federation, build_federation, load_dataset
from coterie.engines.clients import seconds_per_gradient
from coterie.engines.features import encoded
from coterie.experiment.calibrated import CalibratedRun, build_algorithm
from coterie.experiment.local import calibrate, device_of, truth_of
from coterie.experiment.loop import count_gradients
from coterie.experiment.recipe import sized
from coterie.experiment.sweep import Cell
from coterie.training.learner import Batch

START_SECONDS = 3.0
"""For a process to start and to import what it needs."""


@dataclass(frozen=True)
class Forecast:
    """What each cell has to do.

    Args:
        work: in seconds of one core; or, where nothing was measured, in gradients or rounds.
        timed: whether it is in seconds.
    """

    work: Mapping[str, float]
    timed: bool = False


def by_rounds(cells: Sequence[Cell]) -> Forecast:
    """Where nobody can look ahead: every round counts alike."""
    return Forecast({cell.name: float(cell.experiment.schedule.rounds) for cell in cells})


def look_ahead(cells: Sequence[Cell], out: Path) -> Forecast:
    """Read the data of all unfinished cells, calibrate the first that can be, and count everyone's gradients.

    Raises:
        InputError: data are missing. Whatever stops the first cell, where none can run and none ever did.
    """
    unfinished = [cell for cell in cells if not cell.files(out).finished]
    model, gpu = cast(CalibratedRun | None, None), False
    preparing, gradients, refused = 0.0, dict[str, int](), dict[str, Exception]()
    by_data = sorted(unfinished, key=lambda cell: repr(cell.experiment.data))
    for _, alike in groupby(by_data, key=lambda cell: repr(cell.experiment.data)):
        began, members = time.perf_counter(), list(alike)
        first = members[0].experiment
        dataset, federations = load_dataset(first.data, first.seeds.simulation), dict[str, Federation]()
        for cell in members:
            chosen = cell.experiment
            setting = repr(chosen.model_copy(update={"seeds": first.seeds}).model_dump(mode="json"))
            if setting in refused:
                continue
            try:
                # Another seed deals other records, but as many, or nearly.
                persons = chosen.privacy.persons
                dealt = repr((chosen.federation, persons))
                if dealt not in federations:
                    federations[dealt] = build_federation(
                        dataset, chosen.federation, first.seeds.simulation, persons
                    )
                if model is None:
                    gpu = device_of(chosen).type != "cpu"
                    # A GPU is for the cells.
                    here = {"engine": chosen.engine.model_copy(update={"device": "cpu"})}
                    model = calibrate(chosen.model_copy(update=here), federations[dealt])
                    preparing = START_SECONDS + time.perf_counter() - began
                gradients[cell.name] = _gradients(cell, model, federations[dealt])
            except Exception as reason:  # it stops its cell, not the others
                refused[setting] = reason
    if model is None:
        if refused and len(unfinished) == len(cells):
            raise next(iter(refused.values()))
        return Forecast({})
    if gpu:  # many clients in one program: the first rounds will tell
        return Forecast(gradients)
    assert model.federation is not None
    device, few = model.learner.device, model.federation.clients[0].train.take(slice(0, 8))
    seen = encoded(few, model.experiment.model.features, model.federation.task, device)
    speed = seconds_per_gradient(model.learner, Batch.of(seen, device))
    return Forecast({name: preparing + count * speed for name, count in gradients.items()}, timed=True)


def _gradients(cell: Cell, model: CalibratedRun, federation: Federation) -> int:
    """Gradients of single records in a whole run, in expectation; the noise that it needs changes none."""
    records = {client.name: len(client.train) for client in federation.clients}
    facts = replace(model.facts, clients=tuple(records), records=records, structure=federation.structure)
    algorithm = build_algorithm(sized(cell.experiment, federation.task, records), truth_of(federation))
    plan = algorithm.plan(facts)
    planned = {unit.subject: {each.name: each.times for each in unit.releases} for unit in plan.units}
    return count_gradients(algorithm, plan, records, planned)


class TimeLeft:
    """How long it still takes, from the forecast first and from what was done in which time later."""

    def __init__(self, forecast: Forecast, at_once: int) -> None:
        self._forecast, self._at_once, self._began = forecast, at_once, time.monotonic()
        self._first: float | None = None
        self._expected: float | None = None

    def after(self, done: Mapping[str, float]) -> float | None:
        """Seconds, when of each cell this share is done; None where nothing is known yet."""
        work = [own * (1.0 - done[name]) for name, own in self._forecast.work.items()]
        if self._first is None:
            self._first = sum(work)
            if self._forecast.timed:
                self._expected = max(sum(work) / self._at_once, *work, 0.0)
        if not self._first:
            return None
        share, elapsed = 1.0 - sum(work) / self._first, time.monotonic() - self._began
        if self._expected is None:
            return elapsed / share - elapsed if share > 0 else None
        # What was expected counts as if so much had been seen of it, and less and less.
        trusted = self._expected * (1.0 - share) ** 2
        whole = (elapsed + trusted) / (share + (1.0 - share) ** 2)
        return max(0.0, whole - elapsed)
