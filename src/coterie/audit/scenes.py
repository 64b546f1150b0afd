"""Two neighbouring worlds for one client: the canary, what stands in its place, all others, and where to
start.

Whoever sends the models chooses them, so the start is the attacker's, too. The worst case is a model that is
so sure of the first class that records of that class have no gradient at all: then nothing hides the canary,
whose gradient lies in few coordinates and is longer than any clip. Beside it stand canaries as they might
occur, a mislabelled record and an outlier, at the model's own start."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.algorithms.protocol import Vector
from coterie.data.records import Records, Task
from coterie.privacy import Adjacency
from coterie.training.clipping import clip_rows, clipped_sum
from coterie.training.learner import Batch, Learner
from coterie.training.sketch import Projection

SURE = 1e4
"""Log-odds with which the attacker's model says the first class: far beyond what a float32 softmax
resolves."""
LOUD = 1e3
"""The largest feature of a canary; no clip is longer than the gradient that it makes."""
CROWD = 64
"""The most records with which a canary is surrounded, where more would change nothing."""
HALF_PRECISION = 2900
"""Records whose sum moves by two clips or by none, if anyone adds them up in half precision: a gradient on
two coordinates of equal size makes a sum beyond 2048 on each."""


@dataclass(frozen=True)
class Scene:
    """The two worlds of a game on one client's records.

    Args:
        starts: where the client starts at each use of the release.
        present: the canary; `absent` stands in its place in the other world.
        others: what the client holds besides, in both worlds.
    """

    name: str
    starts: tuple[Vector, ...]
    present: Records
    absent: Records
    others: Records

    def records(self, *, present: bool) -> Records:
        """What the client holds: the canary's place is the first."""
        return Records.joined([self.present if present else self.absent, self.others])


def one_record(task: Task, target: float, place: int | None = None, size: float = LOUD) -> Records:
    """A record of zeros but for one feature, of the task's shape."""
    kind = np.float32 if task.vocabulary is None else np.int64
    features = np.zeros((1, *task.shape), dtype=kind)
    if place is not None:
        features.reshape(-1)[place % features.size] = size if task.vocabulary is None else 1
    labels = np.int64 if task.kind == "classification" else np.float32
    return Records(features, np.array([target], dtype=labels))


def repeated(record: Records, times: int) -> Records:
    """The same record many times."""
    return Records(np.repeat(record.features, times, axis=0), np.repeat(record.targets, times, axis=0))


def last_layer(learner: Learner) -> dict[str, slice]:
    """Where weight and bias of the last dense layer stand among the parameters; nothing without one."""
    dense = [name for name, module in learner.model.named_modules() if isinstance(module, nn.Linear)]
    if not dense:
        return {}
    ends = np.cumsum([0, *learner.layout.sizes])
    places = {name: slice(int(ends[at]), int(ends[at + 1])) for at, name in enumerate(learner.layout.shapes)}
    prefix = f"{dense[-1]}." if dense[-1] else ""
    return {part: places[prefix + part] for part in ("weight", "bias") if prefix + part in places}


def sure_start(learner: Learner, initial: Vector) -> Vector | None:
    """A start that says the first class of every record (0 for a regression); None where none is found."""
    layer, task = last_layer(learner), learner.task
    if "bias" not in layer or layer["bias"].stop - layer["bias"].start != task.outputs:
        return None
    start = initial.copy()
    start[layer["weight"]] = 0.0
    start[layer["bias"]] = 0.0
    if task.kind == "classification":
        start[layer["bias"].start] = SURE
    null = one_record(task, 0)
    return start if _gradient(learner, start, null).abs().max() == 0 else None


def _gradient(learner: Learner, start: Vector, record: Records) -> Tensor:
    return learner.gradients(torch.from_numpy(start), Batch.of(record, learner.device))[0]


def contribution(
    learner: Learner, start: Vector, record: Records, clip: float, projection: Projection | None = None
) -> NDArray[np.float64]:
    """What a record adds to a sum, in clips: its gradient, projected where that is released, and clipped."""
    rows = _gradient(learner, start, record)[None]
    if projection is not None:
        rows = projection(rows)
    return np.asarray(clip_rows(rows, clip)[0] / clip)


class Forge:
    """Makes scenes for a learner whose releases clip at `clip`, of clients with so many records."""

    def __init__(self, learner: Learner, initial: Vector, clip: float, records: int) -> None:
        self.learner, self.initial, self.clip, self.count = learner, initial, clip, records
        self.task = learner.task

    def scenes(self, uses: int, adjacency: Adjacency, *, sampled: bool) -> list[Scene]:
        """Every scene that can be set, the worst cases first."""
        found = [*self._worst(uses, adjacency, sampled=sampled), *self._real(uses)]
        return [self._replaced(scene) if adjacency is Adjacency.REPLACE_ONE else scene for scene in found]

    def _starts(self, uses: int, start: Vector) -> tuple[Vector, ...]:
        """The same start with another last bit for each use: an input that repeats would be no new
        release."""
        starts = []
        for use in range(uses):
            other = start.copy()
            place = int(np.argmax(np.abs(other)))
            for _ in range(use):
                other[place] = np.nextafter(other[place], np.float32(np.inf))
            starts.append(other)
        return tuple(starts)

    def _worst(self, uses: int, adjacency: Adjacency, *, sampled: bool) -> Iterator[Scene]:
        start = sure_start(self.learner, self.initial)
        if start is None:
            return
        task, starts = self.task, self._starts(uses, start)
        other = 1 if task.kind == "classification" else -LOUD
        null = one_record(task, 0)
        alone = repeated(null, min(2, max(1, self.count - 1)))
        bias = Scene("a Dirac on the bias", starts, one_record(task, other), null, alone)
        weights = replace(bias, name="a Dirac on the weights", present=one_record(task, other, 0))
        yield weights
        yield bias
        if uses > 1 and (silent := self._silent(start, weights)) is not None:
            yield replace(weights, name="a Dirac that one use sees", starts=(start, *silent[: uses - 1]))
        if task.vocabulary is None and self.count > 2:
            against = repeated(one_record(task, other, 0, -LOUD), min(CROWD, self.count - 1))
            loud = one_record(task, other, 0, LOUD * 1e4)
            yield replace(weights, name="a Dirac against a crowd", present=loud, others=against)
            if self.count > HALF_PRECISION and not sampled:
                for fewer in (1, 2, 3):
                    crowd = repeated(weights.present, self.count - fewer)
                    name = f"a Dirac in a crowd of {len(crowd):,}"
                    yield replace(weights, name=name, others=crowd)

    def _silent(self, start: Vector, scene: Scene) -> list[Vector] | None:
        """Starts at which neither the canary nor anyone else has a gradient."""
        layer, silent = last_layer(self.learner), start.copy()
        outputs, canary = self.task.outputs, scene.present
        if self.task.kind != "classification" or self.task.vocabulary is not None:
            return None
        weight = silent[layer["weight"]].reshape(outputs, -1)
        gradient = _gradient(self.learner, start, canary).numpy()[layer["weight"]].reshape(outputs, -1)
        said = gradient[0] / max(float(np.abs(gradient[0]).max()), 1e-30)
        weight[1] = said * SURE
        records = Records.joined([canary, scene.absent, scene.others])
        left = self.learner.gradients(torch.from_numpy(silent), Batch.of(records, self.learner.device))
        if float(left.abs().max()) > 0:
            return None
        return [silent + 0, *self._starts(3, silent)[1:]]

    def _real(self, uses: int) -> Iterator[Scene]:
        """Canaries as they might occur, at the start that the model came with."""
        if self.task.vocabulary is not None:
            return
        rng = np.random.default_rng(self.count)
        features = rng.random((1, *self.task.shape), dtype=np.float32)
        starts = self._starts(uses, self.initial)
        usual = Records(features, one_record(self.task, 0).targets)
        # A record that is not finite counts for nothing, by the rule of `clipping`.
        nothing = Records(np.full_like(features, np.nan), usual.targets)
        batch = Batch.of(nothing, self.learner.device)
        if clipped_sum(self.learner, torch.from_numpy(starts[0]), batch, self.clip).abs().max() != 0:
            return
        others = repeated(nothing, min(2, max(1, self.count - 1)))
        said = self.learner.predict(torch.from_numpy(self.initial), torch.from_numpy(features))[0]
        wrong = float(said.argmin()) if self.task.kind == "classification" else 1.0 - float(said[0] > 0.5)
        targets = np.array([wrong], dtype=usual.targets.dtype)
        yield Scene("a mislabelled record", starts, Records(features, targets), nothing, others)
        far = Records(features * np.float32(LOUD), targets)
        yield Scene("an outlier", starts, far, nothing, others)

    def _replaced(self, scene: Scene) -> Scene:
        """The scene in which another record stands in the canary's place: one that pulls the other way."""
        if self.task.vocabulary is not None or not np.isfinite(scene.absent.features).all():
            return scene
        return replace(scene, absent=Records(-scene.present.features, scene.present.targets))


def directions(
    learner: Learner, scene: Scene, clip: float, projection: Projection | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each use the direction in which the worlds differ, and by how many clips: (uses, length), (uses,).

    Where they do not differ, the direction is that of the use before.
    """
    found: list[NDArray[np.float64]] = []
    shifts: list[float] = []
    for start in scene.starts:
        apart = contribution(learner, start, scene.present, clip, projection)
        apart = apart - contribution(learner, start, scene.absent, clip, projection)
        length = float(np.linalg.norm(apart))
        shifts.append(length)
        found.append(apart / length if length > 0 or not found else found[-1])
    return np.array(found), np.array(shifts)
