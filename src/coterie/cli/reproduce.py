"""`coterie reproduce`: a published experiment, our figures beside the printed ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coterie.cli.console import complain, print_result, print_table, progress_of, say
from coterie.cli.options import Json, Out, Overrides, Resume, Workers
from coterie.errors import InputError
from coterie.files import check_place, finite, write_text

if TYPE_CHECKING:
    from coterie.reproduce.declared import Subset
    from coterie.reproduce.stored import StoredTable
    from coterie.reproduce.summary import Summary
    from coterie.reproduce.table import Line, Reproduction


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A published experiment; without one, the names are listed.")
    ] = None,
    all_: Annotated[
        bool,
        typer.Option("--all", help="Every published experiment; with --render a summary of what is stored."),
    ] = False,
    scale: Annotated[
        Literal["quick", "paper"],
        typer.Option("--scale", help="quick: minutes on a CPU; paper: the publication's size."),
    ] = "quick",
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Only this budget (several times for more).")
    ] = None,
    algorithms: Annotated[
        list[str] | None, typer.Option("--algorithms", help="Only these, by name, separated by commas.")
    ] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seeds", help="These seeds for all (several times for more).")
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    render: Annotated[
        bool,
        typer.Option("--render", help="Write tables and pages from the runs that are there; run nothing."),
    ] = False,
    out: Out = None,
    store: Annotated[
        Path | None, typer.Option("--store", help="A folder of stored results that the table is added to.")
    ] = None,
    docs: Annotated[
        list[Path] | None,
        typer.Option("--docs", help="With --all --render: a document whose summary is replaced."),
    ] = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    from coterie.reproduce.declared import Subset, find, names

    selecting = {"--epsilon": epsilon, "--algorithms": algorithms, "--seeds": seeds, "--set": overrides}
    running_them = {**selecting, "--workers": workers, "--resume": resume}
    if name is None and not all_:
        others = {**running_them, "--render": render, "--out": out, "--store": store, "--docs": docs}
        if idle := _given({**others, "--scale": scale != "quick"}):
            raise InputError(f"{idle}: of which experiment? allowed: --all, {', '.join(names())}")
        print_result({"experiments": {each: find(each).line for each in names()}}, json, _list)
        return
    if name is not None and all_:
        raise InputError(f"--all: is every experiment, not {name} alone; allowed: without it")
    if all_ and (idle := _given({**selecting, "--store": store})):
        raise InputError(f"{idle}: narrows or keeps one experiment; allowed: with a name instead of --all")
    if docs and not (all_ and render):
        raise InputError("--docs: takes the summary of all papers; allowed: with --all --render")
    if render and (idle := _given(running_them)):
        raise InputError(f"{idle}: nothing is run with --render; allowed: without it")
    if store is not None:
        check_place(store, "--store")
    if name is None:
        if render and scale != "quick":
            raise InputError("--scale: stored results of both scales are shown; allowed: without --render")
        _render_all(out, docs or [], json) if render else _run_all(scale, out, resume, workers, json)
        return
    wanted = tuple(part for text in algorithms or [] for part in text.split(",") if part)
    selection = Subset(tuple(epsilon or ()), wanted, tuple(seeds or ()))
    target = out or _folder(Path("runs"), name, scale)
    if render:
        find(name)
        result = _rendered(name, target)
    else:
        result = _reproduced(name, target, scale, selection, overrides or [], resume, workers, json)
    if store is not None:
        _store(result, store)
    print_result(finite(result.to_json()), json, lambda: show(result))
    if not result.is_sound or result.missing:
        raise typer.Exit(1)


def _given(options: Mapping[str, object]) -> str | None:
    """The first of these options that was given."""
    return next((option for option, given in options.items() if given), None)


def _folder(under: Path, name: str, scale: str) -> Path:
    return under / f"reproduce-{name}-{scale}"


def _reproduced(
    name: str,
    target: Path,
    scale: str,
    selection: Subset,
    overrides: list[str],
    resume: bool,
    workers: int | None,
    quiet: bool,
) -> Reproduction:
    from coterie.reproduce.declared import find

    published = find(name)
    with progress_of(name, quiet=quiet) as bar:
        from coterie.reproduce import running  # takes seconds

        return running.reproduce(
            published,
            target,
            scale=scale,
            selection=selection,
            overrides=overrides,
            resume=resume,
            workers=workers,
            progress=bar.update_cells,
        )


def _rendered(name: str, target: Path) -> Reproduction:
    from coterie.reproduce import running

    result = running.render(target)
    if result.experiment.name != name:
        raise InputError(f"{target}: holds {result.experiment.name}, not {name}")
    return result


def _stored(result: Reproduction) -> StoredTable:
    """What a folder holds, as it is kept."""
    from coterie.reproduce.declared import sees_features
    from coterie.reproduce.stored import StoredTable

    kind = "features" if sees_features(result.overrides) else result.scale_name.value
    return StoredTable.read(result.folder / "table.csv", result.experiment.name, kind)


def _store(result: Reproduction, folder: Path) -> None:
    from coterie.reproduce.curves import store_curves
    from coterie.reproduce.declared import ScaleName
    from coterie.reproduce.stored import store

    if result.compared is None:
        raise InputError(f"--store: {result.experiment.name} has no runs whose numbers could be kept")
    folder.mkdir(parents=True, exist_ok=True)
    table = _stored(result)
    store(table, folder)
    if table.kind == ScaleName.PAPER.value:
        store_curves(result, folder)


def _run_all(scale: str, out: Path | None, resume: bool, workers: int | None, json: bool) -> None:
    from coterie.reproduce.declared import EVERYTHING, names
    from coterie.reproduce.overview import counts_text
    from coterie.reproduce.summary import summarise

    under, results = out or Path("runs"), []
    if not resume and (there := [each for each in names() if _folder(under, each, scale).exists()]):
        known = _folder(under, there[0], scale)
        raise InputError(f"{known}: exists already; --resume continues it, --out names another folder")
    for name in names():
        target = _folder(under, name, scale)
        results.append(_reproduced(name, target, scale, EVERYTHING, [], resume, workers, json))
    tables = [_stored(each) for each in results if each.compared is not None]
    summary = summarise({(each.name, each.kind): each for each in tables})
    content = {"reproductions": [each.to_json() for each in results], **summary.to_json()}
    print_result(finite(content), json, lambda: _shown_all(results, counts_text(summary)))
    if any(not each.is_sound or each.missing for each in results):
        raise typer.Exit(1)


def _shown_all(results: list[Reproduction], counts: str) -> None:
    for each in results:
        for cell in each.missing:
            complain(f"not finished: {each.experiment.name}, {cell}")
        say(f"{each.experiment.name}: {each.report}")
    say(counts)


def _render_all(out: Path | None, docs: list[Path], json: bool) -> None:
    from coterie.reproduce.pages import PLACE, read_document, with_places, write_pages
    from coterie.reproduce.summary import summarise

    target = out or Path("runs") / "reproduce"
    check_place(target, "--out")
    summary, texts, home = summarise(), {}, ""
    for document in docs:
        check_place(document, "--docs", file=True)
        folder = Path(os.path.relpath(target, document.parent)).as_posix() + "/"
        texts[document] = with_places(summary, read_document(document), folder, str(document))
        if PLACE.format("summary") in texts[document]:
            home = home or Path(os.path.relpath(document, target)).as_posix()
    pages = write_pages(summary, target, home)
    for document, text in texts.items():
        write_text(document, text)
    content = {**summary.to_json(), "pages": [str(page) for page in pages]}
    print_result(finite(content), json, lambda: _shown_summary(summary, pages))


def _shown_summary(summary: Summary, pages: list[Path]) -> None:
    from coterie.reproduce.overview import counts_text, summary_rows
    from coterie.reproduce.summary import RULE

    headings, rows = summary_rows(summary)
    print_table(headings[:-1], [row[:-1] for row in rows])
    for paper, place, *_, text in rows:
        if text:
            say(f"{paper}, {place}: {text}")
    say(counts_text(summary))
    say(RULE.replace("*", ""))
    for page in pages:
        say(f"page: {page}")


def _list() -> None:
    from coterie.reproduce.declared import find, names

    width = max(map(len, names())) + 2
    for each in names():
        say(f"{each:<{width}}{find(each).line}")


def show(result: Reproduction) -> None:
    from coterie.experiment.composition import ALONE
    from coterie.reproduce.table import setting_text

    if result.compared is not None:
        headings = ["algorithm", "figure", "ours", "printed", "table", "verdict"]
        for setting, lines in result.by_setting():
            body = [row for line in lines for row in _rows(line)]
            print_table(headings, body, setting_text(setting) or None)
        for note in result.notes():
            say(note)
        for sentence in result.scale.differs:
            say(f"Differs: {sentence}")
        say(ALONE)
        for line in result.lines:
            say(f"{line.heading}: {line.guarantee}")
        for cell in result.missing:
            complain(f"not finished: {cell}")
    say(f"report: {result.report}")


def _rows(line: Line) -> list[list[str]]:
    """A row for each figure; the algorithm is named in the first."""
    rows = [
        [
            entry.quantity.heading,
            entry.text(),
            entry.printed_text(),
            str(entry.printed.table) if entry.printed else "",
            entry.verdict,
        ]
        for entry in line.entries
        if entry.ours is not None
    ]
    rows.append(["clusters found", line.clusters_found, "", "", ""])
    rows.append(["charged of planned", line.charged, "", "", ""])
    return [[line.row if place == 0 else "", *row] for place, row in enumerate(rows)]
