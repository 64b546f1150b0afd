"""How objects show themselves in a notebook: escaped HTML from the tables that reports are made of."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from markupsafe import Markup

from coterie.experiment.tidy import clients_of
from coterie.privacy import Guarantee
from coterie.privacy.units import round_up
from coterie.table import NONE, Table

if TYPE_CHECKING:
    from coterie.experiment.comparison import SweepResult
    from coterie.experiment.result import RunResult
    from coterie.experiment.schema import Experiment


def release_table(promise: Guarantee) -> Table:
    """One row for every kind of release: what, how often, with what noise, at what cost."""
    rows = [
        {
            "Part": f"{release.name}, on held-out records" if release.held_out else release.name,
            "What is released": Markup('<span class="wide-text">{}</span>').format(release.what),
            "How often": f"{release.times:,}",
            "Noise": release.noise,
            "Epsilon alone": _epsilon(release.epsilon),
        }
        for release in promise.releases
    ]
    together = ["together", "", "", "", _epsilon(promise.epsilon)]
    return Table.of(rows, "Every kind of release", words=["What is released"], total=together)


def _epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else round_up(value)


def _shown(title: str, guarantee: str | None, *tables: Table, report: object = None) -> str:
    parts = [Markup("<p><strong>{}</strong></p>").format(title)]
    if guarantee is not None:
        parts.append(Markup("<p>{}</p>").format(guarantee))
    parts += [table.html() for table in tables]
    if report is not None:
        parts.append(Markup("<p>Report: <code>{}</code></p>").format(report))
    return str(Markup('<div class="coterie">{}</div>').format(Markup("").join(parts)))


def experiment_html(experiment: "Experiment") -> str:
    """A row for each section, with what is set in it."""
    rows = [
        {"Section": section, "Settings": ", ".join(f"{key} {_text(value)}" for key, value in _given(own))}
        for section, own in experiment.model_dump(mode="json").items()
    ]
    return _shown(repr(experiment), None, Table.of(rows, "Every setting", words=["Settings"]))


def _given(section: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(key, value) for key, value in section.items() if value not in (None, {}, [])]


def _text(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_text(inner)}' for key, inner in value.items())})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def plan_html(title: str, promise: Guarantee) -> str:
    """What is promised, and every release that it costs."""
    return _shown(title, promise.line, release_table(promise))


def run_html(run: "RunResult") -> str:
    """Its guarantee, and a row for each client."""
    outside = run.reached is not None and not run.reached.is_private
    rows = [
        {
            "Client": str(row["client"]),
            "Records": str(row["records"]),
            "Model": NONE if row["cluster"] is None else str(row["cluster"]),
            "Accuracy": NONE if row["accuracy"] is None else f"{row['accuracy']:.1%}",
            "Base rate": NONE if row.get("base_rate") is None else f"{row['base_rate']:.1%}",
            "RMSE": NONE if row.get("rmse") is None else f"{row['rmse']:.4g}",
            "Epsilon": NONE if row["epsilon"] is None else _epsilon(float(str(row["epsilon"]))),
        }
        for row in clients_of(run)
    ]
    caption = "Clients" + ("; scores are exact, outside the guarantee" if outside else "")
    return _shown(run.summary, run.guarantee, Table.of(rows, caption).without_empty(), report=run.report)


def comparison_html(comparison: "SweepResult") -> str:
    """The table that the terminal shows, and what all runs spend together."""
    spent = None if comparison.total is None else comparison.total.text
    return _shown(comparison.summary, spent, comparison.brief, report=comparison.report)
