"""What ran, in words: each section of the experiment as a sentence."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from coterie.data import ClustersFederation, DirichletFederation, GroupsFederation, NaturalFederation
from coterie.privacy import Unit
from coterie.report.numbers import count, listed, span
from coterie.report.record import RunRecord

_SHIFTS = {
    "rotation": "each cluster sees the images turned by another quarter",
    "label": "each cluster calls the classes by names moved by one more",
    "none": "all clusters see the same data",
}


def what_ran(run: RunRecord) -> Iterator[tuple[str, str]]:
    """The experiment as pairs of a name and a sentence."""
    experiment = run.experiment
    yield "Data", _data(run)
    yield "Federation", _federation(run)
    yield "Model", f"{experiment.model.name}, {count(run.parameters, 'parameter')}"
    yield "Algorithm", _algorithm(run)
    schedule = experiment.schedule
    unit = run.plan.unit
    batches = f"batches of {schedule.batch} {counted(run)}"
    if unit.within_client:
        batches = f"Poisson {batches} in expectation"
    yield (
        "Schedule",
        f"{count(schedule.rounds, 'round')} of {count(schedule.epochs, 'epoch')}, {batches}, "
        f"step size {schedule.lr:g}",
    )
    seeds = experiment.seeds
    noise = "secret, from the operating system" if seeds.noise is None else f"seed {seeds.noise}"
    if run.served and unit.within_client:
        noise = "each site's own"
    yield "Seeds", f"simulation {seeds.simulation}; noise {noise}"
    engine = f"{experiment.engine.name}, device {experiment.engine.device}"
    if experiment.engine.precision == "float32":
        engine += ", float32 throughout"
    yield "Engine", f"{'Flower, between sites' if run.served else engine}; coterie {run.version}"


def counted(run: RunRecord) -> str:
    """What is counted of each client, and public."""
    return "persons" if run.plan.unit is Unit.PERSON else "records"


def _data(run: RunRecord) -> str:
    task = f"{run.classes} classes" if run.classes else "a regression"
    train = span([client.records for client in run.clients])
    held_out = [client.test_records for client in run.clients if client.test_records is not None]
    rows = counted(run)
    if run.served or not held_out:
        return f"the sites' own: {task}; {train} training {rows} per site"
    name = f"{run.experiment.data.name}: {task}"
    return f"{name}; {train} training and {span(held_out)} test {rows} per client"


def _federation(run: RunRecord) -> str:
    settings, clients = run.experiment.federation, count(len(run.clients), "client")
    match settings:
        case GroupsFederation(structure=shape, groups=groups):
            shape = shape if groups is None else f"{shape} of {groups} groups"
            dealt = "" if run.served else f", labels by a Dirichlet distribution, alpha {settings.alpha:g}"
            return f"{count(len(run.clients), 'worker')} in groups ({shape}){dealt}"
        case _ if run.served:
            return count(len(run.clients), "site")
        case ClustersFederation():
            sizes = listed(list(map(str, settings.sizes)))
            labels = "" if settings.alpha is None else f"; labels by Dirichlet, alpha {settings.alpha:g}"
            return f"{clients} in clusters of {sizes}; {_SHIFTS[settings.shift]}{labels}"
        case DirichletFederation():
            return f"{clients}, labels by a Dirichlet distribution with alpha {settings.alpha:g}"
        case NaturalFederation():
            return f"{clients}, as the data come"
    return clients


def _algorithm(run: RunRecord) -> str:
    options = run.experiment.algorithm.model_dump(mode="json")
    name = options.pop("name")
    return "; ".join([name, *(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in options.items())])


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return listed([f"{key} {_plain(inner)}" for key, inner in value.items()])
    if isinstance(value, list):
        numbers = [item for item in value if isinstance(item, int)]
        if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(value))):
            return f"{numbers[0]} to {numbers[-1]}"
        return listed([str(item) for item in value])
    return str(value)


def setting(values: Mapping[str, object]) -> str:
    """One point of a grid as a person calls it."""
    names = ("label", "algorithm.name")
    if len(values) == 1 and not values.keys().isdisjoint(names):
        return str(next(iter(values.values())))
    parts = [
        str(value) if key in names else f"{key_name(key).lower()} {_plain(value)}"
        for key, value in values.items()
    ]
    return ", ".join(parts) or "all runs"


def headings(keys: Sequence[str], taken: Sequence[str] = ()) -> dict[str, str]:
    """Keys by headings of their own: with their section where the short name is taken."""
    names = Counter([*map(key_name, keys), *taken])
    return {
        key: key_name(key) if names[key_name(key)] == 1 else key.replace(".", " ").capitalize()
        for key in keys
    }


def key_name(key: str) -> str:
    """A key of the experiment file as a heading."""
    if key == "algorithm.name":
        return "Algorithm"
    section, _, option = key.partition(".")
    text = key.replace(".", " ") if option == "name" else (option or section).replace("_", " ")
    return text.capitalize()
