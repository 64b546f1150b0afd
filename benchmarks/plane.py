"""When the plane of the first two components decides about clusters, and how often it is right.

python benchmarks/plane.py        # a minute of one core, no data

Round 1 of ResNet-18 on rotated CIFAR-10, in its own sizes: sketches of 200 coordinates, noise of deviation
0.0028, nine directions along which clients differ by their shares of each class, and four rotations that form
a square in a plane. The side of the square and what the classes add vary; beside it, clouds of the same width
without any clusters. Counted is how often every client is put where it belongs, number of clusters unknown,
by the full length alone and with the plane.
"""

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from clustering import same_partition
from coterie.clustering import mixture
from coterie.privacy.released import Released

NOISE, DIMENSIONS, CLASSES = 0.0028, 200, 9
TRUTH = np.repeat(np.arange(4), (3, 6, 6, 6))
CORNERS = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]])
SIDES = (0.036, 0.042, 0.048, 0.054)
SHARES = (0.006, 0.009, 0.012)
"""Deviation of what the shares of classes add, in each of nine directions."""
DRAWS = 25

Sketches = list[Released[NDArray[np.float32]]]


def sketches(places: NDArray[np.float64], shares: float, rng: np.random.Generator) -> Sketches:
    """A release for each place in the plane."""
    points = NOISE * rng.normal(size=(len(places), DIMENSIONS))
    points[:, :2] += places + 0.004 * rng.normal(size=(len(places), 2))
    points[:, 2 : 2 + CLASSES] += shares * rng.normal(size=(len(places), CLASSES))
    return [Released(point.astype(np.float32), NOISE) for point in points]


def chosen(releases: Sketches, hazy: float) -> mixture.Mixture:
    """The mixture with a number of clusters from 2 to 10; `hazy` 0 never asks the plane."""
    mixture.HAZY = hazy
    return mixture.choose_mixture(releases, range(2, min(11, len(releases))), 0)[0]


def main() -> None:
    threadpool_limits(1)
    usual = mixture.HAZY
    decided: list[tuple[float, bool]] = []
    print("| side of the square | shares of classes | full length alone | with the plane |")
    print("| --- | --- | --- | --- |")
    for side in SIDES:
        for shares in SHARES:
            right = np.zeros((DRAWS, 2), dtype=bool)
            for draw in range(DRAWS):
                releases = sketches(side / 2 * CORNERS[TRUTH], shares, np.random.default_rng(draw))
                alone, both = chosen(releases, 0.0), chosen(releases, usual)
                right[draw] = [same_partition(found.labels, TRUTH) for found in (alone, both)]
                if both.separation != alone.separation:
                    decided.append((both.separation, bool(right[draw, 1])))
            print(
                f"| {side} | {shares} | " + " | ".join(f"{share:.0%}" for share in right.mean(axis=0)) + " |"
            )
    outcomes = np.array(decided)
    for low, high in ((0.0, 1.7), (1.7, np.inf)):
        inside = outcomes[(outcomes[:, 0] >= low) & (outcomes[:, 0] < high)]
        promised = 1 - np.mean([mixture.erfc(score / np.sqrt(2.0)) for score in inside[:, 0]])
        print(
            f"the plane decided with a separation of {low:g} to {high:g}: {len(inside)} times, "
            f"right in {inside[:, 1].mean():.0%}, 1 - MPO {promised:.0%}"
        )
    clouds, shown = 0, 0
    for clients in (8, 13, 21, 32):
        for draw in range(2 * DRAWS):
            rng = np.random.default_rng(draw)
            releases = sketches(0.025 * rng.normal(size=(clients, 2)), SHARES[draw % len(SHARES)], rng)
            clouds += 1
            shown += chosen(releases, usual).separation != chosen(releases, 0.0).separation
    print(f"clouds without clusters in which the plane decided: {shown} of {clouds}")


if __name__ == "__main__":
    main()
