"""A Gaussian mixture with one common spread, fitted to noisy moments and noisy random Fourier features.

Clients' points never come here: what does are sums over all of them, released with Gaussian noise of known
size. Second moments show in which directions clients differ. In the few strongest of these, the sum of
exp(i w x) over the points x at many frequencies w is a sketch of their density (random Fourier features:
Rahimi and Recht, NeurIPS 2007; mixtures from such sketches: Keriven, Bourrier, Gribonval and Perez,
Information and Inference 2018), and a mixture is fitted by least squares, component after component, each
where the rest fits worst. It may be fitted from as many starts as one likes: nothing of this costs privacy.

k-means would minimise the distances of all points, and so rather split one large cluster than find one that
is eight times smaller. Here every component has the same spread: halves of one Gaussian explain it no better
than the whole, and components closer than twice their spread on either side are one cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, nnls
from scipy.special import erfc

from coterie.clustering.partition import Floats

Complexes = NDArray[np.complex128]

# Least log-likelihood that one component more must gain: noise alone gains 10 to 15 by the search for it.
EVIDENCE = 20.0
# Half the distance of two centres, in units of the common spread, from which they are two clusters.
APART = 2.0
# Directions in which a mixture is fitted, at least and at most.
LEAST_DIRECTIONS, MOST_DIRECTIONS = 5, 10
# Width of the kernel that frequencies belong to, in units of the spread inside clusters; and its bounds.
WIDTH, NARROWEST, WIDEST = 3.0, 0.12, 0.5
# Coordinates of sketches lie in the ball of radius 2: a point of length 1 less a mean of at most that.
_REACH = 2.0
_DRAWS, _STARTS, _STEPS = 512, 4, 40
_LEAST_SPREAD, _MOST_SPREAD = 1e-2, 0.6


@dataclass(frozen=True)
class Directions:
    """Where clients differ, from noisy first and second moments of their points.

    Args:
        mean: of all points.
        basis: the strongest directions, one per column.
        lengths: standard deviation of the points along each of them.
        within: standard deviation along one direction in which clusters do not differ.
    """

    mean: Floats
    basis: Floats
    lengths: Floats
    within: float

    @property
    def width(self) -> float:
        """Of the kernel that suits clusters of this spread."""
        return float(np.clip(WIDTH * self.within, NARROWEST, WIDEST))


def strongest_directions(
    sums: Floats, squares: Floats, noise_std: float, clients: int, most: int = MOST_DIRECTIONS
) -> Directions:
    """The strongest directions of points whose sum and sum of outer products were released.

    As many as stand out, and one more. Noise alone has eigenvalues up to the edge of Wigner's semicircle, and
    clients of one cluster up to that of Marchenko and Pastur; a direction somewhat below both is still found,
    but drowned among others that mean nothing.

    Args:
        squares: symmetric; its noise makes some eigenvalues negative.
        noise_std: of the noise on an entry of its diagonal; beside it that is less by the root of 2.
    """
    mean = sums / clients
    values, vectors = np.linalg.eigh(squares / clients - np.outer(mean, mean))
    values, vectors = values[::-1], vectors[:, ::-1]
    middle = float(np.median(values))
    ratio = len(values) / clients
    edge = noise_std * np.sqrt(2.0 * len(values)) / clients + max(middle, 0.0) * (2 * np.sqrt(ratio) + ratio)
    directions = int(
        np.clip(
            (values > middle + edge).sum() + 1, min(LEAST_DIRECTIONS, len(values)), min(most, len(values))
        )
    )
    signs = np.sign(vectors[np.argmax(np.abs(vectors), axis=0), np.arange(len(values))])
    return Directions(
        mean,
        vectors[:, :directions] * signs[:directions],
        np.sqrt(np.clip(values[:directions], 0.0, None)),
        float(np.sqrt(max(middle, _LEAST_SPREAD**2))),
    )


@dataclass(frozen=True)
class FeatureMixture:
    """Components with a common spread.

    Args:
        centres: one per row.
        sizes: clients in each.
        spread: standard deviation around a centre along each axis.
        gains: log-likelihood that each component gained when it was added, the first that was refused last.
    """

    centres: Floats
    sizes: Floats
    spread: float
    gains: tuple[float, ...] = ()

    @property
    def separation(self) -> float:
        """Half the distance of the two closest centres, in units of the spread; infinite for one."""
        return closest(self.centres)[0] / (2.0 * self.spread)

    @property
    def overlap(self) -> float:
        """2 Q(separation)."""
        return float(erfc(self.separation / np.sqrt(2.0)))


def closest(centres: Floats) -> tuple[float, int, int]:
    """The least distance of two centres, and which they are."""
    if len(centres) < 2:
        return np.inf, 0, 0
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    first, second = divmod(int(apart.argmin()), len(centres))
    return float(apart[first, second]), first, second


class FeatureFit:
    """The search for components in one released sketch.

    Args:
        frequencies: one per row.
        sketch: noisy sum over clients of exp(i w x) / sqrt(frequencies).
        variance: of the noise on a real number of it.
    """

    def __init__(
        self, frequencies: Floats, sketch: Complexes, variance: float, where: Directions, seed: int
    ) -> None:
        self.frequencies, self.sketch, self.variance = frequencies, sketch, variance
        self.squared = (frequencies**2).sum(axis=1)
        self.scale = 1.0 / np.sqrt(len(frequencies))
        self.where = where
        self.rng = np.random.default_rng(seed)

    def found(self, most: int, evidence: float = EVIDENCE, wanted: int | None = None) -> FeatureMixture:
        """Components while one more gains enough, those that are one cluster joined; `wanted` at most."""
        spread = min(max(self.where.within, _LEAST_SPREAD), _MOST_SPREAD)
        mixture, misfit, gains = (
            FeatureMixture(np.zeros((0, self.frequencies.shape[1])), np.zeros(0), spread),
            0.0,
            [],
        )
        misfit = self._misfit(mixture)
        while len(mixture.centres) < most:
            more = self._improved(self._with(mixture, self._next(mixture)))
            now = self._misfit(more)
            gains.append((misfit - now) / self.variance)
            if gains[-1] < evidence and len(mixture.centres):
                break
            mixture, misfit = more, now
        mixture = self._joined(mixture)
        while wanted is not None and len(mixture.centres) > wanted:
            mixture = self._improved(self._without_least(mixture))
        return FeatureMixture(mixture.centres, mixture.sizes, mixture.spread, tuple(gains))

    def _joined(self, mixture: FeatureMixture) -> FeatureMixture:
        while mixture.separation < APART:
            _, first, second = closest(mixture.centres)
            sizes = np.maximum(mixture.sizes[[first, second]], 1e-9)
            centre = sizes @ mixture.centres[[first, second]] / sizes.sum()
            kept = [place for place in range(len(mixture.sizes)) if place not in (first, second)]
            mixture = self._improved(
                FeatureMixture(
                    np.vstack([mixture.centres[kept], centre]),
                    np.append(mixture.sizes[kept], sizes.sum()),
                    mixture.spread,
                )
            )
        return mixture

    def _without_least(self, mixture: FeatureMixture) -> FeatureMixture:
        """Without the component that the sketch misses least."""
        left = [
            self._weighted(np.delete(mixture.centres, place, axis=0), mixture.spread)
            for place in range(len(mixture.sizes))
        ]
        return min(left, key=self._misfit)

    def _atoms(self, centres: Floats, spread: float) -> Complexes:
        """What one client of each component adds to the sketch, on average: one column each."""
        blur = self.scale * np.exp(-0.5 * spread**2 * self.squared)
        return np.asarray(np.exp(1j * (self.frequencies @ centres.T)) * blur[:, None])

    def _rest(self, mixture: FeatureMixture) -> Complexes:
        return np.asarray(self.sketch - self._atoms(mixture.centres, mixture.spread) @ mixture.sizes)

    def _misfit(self, mixture: FeatureMixture) -> float:
        return float((np.abs(self._rest(mixture)) ** 2).sum() / 2)

    def _weighted(self, centres: Floats, spread: float) -> FeatureMixture:
        atoms = self._atoms(centres, spread)
        sizes, _ = nnls(
            np.vstack([atoms.real, atoms.imag]), np.concatenate([self.sketch.real, self.sketch.imag])
        )
        return FeatureMixture(centres, sizes, spread)

    def _with(self, mixture: FeatureMixture, centre: Floats) -> FeatureMixture:
        return self._weighted(np.vstack([mixture.centres, centre]), mixture.spread)

    def _next(self, mixture: FeatureMixture) -> Floats:
        """The point at which a component would explain most of what is left."""
        rest, blur = self._rest(mixture), self.scale * np.exp(-0.5 * mixture.spread**2 * self.squared)
        matched = np.conj(rest) * blur

        def against(centre: Floats) -> tuple[float, Floats]:
            seen = matched * np.exp(1j * (self.frequencies @ centre))
            return -float(seen.real.sum()), seen.imag @ self.frequencies

        reach = self.where.lengths + 2 * self.where.within
        rng = self.rng
        drawn = rng.normal(size=(_DRAWS, len(reach))) * reach
        scores = (matched @ np.exp(1j * (self.frequencies @ drawn.T))).real
        bounds = [(-_REACH, _REACH)] * len(reach)
        ends = [
            minimize(against, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _STEPS})
            for start in drawn[np.argsort(-scores)[:_STARTS]]
        ]
        return np.asarray(min(ends, key=lambda end: end.fun).x)

    def _improved(self, mixture: FeatureMixture) -> FeatureMixture:
        """The same components after centres, sizes and the common spread were moved together."""
        components, axes = mixture.centres.shape
        unit = max(1.0, float(mixture.sizes.max(initial=1.0)))

        def unpacked(values: Floats) -> FeatureMixture:
            centres = values[: components * axes].reshape(components, axes)
            return FeatureMixture(centres, unit * values[components * axes : -1], float(np.exp(values[-1])))

        def misfit(values: Floats) -> tuple[float, Floats]:
            own = unpacked(values)
            atoms = self._atoms(own.centres, own.spread)
            rest = atoms @ own.sizes - self.sketch
            seen = np.conj(rest)[:, None] * atoms
            weighted = seen * own.sizes
            slope = np.concatenate(
                [
                    (-weighted.imag.T @ self.frequencies).ravel(),
                    unit * seen.real.sum(axis=0),
                    [-(own.spread**2) * float(self.squared @ weighted.real.sum(axis=1))],
                ]
            )
            return float((np.abs(rest) ** 2).sum() / 2), slope

        start = np.concatenate([mixture.centres.ravel(), mixture.sizes / unit, [np.log(mixture.spread)]])
        bounds = (
            [(-_REACH, _REACH)] * (components * axes)
            + [(0.0, None)] * components
            + [(np.log(_LEAST_SPREAD), np.log(_MOST_SPREAD))]
        )
        end = minimize(misfit, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _STEPS})
        return unpacked(np.asarray(end.x))


def fit_features(
    frequencies: Floats,
    sketch: Floats,
    noise_std: float,
    where: Directions,
    seed: int,
    *,
    clients: int,
    most: int,
    wanted: int | None = None,
) -> FeatureMixture:
    """The mixture that a released sketch speaks for.

    Args:
        sketch: sums of cosines, then of sines, at all frequencies, each over the root of their number.
        most: components.
        wanted: as many clusters as were asked for, if the sketch shows so many; None: as many as it shows.
    """
    count = len(frequencies)
    # Clients are a sample of their cluster, too: that blurs sums by half of them, shared among frequencies.
    variance = noise_std**2 + clients / (2.0 * count)
    fit = FeatureFit(frequencies, sketch[:count] + 1j * sketch[count:], variance, where, seed)
    return fit.found(most if wanted is None else max(most, wanted), wanted=wanted)


def reported_sizes(sizes: Sequence[float]) -> tuple[int, ...]:
    """Noisy sizes as whole clients, none below nought."""
    return tuple(max(0, round(size)) for size in sizes)
