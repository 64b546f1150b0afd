"""Games on one client's records: its training steps, its sketch, its selections and its scores.

Worlds are stacked as clients: one request to the engine asks many clients at once, half of which hold the
canary. Each draws noise of its own, as clients do."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.protocol import Choices, Select, Train, TrainJob, Updates
from coterie.audit.arena import Audited, client_of, engine_of, finite
from coterie.audit.bounds import Scores
from coterie.audit.claims import Claim
from coterie.audit.games import Floats, Game, likelihood
from coterie.audit.scenes import Forge, Scene, directions, last_layer, one_record, repeated
from coterie.data import Client
from coterie.data.records import Records
from coterie.privacy import Adjacency, PlannedRelease
from coterie.privacy.plan import UnitPlan
from coterie.training.sketch import Projection

OTHER = "other-"
"""Before the name of the client that a trial is compared with: of no canary, and known to the attacker. Every
trial has its own, or trials would depend on each other."""
STEPS, FINAL = "every step", "what is released"
BETWEEN_ROUNDS = "what is released, less what another round released"
BETWEEN_CLIENTS = "what is released, less what another client released"
BETWEEN_RUNS = "what is released, less what another run released"
INDEX, INDICES = "the index", "the index, less that of another client"
LENGTH = "how long what is released is"


def names_of(trials: int) -> tuple[list[str], list[str]]:
    """Clients with the canary, and clients without."""
    present, absent = ([f"{world}-{number}" for number in range(trials)] for world in ("present", "absent"))
    return present, absent


class RecordGame(Game):
    """What all games on a client's records have in common."""

    def __init__(self, audited: Audited, unit: UnitPlan, planned: PlannedRelease, uses: int) -> None:
        self.audited, self.unit, self.planned, self.uses = audited, unit, planned, uses
        self.name, self.what = planned.name, planned.mechanism.summary(audited.plan.unit)
        self.mechanism: Any = planned.mechanism
        self.delta = audited.deltas[unit.subject]
        self.claim = Claim.of(
            PlannedRelease(planned.name, planned.mechanism, uses).event,
            planned.mechanism.adjacency,
            audited.accountant,
        )

    def releases(self, subjects: Sequence[str]) -> dict[str, list[PlannedRelease]]:
        """The plan of the games: the release as it is planned, as often as it is used here."""
        own = [PlannedRelease(self.name, self.mechanism, self.uses)]
        return dict.fromkeys(subjects, own)


class TrainingGame(RecordGame):
    """Steps of private training, or a sketch, of which every noisy sum is seen."""

    def __init__(self, audited: Audited, unit: UnitPlan, planned: PlannedRelease) -> None:
        super().__init__(audited, unit, planned, uses=min(2, planned.times))
        mechanism, learner = self.mechanism, audited.learner
        forge = Forge(learner, audited.initial, mechanism.clip, mechanism.records)
        self.usual = FINAL if mechanism.projected is not None else STEPS
        self._scenes = forge.scenes(self.uses, mechanism.adjacency, sampled=mechanism.sampled)
        if mechanism.projected is not None:
            self._scenes = [scene for scene in self._scenes if "crowd of" not in scene.name] or self._scenes
        self._projection = (
            None
            if mechanism.projected is None
            else Projection(learner.layout.size, mechanism.projected, audited.public_seed, learner.device)
        )

    def scenes(self) -> list[str]:
        return [scene.name for scene in self._scenes]

    def play(self, scene: int, trials: int, wanted: str | None = None) -> dict[str, Scores]:
        played = self._scenes[scene]
        ways, shifts = directions(self.audited.learner, played, self.mechanism.clip, self._projection)
        present, absent = names_of(trials)
        compared = [OTHER + name for name in (*present, *absent)] if wanted in (None, BETWEEN_CLIENTS) else []
        worlds = {there: played.records(present=there) for there in (True, False)}
        clients = [
            client_of(name, worlds[there])
            for names, there in ((present, True), (absent, False), (compared, False))
            for name in names
        ]
        seen = self._seen(clients, played, ways)
        quiet: dict[str, Any] | None = None
        if wanted in (None, BETWEEN_RUNS):
            # The same clients in another run, none of which holds the canary.
            without = [client_of(name, worlds[False]) for name in (*present, *absent)]
            quiet = self._seen(without, played, ways)
        found = {
            name: self._statistics(seen, quiet, at, 2 * trials, shifts)
            for at, name in enumerate((*present, *absent))
        }
        return {
            statistic: Scores(
                finite([found[name][statistic] for name in present]),
                finite([found[name][statistic] for name in absent]),
            )
            for statistic in found[present[0]]
        }

    def _seen(self, clients: Sequence[Client], scene: Scene, ways: Floats) -> dict[str, Any]:
        """What is seen of each client: steps (clients, uses, steps), releases against all ways, lengths."""
        mechanism, learner, names = self.mechanism, self.audited.learner, [each.name for each in clients]
        across = torch.from_numpy(ways.T.copy())
        steps: list[Floats] = []
        released = np.zeros((len(names), self.uses, len(ways)))
        lengths = np.zeros((len(names), self.uses))

        def listen(gradient: Tensor) -> None:
            steps.append((gradient.cpu() @ across).numpy())

        scale = mechanism.denominator / mechanism.clip
        per_release = scale if mechanism.projected is not None else -scale / self.audited.lr
        with engine_of(self.audited, clients, self.releases(names)) as engine:
            learner.listener = listen
            try:
                for use, start in enumerate(scene.starts):
                    jobs = tuple(TrainJob(name, start) for name in names)
                    reply = engine.answer(Train(self.name, jobs), use + 1)
                    assert isinstance(reply, Updates)
                    for place, name in enumerate(names):
                        value = reply.by_client[name].value.astype(np.float64)
                        released[place, use] = per_release * (ways @ value)
                        lengths[place, use] = np.linalg.norm(value)
            finally:
                learner.listener = None
        each = None
        if steps:
            found = scale * np.array(steps).reshape(self.uses, len(names), mechanism.steps, len(ways))
            each = np.stack([found[use, :, :, use] for use in range(self.uses)], axis=1)
        return {"names": names, "steps": each, "released": released, "lengths": lengths}

    def _statistics(
        self, seen: dict[str, Any], quiet: dict[str, Any] | None, at: int, trials: int, shifts: Floats
    ) -> dict[str, float]:
        released, noise, rate = seen["released"], float(self.mechanism.multiplier), self.mechanism.rate
        own = np.array([released[at, use, use] for use in range(self.uses)])
        found = {
            FINAL: float(own @ shifts),
            LENGTH: float(np.log(np.maximum(seen["lengths"][at], 1e-30)).sum()),
        }
        if len(released) > trials:
            other = np.array([released[trials + at, use, use] for use in range(self.uses)])
            found[BETWEEN_CLIENTS] = float((own - other) @ shifts)
        if quiet is not None:
            again = np.array([quiet["released"][at, use, use] for use in range(self.uses)])
            found[BETWEEN_RUNS] = float((own - again) @ shifts)
        if self.uses > 1:
            found[BETWEEN_ROUNDS] = float(released[at, 0, 0] - released[at, 1, 0])
        if seen["steps"] is not None:
            ratios = likelihood(seen["steps"][at], shifts[:, None], noise, rate)
            found[STEPS] = float(ratios.sum())
        return found


class SelectionGame(RecordGame):
    """Private choices of a model, of which the index is seen."""

    def __init__(self, audited: Audited, unit: UnitPlan, planned: PlannedRelease) -> None:
        super().__init__(audited, unit, planned, uses=min(2, planned.times))
        self.usual, self._ahead = INDEX, (0, 1, 2)
        self._models, self._present, self._absent, self._against = self._setting()

    def _setting(self) -> tuple[Any, Records, Records, Records]:
        """Two models, a record that only the first gets right, one that none does, one that the second
        does."""
        learner, task, initial = self.audited.learner, self.audited.learner.task, self.audited.initial
        layer = last_layer(learner)
        first, second = initial.copy(), initial.copy()
        if task.kind == "classification" and task.vocabulary is None and "bias" in layer:
            for model in (first, second):
                model[layer["weight"]] = 0.0
                model[layer["bias"]] = 0.0
                model[layer["bias"].start] = 1.0
            loud = one_record(task, 0, 0)
            features = learner.gradients(
                torch.from_numpy(first), _batch(learner, Records(loud.features, loud.targets * 0 + 1))
            )[0].numpy()[layer["weight"]]
            said = features.reshape(task.outputs, -1)[0]
            weight = second[layer["weight"]].reshape(task.outputs, -1)
            weight[1] = said / max(float(np.abs(said).max()), 1e-30) * 1e3
            absent = one_record(task, 1)
            against = Records(loud.features, loud.targets * 0 + 1)
            return np.stack([first, second]), loud, absent, against
        if task.kind == "regression" and "bias" in layer:
            for model, said in ((first, 0.0), (second, 1e3)):
                model[layer["weight"]] = 0.0
                model[layer["bias"]] = said
            return (
                np.stack([first, second]),
                one_record(task, 0),
                one_record(task, -1e6),
                one_record(task, 1e3),
            )
        # Whatever the two models say of some record, until they differ.
        rng = np.random.default_rng(0)
        for _ in range(100):
            second = initial + rng.normal(size=initial.shape).astype(np.float32)
            record = one_record(task, 0, int(rng.integers(1000)))
            outputs = [
                int(learner.predict(torch.from_numpy(model), torch.from_numpy(record.features))[0].argmax())
                for model in (first, second)
            ]
            if outputs[0] != outputs[1]:
                break
        labels = [outputs[0], next(k for k in range(task.classes + 1) if k not in outputs), outputs[1]]
        parts = [Records(record.features, np.array([label % max(task.classes, 1)])) for label in labels]
        return np.stack([first, second]), *parts  # type: ignore[return-value]

    def scenes(self) -> list[str]:
        return [f"models apart by {ahead}" for ahead in self._ahead]

    def play(self, scene: int, trials: int, wanted: str | None = None) -> dict[str, Scores]:
        ahead = self._ahead[scene]
        absent_record = self._against if self.mechanism.adjacency is Adjacency.REPLACE_ONE else self._absent
        others = [repeated(self._against, ahead)] if ahead else []
        worlds = [Records.joined([own, *others]) for own in (self._present, absent_record)]
        present, absent = names_of(trials)
        names = [*present, *absent]
        names += [OTHER + name for name in names] if wanted in (None, INDICES) else []
        clients = [client_of(name, worlds[0 if at < trials else 1]) for at, name in enumerate(names)]
        chosen = np.zeros((len(names), self.uses))
        with engine_of(self.audited, clients, self.releases(names)) as engine:
            for use in range(self.uses):
                models = self._models.copy()
                models[:, 0] += np.float32(use * 1e-6)  # another input, another release
                reply = engine.answer(Select(self.name, tuple(names), models), use + 1)
                assert isinstance(reply, Choices)
                chosen[:, use] = [reply.by_client[name].value == 0 for name in names]
        counts, both = chosen.sum(axis=1), 2 * trials
        found = {INDEX: counts[:both]}
        if len(counts) > both:
            found[INDICES] = counts[:both] - counts[both:]
        return {
            name: Scores(finite(values[:trials]), finite(values[trials:])) for name, values in found.items()
        }


def _batch(learner: Any, records: Records) -> Any:
    from coterie.training.learner import Batch

    return Batch.of(records, learner.device)
