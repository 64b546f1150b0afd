"""What an algorithm is: it declares a plan, asks, and gets released values back.

A round is a generator. It yields requests (plain data), a driver sends back replies, and it returns
the next state. An algorithm never sees a record, never adds noise and never computes an epsilon, so
the same file runs in one process, between processes, or against scripted answers in a test.

Requests name a release of the plan ("training", "selection"); what that release clips, samples,
noises and divides by is bound in the plan and looked up by whoever answers. An algorithm therefore
cannot ask for less noise than was planned, nor for a release that was not.

There are two families of requests. Where a unit is a record, each client releases something itself: `Train`
and `Select`. Where a unit is a client or a worker, whoever aggregates is trusted with raw updates and only
sums are released: `Cohort` opens a secret sample of members, then `Count` and `Sum` ask of that sample what
its one planned, composed release contains. An algorithm holds a handle; who was sampled, what anyone chose
and what anyone's update is never reaches it.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.findings import Findings as Findings
from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings, Schedule
from coterie.algorithms.sketches import Sketch as Sketch
from coterie.algorithms.state import Rng as Rng
from coterie.algorithms.state import State as State
from coterie.groups import Observer, Structure
from coterie.privacy import PrivacyPlan, Released, Unit
from coterie.privacy.randomness import Floats as Floats

log = logging.getLogger(__name__)

# All parameters of one model, flat; the layout is the model's and public.
Vector: TypeAlias = NDArray[np.float32]
# One model per row.
Models: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class PublicFacts:
    """What everyone knows before the first round: no data, no true clusters.

    Args:
        initialise: parameters of a freshly initialised model; the architecture and the seed are public.
        layout: name and size of each parameter tensor, in the order of the flat vector.
        structure: who is in which group, where clients work in groups.
    """

    clients: tuple[str, ...]
    records: Mapping[str, int]
    parameters: int
    initialise: Callable[[int], Vector]
    layout: Mapping[str, int] = field(default_factory=dict)
    structure: Structure | None = None


@dataclass(frozen=True)
class TrainJob:
    """One client's share of a `Train` request: start here, release what the plan says.

    With an anchor, every local step also descends `anchor_weight / 2 * norm(parameters - anchor)^2`. That
    gradient involves no record, so it is added after clipping and noise and costs nothing.
    """

    client: str
    start: Vector
    anchor: Vector | None = None
    anchor_weight: float = 0.0

    def __post_init__(self) -> None:
        if (self.anchor is None) != (self.anchor_weight == 0) or not 0 <= self.anchor_weight < np.inf:
            raise ValueError(
                f"anchor_weight: {self.anchor_weight} is not allowed; a finite number above 0 comes with an "
                "anchor, 0 without one"
            )


@dataclass(frozen=True)
class Train:
    """Ask clients to learn from their records and release an update (or its sketch)."""

    release: str
    jobs: tuple[TrainJob, ...]


@dataclass(frozen=True)
class Updates:
    """Answer to `Train`: one released vector per client that answered; clients may be missing."""

    by_client: Mapping[str, Released[Vector]]


@dataclass(frozen=True)
class Select:
    """Ask clients which of the models fits their records best."""

    release: str
    clients: tuple[str, ...]
    models: Models


@dataclass(frozen=True)
class Choices:
    """Answer to `Select`: one released index per client that answered; clients may be missing."""

    by_client: Mapping[str, Released[int]]


class Choice(StrEnum):
    """How a sampled member finds the model it starts from, and the sum that its update is added to.

    GIVEN: it is told (`CohortJob.start_of`), and all updates are added to one sum.
    TOLD: it is told likewise, and its update is added to the sum of the model that it was told.
    LOWEST_LOSS: the model with the lowest loss on its records; one sum for each model (IFCA).
    NEAREST: the model nearest to one that it trains itself from the mean of all; one sum for each (FeSEM).
    SKETCH: the model of the component that its own sketch is nearest to; one sum for each.
    """

    GIVEN = "given"
    TOLD = "told"
    LOWEST_LOSS = "lowest-loss"
    NEAREST = "nearest"
    SKETCH = "sketch"


@dataclass(frozen=True)
class LocalTraining:
    """How a sampled member learns, without noise: its whole update is clipped afterwards.

    Plain SGD over shuffled batches. `proximal` adds that weight times half the squared distance to the
    start to every step's loss (FedProx). `iterations` ends the training after so many steps, however many
    passes over the records that takes.
    """

    epochs: int
    batch: int
    lr: float
    momentum: float = 0.0
    proximal: float = 0.0
    iterations: int | None = None


@dataclass(frozen=True)
class Parts:
    """What becomes of each parameter's update, for models that are not all of one piece.

    What is neither shared nor personal is routed: it is added to one cluster's sum. What is shared is added
    to one sum of all sampled members, in the same release and under the same clip of the whole update. What
    is personal never leaves the member: it is neither clipped nor released, and it replaces these entries of
    whatever model the member is sent next.
    """

    shared: Mask
    personal: Mask

    def __post_init__(self) -> None:
        if self.shared.shape != self.personal.shape or bool((self.shared & self.personal).any()):
            raise ValueError("parts: a parameter is routed, shared or personal, not two of them")


@dataclass(frozen=True)
class Drafts:
    """The published DP-OGL+: sampled members train several times, sharing a mean without noise in between.

    After each but the last training all of them go on from the group's model plus the sum of what they just
    learnt over the divisor. What is clipped, once, is the sum of all that a member learnt. Only a release
    that is planned as such, and as not private inside the group, may ask for it.
    """

    trainings: int
    model: Vector
    divisor: float


@dataclass(frozen=True)
class CohortJob:
    """Everything that the members of a cohort are sent: the opening of a cohort binds all of it at once.

    Args:
        members: who may be sampled, each by its own coin; any subset of the clients.
        models: one per row; a member who chooses is sent all of them, since a download would tell what it
            chose. A member who is told where to start is sent that row alone: the others may hold what its
            groups do not show it.
        start_of: for `Choice.GIVEN` and `Choice.TOLD`, the row from which each member starts; None means row
            0 for everyone.
            Groups that overlap send few distinct models to many workers.
        clip: for a release whose clip follows a count, that of this round: a function of released values.
        sketch: what members derive from a sketch of their gradient: what they add instead of an update, or,
            with `Choice.SKETCH`, which model is theirs.
    """

    members: tuple[str, ...]
    models: Models
    training: LocalTraining
    choice: Choice = Choice.GIVEN
    start_of: Mapping[str, int] | None = None
    parts: Parts | None = None
    drafts: Drafts | None = None
    clip: float | None = None
    sketch: Sketch | None = None

    def __post_init__(self) -> None:
        if len(set(self.members)) != len(self.members) or not self.members:
            raise ValueError("members: at least one is needed, and nobody twice")
        if self.models.ndim != 2:
            raise ValueError(f"models: one per row is needed, not an array of shape {self.models.shape}")
        if self.start_of is not None:
            if self.chooses:
                raise ValueError(f"start_of: members who choose by {self.choice} cannot be told a start")
            rows = {self.start_of[member] for member in self.members}
            if not rows <= set(range(len(self.models))):
                raise ValueError(f"start_of: row {max(rows)} of {len(self.models)} models")
        told = None if self.sketch is None else self.sketch.statistic
        if (self.choice is Choice.SKETCH) != (self.sketch is not None and told is None):
            raise ValueError("sketch: for members who choose by it, or who add what they derive from it")

    @property
    def chooses(self) -> bool:
        """Whether members find their models themselves."""
        return self.choice not in (Choice.GIVEN, Choice.TOLD)

    @property
    def sums(self) -> int:
        """How many sums the members' updates are divided among."""
        return 1 if self.choice is Choice.GIVEN else len(self.models)

    @property
    def length(self) -> int:
        """How many numbers a member adds."""
        told = self.sketch is not None and self.sketch.statistic is not None
        return self.sketch.numbers if told and self.sketch else self.models.shape[1]


@dataclass(frozen=True)
class Cohort:
    """Open a secret sample of the job's members, as the planned release says: rate or size, clip, noise.

    The release is charged on opening, once, for all that it is composed of: amplifying the parts of one
    sample apart would claim less than is spent. It is charged to every member who has a plan of its own (a
    worker of two groups pays for both, under their two names), or in one entry to the population, where one
    plan stands for every client. Members with plans of their own must agree on the mechanism.

    Several cohorts may be open in a round, one for each release and set of members; each flips its own coins.
    """

    release: str
    job: CohortJob


@dataclass(frozen=True)
class Opened:
    """Answer to `Cohort`: a handle that means something to the engine alone, for the rest of the round."""

    release: str
    number: int


@dataclass(frozen=True)
class Count:
    """Ask for the noisy number of sampled members that chose each model; before `Sum`, at most once."""

    cohort: Opened


@dataclass(frozen=True)
class Histogram:
    """Answer to `Count`: one noisy count for each model. It may be negative."""

    counts: Released[Floats]


@dataclass(frozen=True)
class Sum:
    """Ask for the noisy sums of the sampled members' clipped updates; closes the cohort.

    Args:
        route: probabilities by which a member who chose row i is added to sum j; every row adds up to 1. It
            is public, hence a function of released counts and nothing else. Each member draws for
            itself, with a coin of its own: a quota would tie members together and void the bound. None: to
            the sum that it chose.
        minimum: for the published rebalancing, clusters with fewer members are filled up to so many.
    """

    cohort: Opened
    route: Floats | None = None
    minimum: int = 0


@dataclass(frozen=True)
class Sums:
    """Answer to `Sum`: sums, not means; the divisor is the algorithm's and must be public.

    Args:
        rows: (sums, parameters). Where parameters are shared every row holds the one sum of all members;
            where they are personal, zeros.
        sizes: members in each sum, for mechanisms that make them public; else None.
        within: for a release whose clip follows it, half the number of updates within the clip less half the
            number of those beyond it, with noise; else None.
    """

    rows: Released[Floats]
    sizes: tuple[int, ...] | None = None
    within: Released[float] | None = None


Request: TypeAlias = Train | Select | Cohort | Count | Sum
Reply: TypeAlias = Updates | Choices | Opened | Histogram | Sums
T = TypeVar("T")
R = TypeVar("R", bound=Reply)
Rounds: TypeAlias = Generator[Request, Reply, T]


def ask(request: Request, kind: type[R]) -> Rounds[R]:
    """Yield a request and return its answer, which must be of this kind."""
    reply = yield request
    if not isinstance(reply, kind):
        raise TypeError(f"a {type(request).__name__} request was answered with {type(reply).__name__}")
    return reply


def train(release: str, jobs: Sequence[TrainJob]) -> Rounds[Mapping[str, Released[Vector]]]:
    """Ask clients to train, and return what they release, in the order in which they were asked.

    A client whose vector holds anything that is not a finite number counts as one that did not answer: in a
    mean or a mixture it would take everyone else's with it.
    """
    found = (yield from ask(Train(release, tuple(jobs)), Updates)).by_client
    answers = {job.client: found[job.client] for job in jobs if job.client in found}
    spoilt = {client for client, own in answers.items() if not np.isfinite(own.value).all()}
    if spoilt:
        log.warning("%s: left out, their releases are not finite: %s", release, ", ".join(sorted(spoilt)))
    return {client: own for client, own in answers.items() if client not in spoilt}


def select(release: str, clients: Sequence[str], models: Models) -> Rounds[Mapping[str, int]]:
    """Ask clients which model fits best, and return the index that each chose."""
    chosen = yield from ask(Select(release, tuple(clients), models), Choices)
    return {client: choice.value for client, choice in chosen.by_client.items()}


# --- the algorithm ----------------------------------------------------------------------------------


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Assignment:
    """Which model each client would use now: its own, where it has personal parts, or its cluster's."""

    models: Models
    cluster_of: Mapping[str, int]
    own: Mapping[str, Vector] = field(default_factory=dict)

    def model_of(self, client: str) -> Vector:
        return self.own.get(client, self.models[self.cluster_of[client]])


@dataclass(frozen=True)
class OwnChoice:
    """The models of a server that does not know who uses which: each client chooses for itself.

    It does so by its own records and with its own personal parts, and tells nobody. A simulation that wants
    to know turns this into an `Assignment`, and says that doing so is outside the guarantee.

    Args:
        training: how a client trains the model that it compares, where it chooses the nearest.
        sketch: how it finds its component, where it chooses by its sketch.
    """

    models: Models
    choice: Choice
    training: LocalTraining
    parts: Parts | None = None
    sketch: Sketch | None = None


class Algorithm(ABC, Generic[S]):
    """One way to learn together. Subclass, give it a name, override these; one file.

    Attributes:
        name: under which experiments of its privacy unit ask for it; what is shared by several has none. A
            user's own needs none: an experiment asks for it as `package.module:Class`.
        settings_type: its options, as `settings` is annotated.
        state_type: what it carries on, as `start` is annotated.
        needs_truth: whether it is handed the true clusters (as `truth=`), as its guarantee must then say.
        additive: whether its model is two of the experiment's, outputs added, parameters one after the other.
        personal: whether clients keep parameters of their own, without which no model is whole.
    """

    known: ClassVar[dict[tuple[Unit, str], "type[Algorithm[Any]]"]] = {}
    name: ClassVar[str]
    unit: ClassVar[Unit]
    settings: AlgorithmSettings
    settings_type: ClassVar[type[AlgorithmSettings]]
    state_type: ClassVar[type[State]]
    needs_truth: ClassVar[bool] = False
    additive: ClassVar[bool] = False
    personal: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Make what has a name of ours available in experiment files; a user's own is found by its module."""
        cls.settings_type = get_type_hints(cls)["settings"]
        cls.state_type = get_type_hints(cls.start).get("return", type(None))
        ours = cls.__module__.startswith(f"{__package__}.") and "name" in vars(cls)
        if ours and Algorithm.known.setdefault((cls.unit, cls.name), cls) is not cls:
            raise ValueError(f"an algorithm named {cls.name} for unit {cls.unit} exists already")

    def __init__(self, settings: AlgorithmSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        self.settings, self.schedule, self.privacy = settings, schedule, privacy

    @abstractmethod
    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        """Every mechanism this algorithm will ever use, for each unit."""

    @abstractmethod
    def start(self, facts: PublicFacts, rng: Rng) -> S:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: S) -> Rounds[S]:
        """One round: ask, combine what was released, return the next state."""

    @abstractmethod
    def models(self, state: S) -> Assignment | OwnChoice:
        """The model each client would use after `state`, or how it would choose one."""

    def observer(self, facts: PublicFacts, plan: PrivacyPlan) -> Observer | None:
        """Who sees what when, where units observe each other; None where an observer sees every release."""
        return None

    def local_training(self) -> LocalTraining | None:
        """How a sampled member learns in every round; None where no cohort is ever asked."""
        return None

    def local_gradients(self, records: int) -> int:
        """Gradients of single records in one local training of a sampled member with so many records."""
        return self.schedule.epochs * records

    def findings(self, state: S) -> Findings | None:
        """What was concluded about clusters so far, if this algorithm looks for any."""
        return None
