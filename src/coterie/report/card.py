"""A card as Markdown: the paragraph first, then every field by its name."""

from collections.abc import Iterator
from typing import Any

from coterie.experiment.card import PrivacyClaim
from coterie.privacy.meaning import percent_up
from coterie.privacy.units import round_up, short_number
from coterie.report.model_card import releases_table
from coterie.table import Table, plain

_MOST_CLIENTS = 50


def card_markdown(card: PrivacyClaim) -> str:
    """What a person reads."""
    told = card.content
    rows = [{"Field": name, "Content": plain(content)} for name, content in _rows(told)]
    parts = [f"# Privacy card of {plain(told['run'])}", _completeness(told)]
    parts += [plain(told["guarantee_text"]), "## What is stated", Table.of(rows).markdown()]
    parts += ["## Mechanisms", releases_table(card.promise), "## Every client", _clients(told)]
    return "\n\n".join(parts) + "\n"


def _completeness(told: dict[str, Any]) -> str:
    if not told["missing"]:
        return "This card is complete."
    missing = ", ".join(told["missing"])
    whole = "complete but for a registry's fields" if told["complete"] else "**incomplete**"
    return f"This card is {whole}: the operator has not answered {missing} (`card.yaml` in the run's folder)."


def _rows(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every field but the two that have tables of their own."""
    meaning, profile, mu = told["meaning"], told["profile"], told["mu"]
    points = (f"{_up(epsilon)} at {delta}" for delta, epsilon in profile["epsilon_at_delta"].items())
    orders = profile.get("rdp")
    by_order = (
        ", ".join(
            f"{order}: {_up(d)}" for order, d in zip(orders["orders"], orders["divergences"], strict=True)
        )
        if orders
        else "none: pairs are bounded one by one"
    )
    yield "epsilon", _up(told["epsilon"])
    yield "delta", short_number(told["delta"])
    yield "epsilon_at_1e-5", _up(told["epsilon_at_1e-5"])
    yield "epsilon_replace_one", _up(told["epsilon_replace_one"])
    yield (
        "meaning",
        f"whoever guesses at even odds is right at most {percent_up(meaning['guess_at_even_odds'])} of the "
        f"time; accusing 1 % of the innocent finds at most {percent_up(meaning['true_positive_rate'])}",
    )
    yield "variant", told["variant"]
    yield "profile", f"epsilon {', '.join(points)}; Renyi divergences by order: {by_order}"
    yield (
        "mu",
        "none"
        if mu is None
        else f"{_up(mu['value'])}, wherever delta is at least {short_number(mu['for_delta_from'])}",
    )
    yield "unit", f"{told['unit']['name']}: {told['unit']['protected']}"
    yield "records_per_person", _said(told["records_per_person"])
    yield "neighbours", f"{told['neighbours']['name']}: {told['neighbours']['text']}"
    yield "unprotected", "; ".join(told["unprotected"])
    yield "observer", f"{told['observer']['who']}, seeing {told['observer']['sees']}"
    yield "trusted", f"{told['trusted']['who']}; {told['trusted']['text']}"
    yield "collusion", str(told["collusion"])
    yield "not_private", "; ".join(told["not_private"]) or "nothing"
    yield "history", told["history"]["text"]
    yield (
        "data",
        f"{told['data']['source']}; {told['data']['type']}; {told['data']['access']}; declared columns only: "
        f"{told['data']['declared_columns_only']}",
    )
    yield "tuning", _said(told["tuning"])
    yield "library", ", ".join(f"{name} {version}" for name, version in told["library"].items())
    yield "version", told["version"]
    yield "commit", told["commit"] or "not run from a repository"
    yield "side_channels", "; ".join(told["side_channels"])
    yield "utility", _utility(told["utility"])
    worst = told["worst_client"]
    yield (
        "worst_client",
        "unknown" if worst is None else f"{worst['client']}: {worst['score']:.1%} ({worst['kind']})",
    )
    yield "audit", _audit(told["audit"])
    yield "justification", _said(told["justification"])
    yield "contact", _said(told["contact"])


def _up(value: Any) -> str:
    return round_up(float(value))


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')}: {content}" for name, content in value.items())
    return "**not answered**" if value is None else str(value)


def _utility(told: dict[str, Any] | None) -> str:
    if told is None:
        return "unknown"
    mean = "unknown" if told["mean"] is None else f"{told['mean']:.1%}"
    return f"mean score {mean}, {told['kind']}"


def _audit(told: Any) -> str:
    if isinstance(told, str):
        return told
    found = (
        f"{release['name']}: at least {float(release['lower_bound']):.2f} of "
        f"{_up(release['claimed_epsilon'])} ({release['verdict']})"
        for release in told["releases"]
    )
    return f"{told['when']}, {told['verdict']}: {'; '.join(found)}"


def _clients(told: dict[str, Any]) -> str:
    rows = [
        {
            "Client": plain(name),
            "Epsilon": "–" if row["epsilon"] is None else _up(row["epsilon"]),
            "Delta": short_number(row["delta"]),
            "Records": "–" if row["records"] is None else f"{row['records']:,}",
        }
        for name, row in told["per_client"].items()
    ]
    rest = len(rows) - _MOST_CLIENTS
    more = f"\n\nand {rest:,} more, in the JSON form." if rest > 0 else ""
    return Table.of(rows[:_MOST_CLIENTS]).markdown() + more
