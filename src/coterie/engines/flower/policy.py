"""A site's policy: what it signs without asking anybody, and refuses with the rule named."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from coterie.engines.flower.contract import MOST_WORK, Rules
from coterie.errors import InputError
from coterie.files import parse_yaml, regular
from coterie.privacy.ranges import DELTA, EPSILON, EVALUATION_EPSILON, ROUNDS, SEED, Range
from coterie.settings import Settings, explain, within

HOURS = Range(1e-3, 1e5)


class PolicyEvaluation(Settings):
    """How often held-out records may score models, and what all of that may cost one of them."""

    epsilon: Annotated[float, within(EVALUATION_EPSILON)] = Field(description="for all reports together")
    reports: Annotated[int, within(ROUNDS)] = Field(1, description="how often")


class Policy(Settings):
    """What an operator allows in advance."""

    epsilon: Annotated[float, within(EPSILON)] = Field(description="the most that an experiment may spend")
    delta: Annotated[float, within(DELTA)] | None = Field(
        None, description="the largest; by default a fifth of one over the number of records"
    )
    adjacency: Literal["zero-out", "replace-one"] | None = Field(
        None, description="neighbours for whom epsilon must hold; by default the plan's"
    )
    algorithms: tuple[str, ...] | None = Field(None, description="names; by default any")
    models: tuple[str, ...] | None = Field(
        None, description="names; by default any of coterie's; your own code runs only if it is named here"
    )
    rounds: Annotated[int, within(ROUNDS)] | None = Field(None, description="the most")
    steps: Annotated[int, within(SEED)] | None = Field(
        None, description="of training in all rounds, the most"
    )
    evaluation: PolicyEvaluation | None = Field(None, description="by default held-out records score nothing")
    hours: Annotated[float, within(HOURS)] | None = Field(
        None, description="from the contract on; later requests are refused"
    )
    trust_server: bool = Field(False, description="units client, worker: it may see clipped updates")

    @property
    def rules(self) -> Rules:
        """What it says beside the budget."""
        steps = MOST_WORK if self.steps is None else self.steps
        return Rules(self.algorithms, self.models, self.rounds, steps, self.hours)


def read_policy(path: Path) -> Policy:
    """The policy in a file; one line that says what is wrong with it."""
    try:
        content = parse_yaml(regular(path).read_text(encoding="utf-8"))
    except OSError as trouble:
        raise InputError(f"--policy: {path}: {trouble.strerror}") from None
    except ValueError as mistake:
        raise InputError(f"--policy: {path}: {mistake}") from None
    InputError.when(not isinstance(content, dict), f"--policy: {path}: allowed: keys and values in YAML")
    try:
        return Policy.model_validate(content)
    except ValidationError as mistake:
        raise InputError(f"--policy: {path}: {explain(mistake, Policy)}") from None
