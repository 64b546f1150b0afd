"""A guarantee in words: one line for terminals and tables, and whole sentences for whoever has to rely on it.

What voids or weakens a promise is spelled out in the line; everything else is counted there and said in the
paragraph. A caveat that begins with one of `WEAKNESSES` and a colon is of the first kind.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coterie.privacy.meaning import FALSE_POSITIVES, percent_up
from coterie.privacy.plan import POPULATION
from coterie.privacy.units import Adjacency, Custody, Mode, Unit, round_up, short_number

if TYPE_CHECKING:
    from coterie.privacy.guarantee import Guarantee

SIMULATION, FROM_DATA = "simulation", "bounds from the data"
WEAKNESSES = (SIMULATION, FROM_DATA)
"""Labels of caveats that stand in the line itself."""

_NEIGHBOURS = {
    Adjacency.ZERO_OUT: "Whether it counts or contributes nothing, all public numbers kept (zero-out),",
    Adjacency.ADD_REMOVE: "Whether it takes part or not (add-remove)",
    Adjacency.REPLACE_ONE: "Whether it or any other in its place takes part (replace-one)",
}
_UNITS = {
    Unit.RECORD: "a record is one row of data, a visit say, and not a person, who may have several",
    Unit.PERSON: "all records of one person at one client together",
    Unit.CLIENT: "all records of a client together",
    Unit.WORKER: "all records of a worker together",
}
HISTORY = (
    "Other runs and releases on the same data are not counted here: what they spend is unknown, and adds up."
)


def line(promise: "Guarantee") -> str:
    """What holds, for whom and against whom, in about 160 characters."""
    parts = [f"{_figures(promise)} for {promise.protected}"]
    if math.isfinite(promise.epsilon):
        parts[0] += f", {promise.adjacency}"
        if promise.adjacency is not Adjacency.REPLACE_ONE:
            parts[0] += f" (replace-one {round_up(promise.epsilon_replace_one)})"
        if promise.epsilon_across_clients is not None and promise.persons is not None:
            across = round_up(promise.epsilon_across_clients)
            parts[0] += f", eps={across} for a person at up to {promise.persons.clients} clients"
        trusting = "" if promise.threat.trusted == "nobody" else f", trusting {promise.threat.trusted}"
        parts.append(f"against {promise.threat.watchers}{trusting}")
    parts += weaknesses(promise.caveats)
    if promise.held_by is Custody.ONE_PROCESS:
        parts.append("one process held all records")
    counted = _caveats(promise, weak=False)
    if counted:
        parts.append(f"{len(counted)} caveat{'s' if counted[1:] else ''}")
    return "; ".join(parts)


def weaknesses(caveats: Sequence[str]) -> list[str]:
    """The labels of caveats that void or weaken the promise, each once."""
    labels = (caveat.partition(":")[0] for caveat in caveats)
    return list(dict.fromkeys(label for label in labels if label in WEAKNESSES))


def _caveats(promise: "Guarantee", *, weak: bool) -> list[str]:
    """As sentences: those with such a label, or all others."""
    return [sentence(caveat) for caveat in promise.caveats if bool(weaknesses([caveat])) is weak]


def _figures(promise: "Guarantee") -> str:
    figures = f"(eps={round_up(promise.epsilon)}, delta={short_number(promise.delta)})-DP"
    if math.isinf(promise.epsilon):
        figures = "no privacy (eps=inf)"
    if promise.published_epsilon is None:
        return figures
    claimed = Adjacency.REPLACE_ONE if promise.unit.within_client else Adjacency.ADD_REMOVE
    return f"paper: published eps={round_up(promise.published_epsilon)} ({claimed} claimed), sound: {figures}"


def paragraph(promise: "Guarantee") -> str:
    """Whole sentences: who is protected, from whom, trusting whom, what an attacker gains, what is not."""
    said = [*_weak(promise), _protected(promise)]
    if math.isfinite(promise.epsilon):
        threat = promise.threat
        holds = f"This holds against {threat.watchers}, seeing {threat.sees}."
        said += [holds, _custody(promise), _gain(promise)]
    elif promise.held_by is not Custody.PLAN:
        said.append(_custody(promise))
    releases = "all planned releases composed" if promise.releases else "no release at all"
    said += [f"Computed by {promise.accountant}, {releases}.", *_spread(promise)]
    counted = _caveats(promise, weak=False)
    if counted:
        said += ["Beside the guarantee, or not covered by it:", *counted]
    return " ".join([*said, HISTORY])


def _weak(promise: "Guarantee") -> list[str]:
    found = _caveats(promise, weak=True)
    if promise.mode is Mode.PAPER:
        claim = ""
        if promise.published_epsilon is not None:
            claim = f" It claims epsilon {round_up(promise.published_epsilon)}; what is proven follows."
        found.append(f"The noise follows a publication's own arithmetic, which is not proven.{claim}")
    return found


def _protected(promise: "Guarantee") -> str:
    if math.isinf(promise.epsilon):
        return f"There is no privacy: nothing bounds what is told about {promise.protected}."
    whom = f"Protected is {promise.protected}: {_UNITS[promise.unit]}{_person(promise)}."
    odds = (
        f"{_NEIGHBOURS[promise.adjacency]} changes the probability of whatever is released by a factor of at "
        f"most e^{round_up(promise.epsilon)}, apart from a probability of {short_number(promise.delta)} "
        f"(epsilon {round_up(promise.epsilon)}, delta {short_number(promise.delta)})"
    )
    if promise.adjacency is Adjacency.REPLACE_ONE:
        return f"{whom} {odds}."
    return (
        f"{whom} {odds}; if any other may take its place, epsilon is {round_up(promise.epsilon_replace_one)}."
    )


def _person(promise: "Guarantee") -> str:
    """How much of the data may be one person's, and what that means for whoever is at several clients."""
    if promise.persons is None:
        return ""
    bounds = promise.persons
    counted = "1 counts" if bounds.records == 1 else f"{bounds.records:,} count"
    if promise.epsilon_across_clients is None:
        where = "a person is at one client, and whoever is at several pays at each of them, which adds up"
    else:
        where = (
            f"for a person with records at up to {bounds.clients:,} clients, all of them together cost "
            f"epsilon {round_up(promise.epsilon_across_clients)}"
        )
    return f", of which at most {counted}; {where}"


def _custody(promise: "Guarantee") -> str:
    trusted = promise.threat.trusted
    match promise.held_by:
        case Custody.ONE_PROCESS:
            place = "" if trusted == "nobody" else f", in the place of {trusted}"
            return (
                f"One process held all records and the noise key{place}: whoever ran it or could read its "
                "memory is trusted with all of them."
            )
        case Custody.EACH_SITE:
            return (
                "Each site held its own records and its own noise key and added its noise before anything "
                "left it, so no other party is trusted."
            )
        case Custody.TRUSTED_SERVER:
            place = "" if trusted in ("nobody", "the server") else f" in the place of {trusted}"
            return (
                f"Each site held its own records and sent clipped updates without noise; the server{place} "
                "held the noise key and added the noise, and is trusted with both."
            )
        case Custody.PLAN:
            plan = "This is a plan: whoever will hold the records and the noise key is trusted with them"
            return f"{plan}." if trusted == "nobody" else f"{plan}, beside {trusted}."


def _gain(promise: "Guarantee") -> str:
    used, others, these = "took part", "that did not", "that did"
    if promise.unit is Unit.RECORD:
        used, others, these = "was used", "that were not", "that were"
    elif promise.unit is Unit.PERSON:
        used, others, these = "took part at a given client", "who did not", "who did"
    return (
        f"Someone who sees all of that and guesses at even odds whether a given {promise.unit} {used} is "
        f"right at most {percent_up(promise.meaning.guess)} of the time (blind guessing: 50 %); someone who "
        f"accuses {100 * FALSE_POSITIVES:g} % of the {promise.unit}s {others} finds at most "
        f"{percent_up(promise.meaning.found)} of those {these}."
    )


def _spread(promise: "Guarantee") -> list[str]:
    """One epsilon and one delta stand for all; where clients differ, their own are in the table."""
    rows = [(row.epsilon, row.delta) for row in promise.per_client if row.epsilon is not None]
    if len(rows) < 2:
        return []
    least, most = (round_up(epsilon) for epsilon in (min(rows)[0], promise.epsilon))
    deltas = sorted({delta for _, delta in rows})
    spans = []
    if least != most:
        whom = "" if promise.most_exposed is None else f", most for {promise.most_exposed}"
        spans.append(f"epsilon {least} to {most}{whom}")
    if deltas[1:]:
        spans.append(f"delta {short_number(deltas[0])} to {short_number(deltas[-1])}")
    return [f"Not all are alike: {', '.join(spans)}; each one's own stands in the table."] if spans else []


def sentence(text: str) -> str:
    """A caveat as a sentence of its own."""
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


def protected(unit: Unit, subject: str) -> str:
    """Who or what is protected, as a guarantee calls it."""
    if unit is Unit.WORKER and subject != POPULATION:
        return subject
    if unit is Unit.PERSON:
        return f"one person's records at {subject}"
    return f"one {unit} of {subject}"
