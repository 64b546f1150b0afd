"""The experiment file: everything a run depends on, validated; every mistake as one line to act on."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SerializeAsAny,
    StrictBool,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core.core_schema import ValidatorFunctionWrapHandler

from coterie.algorithms import find_algorithm, is_own
from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings, Schedule
from coterie.data import AnyData, ClustersFederation, DataSettings, FederationSettings
from coterie.errors import InputError
from coterie.models import ModelSettings
from coterie.privacy import Mode, Unit
from coterie.privacy.ranges import EVALUATION_EPSILON, ROUNDS, SEED
from coterie.settings import Acts, Settings, explain, idle, is_recorded, within

if TYPE_CHECKING:
    from coterie.experiment.calibrated import CalibratedRun


def refuse(reasons: Mapping[str, bool]) -> None:
    """Raise the first of these reasons that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise InputError(reason)


class EngineSettings(Settings):
    """Who executes, where and how precisely. Nothing here can change what is private or what it costs."""

    name: Literal["local"] = Field("local", description="local (in this process)")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto | cpu | cuda")
    workers: Annotated[int | None, Acts("engine.device auto or cpu", lambda own, _: own.device != "cuda")] = (
        Field(
            None,
            ge=1,
            le=1024,
            description="processes that train on a CPU, at most 4 a core; null: one a core where that pays",
        )
    )
    max_memory: float | None = Field(
        None, gt=0, le=2**20, description="GiB that a step may take in each process; null: what is fast"
    )

    precision: Literal["auto", "float32"] = Field(
        "auto",
        description="auto (matrix units may round what they multiply, where that is faster) | float32",
    )

    @property
    def max_bytes(self) -> int | None:
        return None if self.max_memory is None else int(self.max_memory * 2**30)


class Seeds(Settings):
    """What repeats and what stays secret."""

    simulation: int = Field(
        0, ge=0, le=SEED.most, description="data split, initialisation, the server's draws"
    )
    noise: int | None = Field(
        None,
        ge=0,
        le=SEED.most,
        description="null: secret, from the operating system; a number makes it a simulation",
    )


class EvaluationKind(StrEnum):
    """How models are judged on held-out records."""

    EXACT = "exact"  # as it is: for published records in a simulation, outside the guarantee
    PRIVATE = "private"  # by noisy sums that the plan declares and the ledger is charged with
    NONE = "none"


ScoreName = Literal["accuracy", "base_rate", "balanced_accuracy", "f1", "auc", "rmse", "mae", "r2"]


class EvaluationSettings(Settings):
    """What is measured on held-out records: exactly and outside the guarantee, or privately and within it."""

    kind: Literal["auto", "exact", "private", "none"] = Field(
        "auto",
        description="exact (outside the guarantee) | private (noisy, charged) | none | auto (private for "
        "your own records, exact for published ones)",
    )
    every: Annotated[
        int | None,
        Acts(
            "evaluation.kind exact or private", lambda _, run: run.evaluation_kind is not EvaluationKind.NONE
        ),
    ] = Field(
        None,
        ge=1,
        le=ROUNDS.most,
        description="rounds between two evaluations (the last is always evaluated); null: 1 for exact ones, "
        "the last round alone for private ones",
    )
    epsilon: Annotated[
        Annotated[float, within(EVALUATION_EPSILON)] | None,
        Acts("evaluation.kind private", lambda _, run: run.evaluation_kind is EvaluationKind.PRIVATE),
    ] = Field(
        None,
        description="private: what all evaluations may cost a held-out record (a client: part of "
        "privacy.epsilon); null: 1.0, or privacy.epsilon (a client: a tenth of it) where that is less",
    )
    scores: Annotated[
        tuple[ScoreName, ...] | None,
        Acts("evaluation.kind private", lambda _, run: run.evaluation_kind is EvaluationKind.PRIVATE),
    ] = Field(
        None,
        min_length=1,
        description="private: what is released, of accuracy (always), base_rate, balanced_accuracy, f1 and "
        "auc, or of rmse (always), mae and r2; more of them take more noise; null: the first alone. Exact "
        "ones are all there",
    )
    references: StrictBool | Literal["auto"] = Field(
        "auto",
        description="exact: train a central model per cluster for the fairness figures (auto: if quick, and "
        "never on your own records)",
    )

    def due(self, kind: EvaluationKind, rounds: int) -> list[int]:
        """After which of so many rounds models are judged, exactly or privately."""
        every = self.every or (1 if kind is EvaluationKind.EXACT else rounds)
        return [round for round in range(1, rounds + 1) if round == rounds or round % every == 0]


AUTO = "auto"
SIZED = ("schedule.rounds", "schedule.batch", "schedule.lr", "schedule.averaging", "privacy.clip")
"""Keys that may be auto: `recipe` finds a number for them once it is known how many records clients have."""


class RecordedAlgorithm(AlgorithmSettings):
    """Options of a user's own algorithm as a run was begun with them, where its code is not asked."""

    model_config = ConfigDict(extra="allow")


class Experiment(Settings):
    """One run: which data, split how, learnt by whom, under which promise.

    Sections and their keys are those of an experiment file (`coterie run --print-default`). Keys of `SIZED`
    may be auto: they are then listed in `auto`, their fields hold the defaults, and nothing is planned before
    `recipe.sized` has put numbers there.

    Example:
        >>> import coterie as ct
        >>> ct.Experiment(privacy={"epsilon": 3}, schedule={"rounds": 20})
        Experiment(r-dpcfl on digits: softmax, 20 rounds, epsilon 3 for one record)
    """

    _auto: tuple[str, ...] = PrivateAttr(())
    data: AnyData = DataSettings()
    federation: FederationSettings = ClustersFederation()
    model: ModelSettings = ModelSettings()
    privacy: PrivacySettings = PrivacySettings()
    algorithm: SerializeAsAny[AlgorithmSettings] = Field(
        default_factory=lambda: find_algorithm(Unit.RECORD, "r-dpcfl").settings_type()
    )
    schedule: Schedule = Schedule()
    engine: EngineSettings = EngineSettings()
    seeds: Seeds = Seeds()
    evaluation: EvaluationSettings = EvaluationSettings()

    @property
    def auto(self) -> tuple[str, ...]:
        """Keys for which the recipe is still to find a number."""
        return self._auto

    def number(self, key: str) -> float:
        """The number under one of the keys that may be auto."""
        section, _, name = key.partition(".")
        found: float = getattr(getattr(self, section), name)
        return found

    def with_numbers(self, numbers: Mapping[str, float]) -> Self:
        """A copy in which these keys have numbers, and are auto no longer."""
        sections: dict[str, Settings] = {}
        for key, number in numbers.items():
            name, _, option = key.partition(".")
            sections[name] = sections.get(name, getattr(self, name)).model_copy(update={option: number})
        copy = self.model_copy(update=sections)
        copy._auto = tuple(key for key in self.auto if key not in numbers)
        return copy

    def with_numbers_of(self, other: "Experiment") -> Self:
        """A copy in which whatever is auto is as in another, in which it is not."""
        return self.with_numbers({key: other.number(key) for key in self.auto if key not in other.auto})

    def model_dump(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Sections as pydantic writes them, with auto where a number is still to be found."""
        content = super().model_dump(*arguments, **options)
        for key in self.auto:
            section, _, name = key.partition(".")
            content[section] = {**content[section], name: AUTO}
        return content

    @property
    def own_records(self) -> bool:
        """Whether the records are the user's own, and not published ones that anybody may look at."""
        return self.data.own_records

    @property
    def own_algorithm(self) -> bool:
        """Whether the algorithm is the user's own code."""
        return is_own(self.privacy.unit, self.algorithm.name)

    @property
    def evaluation_kind(self) -> EvaluationKind:
        """How models are judged in a simulation; between sites it is never exact."""
        chosen = self.evaluation.kind
        if chosen != "auto":
            return EvaluationKind(chosen)
        if not self.own_records:
            return EvaluationKind.EXACT
        possible = self.privacy.unit is not Unit.WORKER and self.privacy.mode is Mode.SOUND
        return EvaluationKind.PRIVATE if possible else EvaluationKind.NONE

    def __repr__(self) -> str:
        learnt = f"{self.algorithm.name} on {self.data.name}: {self.model.name}"
        promise = f"epsilon {self.privacy.epsilon:g} for one {self.privacy.unit}"
        rounds = AUTO if "schedule.rounds" in self.auto else self.schedule.rounds
        return f"Experiment({learnt}, {rounds} rounds, {promise})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from coterie.experiment.shown import experiment_html

        return experiment_html(self)

    def plan(self) -> "CalibratedRun":
        """What it will cost, release by release, before anything is written; of its data, counts matter.

        Example:
            >>> import coterie as ct
            >>> ct.Experiment(privacy={"epsilon": 3}).plan().guarantee.releases  # doctest: +SKIP
        """
        from coterie.experiment.local import calibrate

        return calibrate(self, counted=True)

    def check_all_acts(self) -> None:
        """Refuse what was set and cannot act; what a run was begun with stays readable all the same."""
        for _, reason in idle(self, self):
            raise InputError(reason)

    @model_validator(mode="after")
    def _evaluation_is_possible(self) -> Self:
        """Refuse what no noise on a score makes private, and references that would break it."""
        private, exact = self.evaluation.kind == "private", self.evaluation_kind is EvaluationKind.EXACT
        refuse(
            {
                "evaluation.kind: private with privacy.unit worker; a score tells of models of groups that "
                "its reader does not see, so no noise on it keeps what workers are promised; allowed: exact, "
                "none": private and self.privacy.unit is Unit.WORKER,
                "evaluation.kind: private with privacy.mode paper, which proves nothing; allowed: exact, "
                "none": private and self.privacy.mode is Mode.PAPER,
                f"evaluation.references: true with evaluation.kind {self.evaluation_kind}; central models "
                "are trained and compared without privacy; allowed: false, or evaluation.kind exact": (
                    self.evaluation.references is True and not exact
                ),
            }
        )
        return self

    @model_validator(mode="after")
    def _persons_are_whole(self) -> Self:
        """Refuse to leave out single records by how many others there are: whose count depends on others."""
        fewer = getattr(self.data, "per_client", None)
        refuse(
            {
                f"data.per_client: {fewer} with privacy.unit person; it leaves out single records by how "
                "many others a client has; allowed: null": (
                    self.privacy.unit is Unit.PERSON and fewer is not None
                )
            }
        )
        return self

    @model_validator(mode="after")
    def _something_is_held_out(self) -> Self:
        """Refuse to judge models on records that nobody holds out."""
        kind, share = self.evaluation_kind, getattr(self.federation, "test_share", None)
        refuse(
            {
                f"federation.test_share: 0 with evaluation.kind {kind}, which needs held-out records; "
                "allowed: more than 0, or evaluation.kind none": (
                    share == 0 and self.data.undivided and kind is not EvaluationKind.NONE
                )
            }
        )
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _one_clear_line(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Self:
        """Turn pydantic's list of mistakes into one line that names the key and what is allowed."""
        auto: tuple[str, ...] = ()
        if isinstance(value, Mapping):
            value, auto = _without_auto(value)
            value = {**value, **cls._algorithm_section(value, recorded=is_recorded(info))}
            if isinstance(
                value.get("federation"), Mapping
            ):  # one that does not say its kind is of the default one
                value["federation"] = {"kind": "clusters", **value["federation"]}
        try:
            experiment: Self = handler(value)
        except ValidationError as mistakes:
            raise InputError(explain(mistakes, cls)) from None
        if auto:
            experiment._auto = auto
        return experiment

    @classmethod
    def _algorithm_section(cls, value: Mapping[str, Any], *, recorded: bool) -> Mapping[str, Any]:
        """Which options an algorithm has depends on its name and on the privacy unit, in another section."""
        section = value.get("algorithm")
        if not isinstance(section, Mapping):
            return {}
        privacy = value.get("privacy") or {}
        if isinstance(privacy, PrivacySettings):
            privacy = {"unit": privacy.unit}
        unit = privacy.get("unit", "record") if isinstance(privacy, Mapping) else None
        if unit not in list(Unit):
            return {}  # the privacy section reports it
        name = str(section.get("name", "r-dpcfl"))
        kind: type[AlgorithmSettings] = RecordedAlgorithm
        if not recorded or not is_own(Unit(unit), name):
            kind = find_algorithm(Unit(unit), name).settings_type
        try:
            return {"algorithm": kind.model_validate(section)}
        except ValidationError as mistakes:
            raise InputError(explain(mistakes, kind, prefix="algorithm")) from None


def _without_auto(tree: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The sections without the keys that are auto, and these keys."""
    rest, auto = dict(tree), []
    for key in SIZED:
        section, _, name = key.partition(".")
        own = rest.get(section)
        if isinstance(own, Mapping) and own.get(name) == AUTO:
            rest[section] = {other: value for other, value in own.items() if other != name}
            auto.append(key)
    return rest, tuple(auto)
