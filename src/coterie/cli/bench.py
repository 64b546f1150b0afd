"""`coterie bench`: this machine, ours against the peers that are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import err, print_result, print_table, say
from coterie.cli.options import Json

if TYPE_CHECKING:
    from coterie.bench.records import BenchResult

NAMES = {
    "ours": "coterie",
    "plain_sgd": "plain PyTorch, no privacy (loop over clients)",
    "torch_func": "torch.func vmap(grad) (loop over clients)",
    "opacus": "Opacus, hooks (loop over clients)",
    "opacus_ghost": "Opacus, ghost clipping (loop over clients)",
    "plain_round": "plain PyTorch, no privacy (loop over clients)",
    "pfl_research": "pfl-research, no privacy",
}


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, no scaling.")] = False,
    json: Json = False,
) -> None:
    from coterie.bench.records import run_bench

    with err.status("measuring") as status:
        result = run_bench(quick, watch=status.update)
    print_result(result.to_json(), json, lambda: show(result))


def show(result: BenchResult) -> None:
    """The table a person wants to read: samples a second, and how many times as fast ours is."""
    for model in dict.fromkeys(row.model for row in result.rows):
        body = [
            (
                NAMES[row.way],
                f"{row.samples_per_second:,.0f}",
                "" if row.ratio is None else f"{row.ratio:.2f}x",
            )
            for row in result.rows
            if row.model == model
        ]
        print_table(["way", "records / s", "ours is"], body, title=model)
    for scaling in result.scaling:
        points = ", ".join(
            f"{size}: {1000 * seconds:.0f} ms"
            for size, seconds in zip(scaling.sizes, scaling.seconds, strict=True)
        )
        say(f"{scaling.axis}: {points} (exponent {scaling.exponent:.2f})")
    say(f"{result.machine}, torch {result.torch}, on {result.device}")
