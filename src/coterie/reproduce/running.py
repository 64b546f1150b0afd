"""Running a reproduction, or a part of it, into one folder that grows.

    reproduction.yaml   which reproduction, at which scale, with which overrides
    runs/               the sweep: every cell an ordinary run folder
    references/         central models for the fairness figures, one file for each seed
    table.md, table.csv our figures beside the printed ones
    report.html         the page

All paths inside are relative: a folder that was filled on one machine is rendered on another.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from coterie.errors import InputError
from coterie.experiment.cells import Progress, compare
from coterie.experiment.folder import check_out, new_folder
from coterie.experiment.forecast import look_ahead
from coterie.experiment.loop import drop_models
from coterie.experiment.sweep import Sweep
from coterie.files import write_text, yaml_text
from coterie.report.comparison import write_comparison_report
from coterie.reproduce.central import central_scores
from coterie.reproduce.declared import EVERYTHING, PublishedExperiment, ScaleName, Subset, find, sweep_of
from coterie.reproduce.markdown import markdown
from coterie.reproduce.page import write_reproduction_report
from coterie.reproduce.table import RECORD, Reproduction, to_csv


def reproduce(
    name: str | PublishedExperiment,
    out: str | Path,
    *,
    scale: str = ScaleName.QUICK,
    selection: Subset = EVERYTHING,
    overrides: Sequence[str] = (),
    resume: bool = False,
    workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Reproduction:
    """Run a published experiment, or a part of it, and write our figures beside the printed ones.

    With `resume` a folder goes on with the cells it was given before, and with those of a new selection.

    Example:
        >>> import coterie as ct
        >>> ct.reproduce("rdpcfl-mnist", "runs/mnist", scale="quick")  # doctest: +SKIP
    """
    published, out = find(name) if isinstance(name, str) else name, Path(out)
    begun = _begun(published, ScaleName(scale), out, tuple(overrides), resume)
    sweep = _wanted(begun, selection)
    forecast = look_ahead(sweep.checked(), begun.sweep_folder) if sweep else None
    _claim(begun)
    if sweep is not None:
        compare(sweep, begun.sweep_folder, resume=True, workers=workers, progress=progress, forecast=forecast)
        for cell in sweep.cells():
            files = cell.files(begun.sweep_folder)
            if files.finished:
                # Models are no part of any table; without them a folder is small enough to carry.
                drop_models(files)
                central_scores(out, cell.experiment, begun.scale.references)
    return render(out)


def render(out: Path) -> Reproduction:
    """Write tables and pages from the runs that are there, running nothing."""
    result = Reproduction.load(out)
    if result.compared is not None:
        write_text(out / "table.md", markdown(result))
        write_text(out / "table.csv", to_csv(result))
        write_comparison_report(result.sweep_folder)
    write_reproduction_report(result)
    return result


def _begun(
    published: PublishedExperiment, scale: ScaleName, out: Path, overrides: tuple[str, ...], resume: bool
) -> Reproduction:
    """What the folder holds, or will; the overrides it was begun with hold for all its runs."""
    check_out(out)
    if not out.exists() or not any(out.iterdir()):
        return Reproduction(out, published, scale, overrides)
    if not resume:
        raise InputError(f"{out}: exists already; --resume continues it, --out names another folder")
    known = Reproduction.load(out)
    if (known.experiment.name, known.scale_name) != (published.name, scale):
        raise InputError(
            f"{out}: holds {known.experiment.name} at scale {known.scale_name}; --out names another folder"
        )
    if overrides and overrides != known.overrides:
        begun = " ".join(known.overrides) or "nothing"
        raise InputError(f"{out}: was begun with --set {begun}; --out names another folder")
    return known


def _claim(begun: Reproduction) -> None:
    """Make a new folder ours."""
    if not (begun.folder / RECORD).exists():
        content = {"name": begun.experiment.name, "scale": begun.scale_name.value}
        with new_folder(begun.folder) as draft:
            write_text(draft / RECORD, yaml_text({**content, "set": list(begun.overrides)}))


def _wanted(begun: Reproduction, selection: Subset) -> Sweep | None:
    """The runs of the folder, and those of a new selection."""
    known = begun.compared.sweep if begun.compared else None
    if known is not None and selection == EVERYTHING:
        return known
    more = sweep_of(begun.experiment, begun.scale_name, selection, begun.overrides)
    return more if known is None else known if more is None else known.joined(more)
