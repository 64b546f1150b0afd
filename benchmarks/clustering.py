"""How often clusters are found from the noisy releases of round 1, by our rule and by others.

python benchmarks/clustering.py --quick     # a minute of one core: digits alone, no download
python benchmarks/clustering.py             # everything, ten minutes of one core; prints tables and verdicts
python benchmarks/clustering.py --write docs/clustering-table.md --figure docs/clustering-mss.png \\
    --csv benchmarks/results/clustering.csv # also keeps the tables, the figure and the numbers of every row
python benchmarks/clustering.py --features  # Fashion-MNIST: linear models of pixels and of scattering

A row is a federation (data, shift, cluster sizes), a kind of release, and a noise multiplier z of round 1:
the noise has deviation z * clip / records in each coordinate. Clipped sums are computed once per federation
and kept in --cache, as are finished rows, so an interrupted run goes on where it was. MNIST and
Fashion-MNIST take part where they are found ($COTERIE_DATA or ~/.cache/coterie).
"""

import argparse
import csv
import hashlib
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache as cache_result
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import erfc, logsumexp
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import silhouette_score
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from coterie import __version__, clustering
from coterie.algorithms.record.r_dpcfl import default_sketch_dimensions
from coterie.clustering.embedding import centred_gram, components_of
from coterie.clustering.evidence import standing_out
from coterie.clustering.mixture import Mixture, choose_mixture, fit_mixture
from coterie.clustering.partition import best_partition
from coterie.data import ClustersFederation, DataSettings, build_federation, load_dataset
from coterie.engines.feature_cache import FeatureCache
from coterie.engines.features import featured
from coterie.errors import InputError
from coterie.models import ModelSettings, build_model
from coterie.privacy.released import Released
from coterie.training.clipping import clip_rows
from coterie.training.learner import Batch, Learner
from coterie.training.parameters import flatten
from coterie.training.sketch import Projection

Floats = NDArray[np.float64]
Labels = NDArray[np.intp]

CLIP = 1.0
LARGEST_CLUSTER, MOST_CLUSTERS = 6, 8
CANDIDATES = range(2, 11)
TOLERATED = 2.0
"""Standard errors of the difference."""
SEED = 0


# --- federations and their exact releases -------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A dataset and model, and the noise multipliers from easy to hopeless for each kind of release."""

    data: str
    model: str
    records: int
    noise: Mapping[str, tuple[float, ...]]
    features: str = "none"

    @property
    def name(self) -> str:
        return self.data if self.features == "none" else f"{self.data}, {self.features}"


SOURCES = (
    Source("digits", "softmax", 239, {"sketch": (2, 4, 6, 12), "update": (2, 3, 4.5, 9)}),
    Source("mnist", "cnn", 1000, {"sketch": (3, 6, 9, 18), "update": (1.2, 2.2, 3.2, 8)}),
    Source("fashion-mnist", "cnn", 1000, {"sketch": (3, 7, 11, 22), "update": (1.2, 2.5, 4, 9)}),
)
ON_FEATURES = tuple(
    Source("fashion-mnist", "softmax", 60, {"sketch": (0.25, 0.5, 1, 2)}, features)
    for features in ("none", "scattering")
)
"""Few records, whose features a processor computes in a minute, and noise that is less in proportion."""
SIZES = {
    "rotation": ((2, 6), (2, 6, 6), (3, 6, 6, 6), (2, 2, 2, 2)),
    "label": ((2, 2, 2, 2, 2), (2, 3, 4, 5, 6, 6), (3, 3, 3, 6, 6, 6, 6), (4,) * 8),
}
SOME_SIZES = {"rotation": ((3, 6, 6, 6),), "label": ((2, 3, 4, 5, 6, 6),)}


@dataclass(frozen=True)
class Exact:
    """Noise-free releases of all clients of the largest federation, and their clusters."""

    vectors: Floats
    truth: Labels

    def part(self, sizes: Sequence[int]) -> tuple[Floats, Labels]:
        """The first clients of the first clusters."""
        rows = np.concatenate([np.flatnonzero(self.truth == k)[:size] for k, size in enumerate(sizes)])
        return self.vectors[rows], self.truth[rows]


def exact_releases(source: Source, shift: str, cache: Path) -> dict[str, Exact]:
    """Mean clipped gradient (the update) and mean clipped projection (the sketch) of every client."""
    seen = "" if source.features == "none" else f"-{source.features}"
    file = cache / f"{__version__}-{source.data}-{source.model}{seen}-{shift}-{source.records}-{SEED}.npz"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        sketches, updates, truth = _compute(source, shift)
        scratch = file.with_suffix(f".{os.getpid()}.npz")
        np.savez(scratch, sketch=sketches, update=updates, truth=truth)
        scratch.rename(file)
    with np.load(file) as stored:
        return {
            kind: Exact(stored[kind].astype(np.float64), stored["truth"]) for kind in ("sketch", "update")
        }


def _compute(source: Source, shift: str) -> tuple[Floats, Floats, Labels]:
    dataset = load_dataset(DataSettings(name=source.data), SEED)
    sizes = (LARGEST_CLUSTER,) * (4 if shift == "rotation" else MOST_CLUSTERS)
    settings = ClustersFederation(sizes=sizes, shift=shift, records_per_client=source.records)
    federation = build_federation(dataset, settings, SEED)
    # Nobody is tested here: features of what clients train on are enough.
    trained = (replace(one, test=one.test.take(slice(0, 1))) for one in federation.clients)
    federation = replace(federation, clients=tuple(trained))
    settings_of_it = ModelSettings(name=source.model, features=source.features)
    model = build_model(settings_of_it, federation.task, SEED)
    start = torch.from_numpy(flatten(model))
    federation = featured(federation, source.features, torch.device("cpu"), FeatureCache()).federation
    learner = Learner(model, federation.task, torch.device("cpu"))
    size = learner.layout.size
    projection = Projection(size, default_sketch_dimensions(size), SEED, learner.device)
    sketches, updates = [], []
    for client in federation.clients:
        sketch, update = torch.zeros(projection.dimensions, dtype=torch.float64), torch.zeros(size).double()
        for part in Batch.of(client.train, learner.device).split(256):
            rows = learner.gradients(start, part)
            sketch += clip_rows(projection(rows), CLIP).sum(dim=0)
            scales = (CLIP / rows.norm(dim=1).clamp(min=1e-30)).clamp(max=1.0)
            update += (scales @ rows).double()
        sketches.append(sketch.numpy() / source.records)
        updates.append(update.numpy() / source.records)
    return np.stack(sketches), np.stack(updates), np.asarray(federation.truth)


@dataclass(frozen=True)
class Draw:
    """Noisy releases, turned so that few coordinates hold them; distances are those of the full length."""

    points: Floats
    dimensions: int
    noise: float
    seed: int

    @cached_property
    def gram(self) -> Floats:
        return centred_gram(self.points)

    @cached_property
    def _partitions(self) -> dict[int, Labels]:
        return {}

    def partition(self, clusters: int) -> Labels:
        """The likeliest partition, for rules that only choose how many clusters there are."""
        if clusters not in self._partitions:
            weights = np.ones(len(self.points))
            self._partitions[clusters] = best_partition(self.gram, weights, clusters, self.seed)
        return self._partitions[clusters]

    def released(self) -> list[Released[NDArray[np.float32]]]:
        """As the server gets them: padded with zeros to their length, which changes no distance."""
        padded = np.zeros((len(self.points), self.dimensions), dtype=np.float32)
        padded[:, : self.points.shape[1]] = self.points
        return [Released(row, self.noise) for row in padded]


def draw_noise(exact: Floats, noise: float, seed: int) -> Draw:
    """The releases plus spherical noise, rotated into twice as many coordinates as there are clients.

    Of the coordinates orthogonal to all clients' exact releases only the noise's inner products matter;
    they are a Wishart matrix, drawn by Bartlett's decomposition.
    """
    rng = np.random.default_rng([SEED, seed])
    clients, dimensions = exact.shape
    if dimensions <= 2 * clients:
        return Draw(exact + noise * rng.normal(size=exact.shape), dimensions, noise, seed)
    inside = np.linalg.qr(exact.T, mode="r").T
    root = np.tril(rng.normal(size=(clients, clients)), -1)
    root[np.diag_indices(clients)] = np.sqrt(rng.chisquare(dimensions - clients - np.arange(clients)))
    points = np.hstack([inside + noise * rng.normal(size=inside.shape), noise * root])
    return Draw(points, dimensions, noise, seed)


# --- rules, number of clusters given -------------------------------------------------------------------


def raw_mixture(draw: Draw, clusters: int) -> Labels:
    """A spherical mixture with a variance per component on the releases as they are (the paper's text)."""
    return _spherical_mixture(draw.points / draw.noise, draw.dimensions, clusters, draw.seed)[0]


def two_components(draw: Draw, clusters: int) -> Labels:
    """A spherical mixture on the first two principal components, scaled to 0..1 (the released code)."""
    return _two_components(draw, clusters)[0]


def plain_kmeans(draw: Draw, clusters: int) -> Labels:
    return np.asarray(KMeans(clusters, n_init=10, random_state=draw.seed).fit(draw.points).labels_)


def ward(draw: Draw, clusters: int) -> Labels:
    return np.asarray(AgglomerativeClustering(clusters).fit(draw.points).labels_)


def kmeans_on_components(draw: Draw, clusters: int, starts: int = 20) -> Labels:
    """k-means on the first M - 1 principal components."""
    points = components_of(draw.gram, clusters - 1)
    return np.asarray(KMeans(clusters, n_init=starts, random_state=draw.seed).fit(points).labels_)


def above_the_edge(draw: Draw, clusters: int) -> Labels:
    """k-means on the components that stand out of noise of the known size, shrunk as a spiked model says."""
    gram = draw.gram
    count = max(1, min(clusters - 1, standing_out(gram, draw.noise**2, draw.dimensions)))
    points = components_of(gram, count)
    lengths = (points**2).sum(axis=0)
    points = points * np.sqrt(np.clip(1.0 - draw.dimensions * draw.noise**2 / lengths, 0.05, None))
    return np.asarray(KMeans(clusters, n_init=10, random_state=draw.seed).fit(points).labels_)


GIVEN: Mapping[str, Callable[[Draw, int], Labels]] = {
    "raw mixture": raw_mixture,
    "two components": two_components,
    "k-means": plain_kmeans,
    "Ward": ward,
    "k-means, M-1 components": kmeans_on_components,
    "k-means, noise edge": above_the_edge,
}


# --- rules, number of clusters unknown -------------------------------------------------------------------


def argmax_two_components(draw: Draw, candidates: Sequence[int]) -> Labels:
    """The number with the largest MSS of the two-component mixture (the paper's rule, the code's space)."""
    return _best(_two_components(draw, clusters) for clusters in candidates)


def argmax_raw(draw: Draw, candidates: Sequence[int]) -> Labels:
    points = draw.points / draw.noise
    return _best(_spherical_mixture(points, draw.dimensions, clusters, draw.seed) for clusters in candidates)


def argmax_components(draw: Draw, candidates: Sequence[int]) -> Labels:
    """The largest MSS on M - 1 components, k-means and one variance for all."""

    def fits() -> Iterator[tuple[Labels, float]]:
        for clusters in candidates:
            labels = kmeans_on_components(draw, clusters, starts=5)
            points = components_of(draw.gram, clusters - 1)
            centres = np.stack([points[labels == k].mean(axis=0) for k in range(clusters)])
            freedom = points.shape[1] * max(1, len(points) - clusters)
            variance = max(float(((points - centres[labels]) ** 2).sum()) / freedom, draw.noise**2)
            yield labels, _mss(centres, np.full(clusters, np.sqrt(variance)))

    return _best(fits())


def by_edge(draw: Draw, candidates: Sequence[int]) -> Labels:
    """One more cluster than components stand out of the known noise (Marchenko-Pastur edge)."""
    clusters = min(
        max(standing_out(draw.gram, draw.noise**2, draw.dimensions) + 1, min(candidates)), max(candidates)
    )
    return draw.partition(clusters)


def by_silhouette(draw: Draw, candidates: Sequence[int]) -> Labels:
    """The largest silhouette of the likeliest partitions."""
    return max(map(draw.partition, candidates), key=lambda labels: silhouette_score(draw.points, labels))


def by_information(draw: Draw, candidates: Sequence[int]) -> Labels:
    """Least squares at the known noise, plus log n for every coordinate of every centre (BIC)."""
    gram, clients = draw.gram, len(draw.points)

    def criterion(labels: Labels) -> float:
        members = np.eye(int(labels.max()) + 1)[labels]
        explained = (np.diag(members.T @ gram @ members) / members.sum(axis=0)).sum()
        residual = float(np.trace(gram) - explained) / draw.noise**2
        return residual + members.shape[1] * draw.dimensions * np.log(clients)

    return min(map(draw.partition, candidates), key=criterion)


UNKNOWN: Mapping[str, Callable[[Draw, Sequence[int]], Labels]] = {
    "MSS, raw mixture": argmax_raw,
    "MSS, two components": argmax_two_components,
    "MSS, M-1 components": argmax_components,
    "noise edge": by_edge,
    "silhouette": by_silhouette,
    "BIC, known noise": by_information,
}


def _best(fits: Iterator[tuple[Labels, float]]) -> Labels:
    return max(fits, key=lambda fit: fit[1])[0]


def _mss(centres: Floats, radii: Floats) -> float:
    gaps = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
    scores = gaps / (2 * np.maximum(radii[:, None], radii[None]))
    return float(scores[np.triu_indices(len(centres), 1)].min())


def _two_components(draw: Draw, clusters: int) -> tuple[Labels, float]:
    points = components_of(draw.gram, 2)
    low, high = points.min(axis=0), points.max(axis=0)
    points = (points - low) / (high - low)
    mixture = GaussianMixture(
        clusters, covariance_type="spherical", init_params="k-means++", tol=1e-6, random_state=draw.seed
    ).fit(points)
    mixture.weights_ = np.full(clusters, 1.0 / clusters)
    labels = np.asarray(mixture.predict_proba(points).argmax(axis=1))
    return labels, _mss(mixture.means_, np.sqrt(mixture.covariances_))


def _spherical_mixture(points: Floats, dimensions: int, clusters: int, seed: int) -> tuple[Labels, float]:
    """Expectation-maximisation in `dimensions` coordinates, all but a few of which are zero and not given."""
    start = KMeans(clusters, init="k-means++", n_init=1, max_iter=1, random_state=seed).fit(points)
    odds = np.eye(clusters)[start.labels_]
    for _ in range(100):
        mass = odds.sum(axis=0) + 1e-12
        centres = odds.T @ points / mass[:, None]
        squared = ((points[:, None] - centres[None]) ** 2).sum(axis=-1)
        variances = (odds * squared).sum(axis=0) / (dimensions * mass) + 1e-6
        logits = np.log(mass) - dimensions / 2 * np.log(variances) - squared / (2 * variances)
        new = np.exp(logits - logsumexp(logits, axis=1, keepdims=True))
        if np.abs(new - odds).max() < 1e-6:
            break
        odds = new
    return np.asarray(odds.argmax(axis=1)), _mss(centres, np.sqrt(variances))


# --- rows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One federation at one noise, and what came of it in every draw."""

    data: str
    shift: str
    kind: str
    sizes: tuple[int, ...]
    noise: float
    given: Mapping[str, Sequence[bool]]
    unknown: Mapping[str, Sequence[bool]]
    separations: Sequence[tuple[float, bool]]
    """MSS of our mixture with the number given, and whether it was right."""
    chosen_separations: Sequence[tuple[float, bool]]
    """The same with the number unknown."""


Task = tuple[Source, str, str, tuple[int, ...], float, int, Path]


def measure_once(task: Task) -> Row:
    """The row, read back if this code has measured it before: an interrupted run goes on where it was."""
    source, shift, kind, sizes, noise, draws, cache = task
    asked = repr((source.name, source.model, source.records, shift, kind, sizes, noise, draws, SEED))
    name = hashlib.sha256((asked + _code()).encode()).hexdigest()[:24]
    file = cache / "rows" / f"{name}.json"
    if file.exists():
        stored = json.loads(file.read_text(encoding="utf-8"))
        return Row(**{**stored, "sizes": tuple(stored["sizes"])})
    row = measure(task)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(row)), encoding="utf-8")
    return row


@cache_result
def _code() -> str:
    """Everything that decides a row, besides its parameters: our rule, and this file up to its output."""
    ours = [
        file.read_text(encoding="utf-8") for file in sorted(Path(clustering.__file__).parent.glob("*.py"))
    ]
    return "".join([*ours, Path(__file__).read_text(encoding="utf-8").partition("\n# --- output")[0]])


def measure(task: Task) -> Row:
    source, shift, kind, sizes, noise, draws, cache = task
    exact, truth = exact_releases(source, shift, cache)[kind].part(sizes)
    candidates = [clusters for clusters in CANDIDATES if clusters < len(truth)]
    given: dict[str, list[bool]] = {name: [] for name in ("ours", *GIVEN)}
    unknown: dict[str, list[bool]] = {name: [] for name in ("ours", *UNKNOWN)}
    separations, chosen = [], []
    for seed in range(draws):
        draw = draw_noise(exact, noise * CLIP / source.records, seed)
        for name, rule in GIVEN.items():
            given[name].append(same_partition(rule(draw, len(sizes)), truth))
        for name, choose in UNKNOWN.items():
            unknown[name].append(same_partition(choose(draw, candidates), truth))
        releases = draw.released()
        separations.append(_outcome(fit_mixture(releases, len(sizes), seed), truth))
        chosen.append(_outcome(choose_mixture(releases, candidates, seed)[0], truth))
        given["ours"].append(separations[-1][1])
        unknown["ours"].append(chosen[-1][1])
    return Row(
        source.name,
        shift,
        kind,
        sizes,
        noise,
        given,
        unknown,
        separations,
        chosen,
    )


def _outcome(mixture: Mixture, truth: Labels) -> tuple[float, bool]:
    return mixture.separation, same_partition(mixture.labels, truth)


def same_partition(found: Labels, truth: Labels) -> bool:
    pairs = set(zip(found.tolist(), truth.tolist(), strict=True))
    return len(pairs) == len(set(found.tolist())) == len(set(truth.tolist()))


def shortfall(outcomes: Mapping[str, Sequence[bool]]) -> tuple[str, float]:
    """The best other rule, and by how many standard errors of the difference ours is below it.

    No rate is taken for more certain than one that was missed once.
    """
    rates = {name: float(np.mean(right)) for name, right in outcomes.items()}
    own = rates.pop("ours")
    best = max(rates, key=rates.__getitem__)
    draws = len(outcomes["ours"])
    least = (1 - 1 / draws) / draws
    error = np.sqrt(sum(max(rate * (1 - rate), least) for rate in (own, rates[best])) / draws)
    return best, float((rates[best] - own) / error) if rates[best] > own else 0.0


# --- output -----------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], which: str) -> str:
    names = ["ours", *(GIVEN if which == "given" else UNKNOWN)]
    lines = [
        "| data | shift | release | cluster sizes | z | " + " | ".join(names) + " |",
        "|---|---|---|---|---|" + "---|" * len(names),
    ]
    for row in rows:
        outcomes = row.given if which == "given" else row.unknown
        rates = [round(100 * float(np.mean(outcomes[name]))) for name in names]
        marked = [f"**{rate}**" if rate == max(rates) and rate > 0 else str(rate) for rate in rates]
        sizes = " ".join(map(str, row.sizes))
        lines.append(
            f"| {row.data} | {row.shift} | {row.kind} | {sizes} | {row.noise:g} | "
            + " | ".join(marked)
            + " |"
        )
    return "\n".join(lines)


def summary(rows: Sequence[Row], which: str) -> str:
    """Mean success by data, shift and release, and overall."""
    names = ["ours", *(GIVEN if which == "given" else UNKNOWN)]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.data, row.shift, row.kind), []).append(row)
    lines = [
        "| data | shift | release | rows | " + " | ".join(names) + " |",
        "|---|---|---|---|" + "---|" * len(names),
    ]
    for (data, shift, kind), members in [*groups.items(), (("all", "", ""), list(rows))]:
        means = [
            float(
                np.mean([np.mean((row.given if which == "given" else row.unknown)[name]) for row in members])
            )
            for name in names
        ]
        marked = [f"**{100 * m:.0f}**" if m == max(means) else f"{100 * m:.0f}" for m in means]
        lines.append(f"| {data} | {shift} | {kind} | {len(members)} | " + " | ".join(marked) + " |")
    return "\n".join(lines)


def verdict(rows: Sequence[Row], which: str) -> str:
    """Rows in which ours is below the best other rule by more than two standard errors, by name."""
    below = []
    for row in rows:
        best, errors = shortfall(row.given if which == "given" else row.unknown)
        if errors > TOLERATED:
            sizes = " ".join(map(str, row.sizes))
            place = f"{row.data}, {row.shift}, {row.kind}, {sizes}, z={row.noise:g}"
            below.append(f"{place} ({best}, {errors:.1f})")
    text = "Ours is below the best other rule by more than two standard errors in"
    text = f"{text} {len(below)} of {len(rows)} rows"
    return f"{text}: {'; '.join(below)}." if below else f"{text}."


def calibration(rows: Sequence[Row]) -> str:
    """How often the partition is right, by separation score, beside one minus the overlap."""
    edges = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, np.inf)
    lines = [
        "| MSS | 1 - MPO | right, M given | fits | right, M unknown | fits |",
        "|---|---|---|---|---|---|",
    ]
    given = np.array([pair for row in rows for pair in row.separations])
    chosen = np.array([pair for row in rows for pair in row.chosen_separations])
    for low, high in itertools.pairwise(edges):
        cells = []
        both = np.concatenate([given, chosen])
        inside = both[(both[:, 0] >= low) & (both[:, 0] < high), 0]
        promised = 100 * float(np.mean(1 - _overlaps(inside))) if len(inside) else 0.0
        for outcomes in (given, chosen):
            right = outcomes[(outcomes[:, 0] >= low) & (outcomes[:, 0] < high), 1]
            cells += [f"{100 * right.mean():.0f} %" if len(right) else "-", str(len(right))]
        name = f"{low:g} to {high:g}" if np.isfinite(high) else f"{low:g} and more"
        lines.append(f"| {name} | {promised:.0f} % | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _overlaps(separations: Floats) -> Floats:
    return np.asarray(erfc(separations / np.sqrt(2.0)))


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """Successes of every rule in every row, and the separations behind the figure."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        rules = [f"M given: {name}" for name in rows[0].given] + [
            f"M unknown: {name}" for name in rows[0].unknown
        ]
        columns = ["MSS, M given (* wrong)", "MSS, M unknown (* wrong)"]
        writer.writerow(["data", "shift", "release", "sizes", "z", "draws", *rules, *columns])
        for row in rows:
            counts = [int(sum(right)) for part in (row.given, row.unknown) for right in part.values()]
            scores = [
                " ".join(f"{score:.2f}{'' if right else '*'}" for score, right in pairs)
                for pairs in (row.separations, row.chosen_separations)
            ]
            place = [row.data, row.shift, row.kind, " ".join(map(str, row.sizes)), f"{row.noise:g}"]
            writer.writerow([*place, len(row.separations), *counts, *scores])


def draw_figure(rows: Sequence[Row], file: Path) -> None:
    """Success against MSS, one mark per fit, with the rate of success and what the overlap promises."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for panel, (title, outcomes) in zip(
        axes,
        (
            ("number of clusters given", np.array([pair for row in rows for pair in row.separations])),
            (
                "number of clusters unknown",
                np.array([pair for row in rows for pair in row.chosen_separations]),
            ),
        ),
        strict=True,
    ):
        scores, right = outcomes[:, 0].clip(max=4.0), outcomes[:, 1]
        jitter = np.random.default_rng(0).uniform(-0.035, 0.035, size=len(scores))
        panel.scatter(scores, right + jitter, s=4, alpha=0.15, linewidths=0, color="tab:blue")
        edges = np.linspace(0, 4, 17)
        middles = (edges[:-1] + edges[1:]) / 2
        bins = np.clip(np.digitize(scores, edges) - 1, 0, len(middles) - 1)
        filled = [k for k in range(len(middles)) if (bins == k).sum() >= 5]
        panel.plot(
            middles[filled],
            [right[bins == k].mean() for k in filled],
            "o-",
            color="tab:orange",
            label="right",
        )
        panel.plot(edges, 1 - _overlaps(edges), "--", color="black", label="1 - MPO")
        panel.set(title=title, xlabel="MSS of the fitted mixture (4: and more)")
        panel.legend(loc="center right")
    axes[0].set_ylabel("clusters found")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def report(rows: Sequence[Row], draws: int, seconds: float) -> str:
    parts = [
        f"{len(rows)} rows, {draws} noise draws each, {seconds:.0f} s. Success in percent; best in bold."
    ]
    for which, title in (("given", "Number of clusters given"), ("unknown", "Number of clusters unknown")):
        parts += [f"## {title}", summary(rows, which), verdict(rows, which), table(rows, which)]
    parts += ["## What the separation score says", calibration(rows)]
    return "\n\n".join(parts) + "\n"


def _start_process() -> None:
    """Small matrices on many draws: threads only get in each other's way."""
    torch.set_num_threads(1)
    threadpool_limits(1)
    warnings.simplefilter("ignore", ConvergenceWarning)


def available(sources: Sequence[Source]) -> list[Source]:
    found = []
    for source in sources:
        try:
            if source.data in ("mnist", "fashion-mnist"):
                load_dataset(DataSettings(name=source.data), SEED)
            found.append(source)
        except InputError as missing:
            print(f"without {source.data}: {missing}", file=sys.stderr)
    return found


SIZES_OF_IMAGES = {
    "rotation": ((2, 6), (3, 6, 6, 6), (2, 2, 2, 2)),
    "label": ((2, 3, 4, 5, 6, 6), (4,) * 8),
}
"""For the larger data, whose easiest noise is left out, too."""


def tasks_of(source: Source, arguments: argparse.Namespace) -> Iterator[Task]:
    small = source.data == "digits"
    for kind in ("sketch",) if arguments.quick or arguments.features else ("sketch", "update"):
        by_shift = SOME_SIZES if arguments.quick or kind == "update" else SIZES if small else SIZES_OF_IMAGES
        for shift, every in by_shift.items():
            first = 0 if small or arguments.features else 1
            for sizes, noise in itertools.product(every, source.noise[kind][first:]):
                yield source, shift, kind, sizes, noise, arguments.draws, arguments.cache


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="digits alone, some sizes, sketches")
    parser.add_argument("--features", action="store_true", help="pixels beside scattering features")
    parser.add_argument("--draws", type=int, default=12, help="noise draws per row")
    parser.add_argument("--data", nargs="*", help="only these datasets")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--figure", type=Path, help="draw success against MSS into this file")
    parser.add_argument("--write", type=Path, help="write the tables into this file too")
    parser.add_argument("--csv", type=Path, help="write every row's successes into this file too")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "coterie" / "clustering")
    arguments = parser.parse_args()
    draws = arguments.draws
    known = ON_FEATURES if arguments.features else SOURCES
    wanted = arguments.data or (["digits"] if arguments.quick else [source.data for source in known])
    sources = [source for source in known if source.data in wanted]
    began = time.perf_counter()
    sources = available(sources)
    with ProcessPoolExecutor(arguments.processes, initializer=_start_process) as pool:
        prepared = [
            pool.submit(exact_releases, source, shift, arguments.cache)
            for source in sources
            for shift in SIZES
        ]
        for done in prepared:
            done.result()
        print(f"exact releases: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        tasks = [task for source in sources for task in tasks_of(source, arguments)]
        rows = []
        for number, row in enumerate(pool.map(measure_once, tasks), start=1):
            rows.append(row)
            if number % 20 == 0:
                print(f"{number} of {len(tasks)} rows, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    text = report(rows, draws, time.perf_counter() - began)
    print(text)
    if arguments.write:
        arguments.write.write_text(
            "# Clusters found: the whole table\n\n"
            "Written by `python benchmarks/clustering.py --write docs/clustering-table.md`; "
            "[clustering.md](clustering.md) explains the rules.\n\n" + text,
            encoding="utf-8",
        )
    if arguments.figure:
        draw_figure(rows, arguments.figure)
    if arguments.csv:
        write_csv(rows, arguments.csv)


if __name__ == "__main__":
    main()
