"""What an algorithm is: it declares a plan, asks, and gets released values back.

A round is a generator. It yields requests (plain data), a driver sends back replies, and it returns
the next state. An algorithm never sees a record, never adds noise and never computes an epsilon, so
the same file runs in one process, between processes, or against scripted answers in a test.

Requests name a release of the plan ("training", "selection"); what that release clips, samples,
noises and divides by is bound in the plan and looked up by whoever answers. An algorithm therefore
cannot ask for less noise than was planned, nor for a release that was not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.settings import AlgorithmSettings, PrivacySettings, Schedule
from coterie.privacy import PrivacyPlan, Unit
from coterie.privacy.released import Released

Vector: TypeAlias = NDArray[np.float32]
"""All parameters of one model, flat; the layout is the model's and public."""


@dataclass(frozen=True)
class PublicFacts:
    """What everyone knows before the first round: no data, no true clusters."""

    clients: tuple[str, ...]
    records: Mapping[str, int]
    parameters: int
    initialise: Callable[[int], Vector]
    """Parameters of a freshly initialised model; the architecture and the seed are public."""


# --- requests and replies ---------------------------------------------------------------------------


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
    models: NDArray[np.float32]


@dataclass(frozen=True)
class Choices:
    """Answer to `Select`: one released index per client that answered; clients may be missing."""

    by_client: Mapping[str, Released[int]]


Request: TypeAlias = Train | Select
Reply: TypeAlias = Updates | Choices
T = TypeVar("T")
Asking: TypeAlias = Generator[Request, Reply, T]


def train(release: str, jobs: Sequence[TrainJob]) -> Asking[Mapping[str, Released[Vector]]]:
    """Yield a `Train` request and return its answer, typed."""
    reply = yield Train(release, tuple(jobs))
    if not isinstance(reply, Updates):
        raise TypeError(f"a Train request was answered with {type(reply).__name__}")
    return reply.by_client


def select(release: str, clients: Sequence[str], models: NDArray[np.float32]) -> Asking[Mapping[str, int]]:
    """Yield a `Select` request and return the chosen index of each client."""
    reply = yield Select(release, tuple(clients), models)
    if not isinstance(reply, Choices):
        raise TypeError(f"a Select request was answered with {type(reply).__name__}")
    return {client: choice.value for client, choice in reply.by_client.items()}


# --- the algorithm ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """Everything an algorithm carries from one round to the next: public or released values only.

    Fields of a subclass are numpy arrays or plain JSON values (numbers, strings, None, tuples, mappings
    with string keys), which is all that a checkpoint stores.
    """

    round: int
    """Rounds completed."""
    clients: tuple[str, ...]
    seed: int
    """Seed of the server's own public randomness, combined with the round."""

    def rng(self) -> np.random.Generator:
        """The server's randomness for the round that follows this state."""
        return np.random.default_rng([self.seed, self.round])


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Assignment:
    """Which model each client would use now."""

    models: NDArray[np.float32]
    cluster_of: Mapping[str, int]

    def model_of(self, client: str) -> Vector:
        model: Vector = self.models[self.cluster_of[client]]
        return model


@dataclass(frozen=True)
class Findings:
    """What the server concluded about the clusters, from released values; drawn in the report."""

    clients: tuple[str, ...]
    points: tuple[tuple[float, float], ...]
    """Round-1 releases in their first two principal components, one per client."""
    centres: tuple[tuple[float, float], ...]
    spread: float
    """Standard deviation of a component along each axis, in the units of `points`."""
    responsibilities: tuple[tuple[float, ...], ...]
    separation: float
    overlap: float
    scores: Mapping[str, float]
    """Separation score of each candidate number of clusters, keyed by that number."""
    switch_round: int
    """First round in which clients choose their cluster themselves."""
    warnings: tuple[str, ...] = ()


class Algorithm(ABC, Generic[S]):
    """One way to learn together. Subclass, override these, register; one file."""

    name: ClassVar[str]
    unit: ClassVar[Unit]
    settings_type: ClassVar[type[AlgorithmSettings]] = AlgorithmSettings
    state_type: ClassVar[type[State]]
    needs_truth: ClassVar[bool] = False
    """Whether it is handed the true clusters (as `truth=`), which its guarantee must then mention."""

    def __init__(self, settings: AlgorithmSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        self.settings = settings
        self.schedule = schedule
        self.privacy = privacy

    @abstractmethod
    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        """Every mechanism this algorithm will ever use, for each unit."""

    @abstractmethod
    def start(self, facts: PublicFacts, rng: np.random.Generator) -> S:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: S) -> Asking[S]:
        """One round: ask, combine what was released, return the next state."""

    @abstractmethod
    def models(self, state: S) -> Assignment:
        """The model each client would use after `state`."""

    def findings(self, state: S) -> Findings | None:
        """What was concluded about clusters so far, if this algorithm looks for any."""
        return None
