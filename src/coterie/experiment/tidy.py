"""A run's figures as tidy tables: a row for each round or client, a column for each figure.

Pandas is an extra: with it they are data frames, without it lists of dicts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from coterie.experiment.folder import RunFolder
from coterie.files import read_json, read_lines
from coterie.privacy.plan import POPULATION
from coterie.privacy.units import number_from_json

if TYPE_CHECKING:
    import pandas as pd

    from coterie.experiment.result import RunResult

Frame: TypeAlias = "pd.DataFrame | list[dict[str, object]]"
"""A data frame where pandas is installed, else its rows."""


def frame(rows: Sequence[Mapping[str, object]]) -> Frame:
    """Rows that are all alike, as a table."""
    plain = [dict(row) for row in rows]
    try:
        import pandas as pd
    except ImportError:
        return plain
    return pd.DataFrame(plain)


def rounds_of(run: "RunResult") -> list[dict[str, object]]:
    """One row for each round: epsilon spent so far, and the spread over clients of all that was measured."""
    return [
        {
            "round": line["round"],
            "epsilon": number_from_json(line["epsilon"]),
            "clusters": len(set(line["clusters"].values())) or None,
            **dict(_spread("accuracy", line.get("accuracy"))),
            **(dict(_spread("bounded_score", line["bounded_score"])) if "bounded_score" in line else {}),
            **dict(_spread("loss", line.get("loss"))),
        }
        for line in read_lines(RunFolder(run.folder).metrics)
    ]


def _spread(name: str, measured: Mapping[str, Any] | None) -> Iterator[tuple[str, object]]:
    told = measured or {}
    low, high = told.get("interval") or (None, None)
    yield name, told.get("mean")
    yield from {f"{name}_{end}": told.get(end) for end in ("min", "max", "kind")}.items()
    yield from {f"{name}_low": low, f"{name}_high": high}.items()


def clients_of(run: "RunResult") -> list[dict[str, object]]:
    """One row for each client: its records, its cluster, its epsilon and delta, and how it is served."""
    accuracy, loss = run.accuracy, run.loss
    rows = []
    for client in read_json(RunFolder(run.folder).federation)["clients"]:
        name = client["name"]
        cost: Any = run.per_client.get(name) or run.per_client.get(POPULATION) or {}
        low, high = accuracy.intervals.get(name, (None, None)) if accuracy else (None, None)
        rows.append(
            {
                "client": name,
                "records": client["records"],
                "test_records": client["test_records"],
                "true_cluster": client["true_cluster"],
                "cluster": run.clusters.get(name),
                "epsilon": None if cost.get("epsilon") is None else number_from_json(cost["epsilon"]),
                "delta": cost.get("delta"),
                "accuracy": accuracy.per_client.get(name) if accuracy else None,
                "accuracy_low": low,
                "accuracy_high": high,
                "loss": loss.per_client.get(name) if loss else None,
                **{key: score.per_client.get(name) for key, score in run.scores.items() if score.per_client},
            }
        )
    return rows
