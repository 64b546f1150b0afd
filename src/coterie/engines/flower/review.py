"""A contract in words, for the operator of a site who decides about it, and how that decision is had.

Whatever a server wrote stands in quotes, on one line, without letters that move a cursor. Figures are the
site's own: computed here, from the plan, by the code that is installed here.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias

from coterie import __version__
from coterie.engines.flower.contract import Contract, Limits
from coterie.engines.flower.messages import RefusedError, quoted
from coterie.files import read_json, write_json
from coterie.plugins import ALGORITHM
from coterie.privacy import NoisyScores, Unit
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.meaning import percent_up
from coterie.privacy.units import round_up, short_number

Facts: TypeAlias = Sequence[tuple[str, str]]
"""What is said of a contract, each under its heading."""
Decide: TypeAlias = Callable[[Facts], bool]
"""Shows a contract to the operator and waits for yes or no."""


def in_words(contract: Contract, promise: Guarantee, parameters: int) -> list[tuple[str, str]]:
    """What a contract asks of a site and promises to it.

    Args:
        promise: what the site itself computed.
        parameters: of the model.
    """
    unit, held_out = contract.plan.unit, contract.held_out
    reports = sum(cost.times for cost in promise.releases if cost.held_out)
    if contract.scored is None:  # a trusted server's scores are part of the plan
        reports = sum(each.times for each in contract.own.releases if each.mechanism.kind == NoisyScores.kind)
    scored = f"{held_out:,} held out, which score " + (f"models {reports} times" if reports else "no model")
    leaves = [
        f"{cost.name}: {cost.times} times, {cost.what}; noise {cost.noise}"
        + (f" (of {unit}s held out)" if cost.held_out else "")
        for cost in promise.releases
    ]
    trusts = (
        "the server is trusted: it sees this site's clipped updates in the clear, and adds the noise itself"
        if contract.trusted is not None
        else "nobody is trusted: noise is added here, before anything leaves"
    )
    odds = percent_up(promise.meaning.guess)
    used = "was used" if unit is Unit.RECORD else "took part"
    said = [f"the server says {quoted(caveat)}" for caveat in contract.plan.caveats]
    return [
        ("experiment", quoted(contract.experiment)),
        (
            "what is computed",
            f"algorithm {quoted(contract.algorithm)}{_algorithm(contract)}, {contract.rounds} rounds",
        ),
        ("work", f"{contract.work:,} steps of training in all"),
        ("model", f"{model_source(contract)}, {parameters:,} parameters"),
        (
            f"{unit if unit.within_client else 'record'}s",
            f"{contract.records:,} to train on; {scored if held_out else 'none held out'}",
        ),
        *(("leaves this site", line) for line in leaves),
        ("who is trusted", trusts),
        (
            "spent at most",
            f"epsilon {round_up(promise.epsilon)} at delta {short_number(promise.delta)} for "
            f"{promise.protected}, {promise.adjacency} (if any other may take its place: "
            f"{round_up(promise.epsilon_replace_one)})",
        ),
        (
            "what that means",
            f"whoever sees all of it and guesses at even odds whether one {unit} {used} is right at most "
            f"{odds} of the time (blind guessing: 50 %)",
        ),
        *(("not computed here", line) for line in said),
    ]


def model_source(contract: Contract) -> str:
    """Which model, and whose code it is."""
    model, ours = contract.model, f"of coterie {__version__}"
    name = f"{quoted(model.name)}, {_from(contract, model.name)}" if model.own else f"{model.name}, {ours}"
    if not model.own_features:
        return name
    return f"{name}; on features {quoted(model.features)}, {_from(contract, model.features)}"


def _from(contract: Contract, name: str) -> str:
    """Where code that is not coterie's comes from; before a contract is shown, both sides' were compared."""
    found = next((code for code in contract.code if code.name == name), None)
    return f"code that you allowed, of {found}, the same on both sides" if found else "code that you allowed"


def _algorithm(contract: Contract) -> str:
    """Which algorithm, and from where, if that is not coterie: it runs at the server alone."""
    found = [code for code in contract.code if code.key == ALGORITHM.key]
    return f" (which the server says is from {quoted(str(found[0]))})" if found else ""


# --- the operator's decision -------------------------------------------------------------------------


@dataclass
class Reviewer:
    """Has each contract decided about once, without keeping the messages of the server waiting.

    Args:
        decide: shows a contract and waits; None: what the limits allow is signed.
        beside: what else the operator should know: who asks, and what was spent before.
    """

    decide: Decide | None = None
    beside: Callable[[], Facts] = tuple

    def __post_init__(self) -> None:
        self._decided: dict[str, bool | None] = {}

    def check(self, contract: Contract, facts: Facts) -> None:
        """Raise `RefusedError` unless the operator has said yes to this contract."""
        if self.decide is None:
            return
        digest = contract.digest
        if digest not in self._decided:
            self._decided[digest] = None
            shown = [*self.beside(), *facts]
            threading.Thread(target=self._ask, args=(digest, shown), name="review", daemon=True).start()
        RefusedError.when(self._decided[digest] is None, "review")
        RefusedError.when(self._decided[digest] is False, "declined")

    def _ask(self, digest: str, facts: Facts) -> None:
        assert self.decide is not None
        try:
            self._decided[digest] = self.decide(facts)
        except Exception:  # nobody there to answer is no consent
            self._decided[digest] = False
            raise

    @property
    def by(self) -> str:
        return "limits" if self.decide is None else "operator"


def note_consent(path: Path, contract: Contract, by: str, limits: Limits) -> None:
    """Write down beside a contract who agreed to it, when, and until when it holds."""
    now, hours = datetime.now(UTC), limits.rules.hours
    until = None if hours is None else (now + timedelta(hours=hours)).isoformat(timespec="seconds")
    at = now.isoformat(timespec="seconds")
    write_json(path, {"format": 1, "contract": contract.digest, "at": at, "by": by, "until": until})


def time_is_over(path: Path) -> bool:
    """Whether the time that was agreed to has passed."""
    until = read_json(path).get("until") if path.exists() else None
    return isinstance(until, str) and datetime.now(UTC) > datetime.fromisoformat(until)
