"""Privacy loss distributions of the events: tighter than RDP, at the price of a grid.

Each release has a dominating pair (P, Q) whose likelihood ratio rises along a line. The line is cut where the
loss log(P/Q) crosses a multiple of the grid step, and the mass of every piece is shared between its two ends
such that both P and Q are kept ("connect the dots", Doroshenko et al. 2022): the result has at least the
true divergence at every threshold and exactly the true one at the grid points. Masses come from differences
of normal tails, so rounding errors stay relative to each piece; second differences of the divergence, as
dp_accounting takes them, leave noise in every piece that fifty thousand compositions make visible.
Composition and truncation are dp_accounting's.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import dp_accounting as dp
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import pld_pmf
from scipy.special import ndtr

from coterie.privacy.accounting import Accountant
from coterie.privacy.divergences import Floats
from coterie.privacy.errors import PlanError, PrivacyInputError
from coterie.privacy.events import SelectionDpEvent
from coterie.privacy.meaning import Meaning, from_profile
from coterie.privacy.units import Adjacency, check_delta, short_number

STEP = 1e-4
"""Distance of neighbouring losses on the grid."""

# Ten standard deviations hold all but 1e-23; what lies beyond counts as lost privacy.
_TAIL = 10.0
_MOST_PIECES = 4_000_000


class GridError(PrivacyInputError):
    """Losses so large that the grid has no room for them: nothing is proven about such a release here."""


class PldAccountant(Accountant):
    """Composes loss distributions, in both directions of the neighbouring pair."""

    name, text, tolerance = "pld", f"PLD vdi={short_number(STEP)}", 2e-5

    def epsilon(self, delta: float) -> float:
        check_delta(delta)
        return max(_epsilon(direction, delta) for direction in self._directions())

    def delta(self, epsilon: float) -> float:
        if math.isinf(epsilon):
            return 0.0
        return min(1.0, max(float(each.get_delta_for_epsilon(epsilon)) for each in self._directions()))

    def meaning(self) -> Meaning:
        """By the profile of both directions."""
        return from_profile(self.deltas)

    def deltas(self, epsilons: Floats) -> Floats:
        found: Floats = np.max([_deltas(each, epsilons) for each in self._directions()], axis=0)
        return np.minimum(found, 1.0)

    def _directions(self) -> tuple[pld_pmf.DensePLDPmf, ...]:
        """The composed losses of taking a unit away and of adding it."""
        if any(isinstance(atom, dp.NonPrivateDpEvent) for atom in self.atoms):
            return (_distribution(0, np.zeros(1), lost=1.0),)
        return _compose_all(tuple(self.atoms.items()), self.adjacency)


def _deltas(distribution: pld_pmf.DensePLDPmf, epsilons: Floats) -> Floats:
    """delta(e) = lost + sum over losses l above e of p(l) (1 - exp(e - l)), for many e from 0 at once."""
    losses = STEP * (distribution._lower_loss + np.arange(distribution.size, dtype=np.float64))
    positive = losses > 0
    masses, losses = distribution._probs[positive], losses[positive]
    # Sums over the losses from each piece on; beyond the last one there is nothing but what was lost.
    upper = np.append(np.cumsum(masses[::-1])[::-1], 0.0)
    lower = np.append(np.cumsum((masses * np.exp(-losses))[::-1])[::-1], 0.0)
    first = np.searchsorted(losses, epsilons, side="right")
    # The difference of two sums of like size loses digits: what it can lose is added.
    found: Floats = upper[first] - np.exp(epsilons) * lower[first] + 1e-12 * upper[first]
    return np.maximum(found, 0.0) + float(distribution._infinity_mass)


def _epsilon(distribution: pld_pmf.DensePLDPmf, delta: float) -> float:
    """Where delta(e) = lost + sum over losses l above e of p(l) (1 - exp(e - l)) comes down to `delta`.

    dp_accounting's own search walks the grid in Python, which took half of a calibration.
    """
    lost = distribution._infinity_mass
    if lost > delta:
        return math.inf
    losses = STEP * (distribution._lower_loss + np.arange(distribution.size, dtype=np.float64))
    positive = losses > 0
    masses, losses = distribution._probs[positive], losses[positive]
    # Sums over the losses above the left end of each piece, the first of which begins at 0.
    upper = lost + np.cumsum(masses[::-1])[::-1]
    beyond = np.flatnonzero(upper > delta)
    if not beyond.size:
        return 0.0
    # Exponentials are taken relative to the largest loss that can matter: alone they leave the range of
    # doubles at a loss of 709. Those far below it are cut, which only makes delta larger where it is too
    # large already.
    last = beyond[-1]
    reference = losses[last]
    lower = np.cumsum((masses * np.exp(np.minimum(reference - losses, 700.0)))[::-1])[::-1]
    left = np.concatenate([[0.0], losses[:-1]])[: last + 1]
    above = np.flatnonzero(upper[: last + 1] - np.exp(left - reference) * lower[: last + 1] > delta)
    if not above.size:
        return 0.0
    piece = above[-1]
    return float(reference + np.log((upper[piece] - delta) / lower[piece]))


@lru_cache(maxsize=4)
def _compose_all(
    found: tuple[tuple[DpEvent, int], ...], adjacency: Adjacency
) -> tuple[pld_pmf.DensePLDPmf, ...]:
    total = (_distribution(0, np.ones(1)),) * 2
    for atom, times in found:
        total = tuple(
            sofar.compose(part) for sofar, part in zip(total, _repeated(atom, times, adjacency), strict=True)
        )
    return total


@lru_cache(maxsize=8)
def _repeated(
    atom: DpEvent, times: int, adjacency: Adjacency
) -> tuple[pld_pmf.DensePLDPmf, pld_pmf.DensePLDPmf]:
    """One kind of release, composed with itself, in both directions."""
    if isinstance(atom, dp.GaussianDpEvent):
        # Equal Gaussians compose to one with a larger shift, with no error from the grid.
        atom, times = dp.GaussianDpEvent(atom.noise_multiplier / math.sqrt(times)), 1
    pieces = _pieces(atom, adjacency)
    return _composed(pieces, times), _composed(pieces.reversed(), times)


def _distribution(first: int, masses: Floats, lost: float = 0.0) -> pld_pmf.DensePLDPmf:
    """Masses at losses from the first multiple of the step on; what is lost has an infinite loss."""
    return pld_pmf.DensePLDPmf(STEP, first, masses, lost, True)


@dataclass(frozen=True)
class Pieces:
    """The line cut at multiples of the grid step: the mass of P and of Q between consecutive losses.

    `point` is mass of both at loss 0; `below` and `above` are the masses (of P, of Q) outside the grid.
    """

    first: int
    upper: Floats
    lower: Floats
    below: tuple[float, float] = (0.0, 0.0)
    above: tuple[float, float] = (0.0, 0.0)
    point: float = 0.0

    def reversed(self) -> "Pieces":
        """The same pair the other way round: Q against P."""
        return Pieces(
            first=-(self.first + len(self.upper)),
            upper=self.lower[::-1],
            lower=self.upper[::-1],
            below=self.above[::-1],
            above=self.below[::-1],
            point=self.point,
        )


def _composed(pieces: Pieces, times: int) -> pld_pmf.DensePLDPmf:
    """The loss distribution on the grid, composed with itself."""
    # Mass x at the upper end of a piece and p - x at the lower one keep both sums.
    base = np.exp(STEP * (pieces.first + np.arange(len(pieces.upper))))
    up = np.clip((pieces.upper - pieces.lower * base) / -math.expm1(-STEP), 0.0, pieces.upper)
    masses = np.zeros(len(pieces.upper) + 1)
    masses[1:] += up
    masses[:-1] += pieces.upper - up
    masses[0] += pieces.below[0]
    if pieces.point:
        masses[-pieces.first] += pieces.point
    distribution = _distribution(pieces.first, masses, pieces.above[0])
    return distribution if times == 1 else distribution.self_compose(times)


def _pieces(atom: DpEvent, adjacency: Adjacency) -> Pieces:
    match atom:
        case dp.GaussianDpEvent(noise_multiplier=noise):
            return _sampled_pieces(1.0, noise / adjacency.reach)
        case SelectionDpEvent():
            return _selection_pieces(atom.bounded_range(adjacency is Adjacency.REPLACE_ONE))
        case dp.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            cut = _replaced_pieces if adjacency is Adjacency.REPLACE_ONE else _sampled_pieces
            return cut(rate, inner.noise_multiplier)
        case dp.SampledWithoutReplacementDpEvent(sample_size=size, source_dataset_size=source, event=inner):
            # Cohorts of fixed size never gain or lose a member, they swap one: the inner shift is doubled. A
            # unit that stays in the population with a zero contribution still takes its slot, as a replaced
            # one does.
            pieces = _sampled_pieces(size / source, inner.noise_multiplier / 2)
            return pieces if adjacency is Adjacency.ADD_REMOVE or size == source else _either_way(pieces)
    raise PlanError(f"{type(atom).__name__}: the PLD accountant cannot bound this event")


def _sampled_pieces(rate: float, noise: float) -> Pieces:
    """(1-q) N(0) + q N(1) against N(0), standard deviation z."""
    low, high = -_TAIL * noise, 1.0 + _TAIL * noise

    def loss(x: float) -> float:
        exponent = (x - 0.5) / noise**2
        if rate == 1.0:
            return exponent
        return float(np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))

    losses = _grid(loss(low), loss(high), noise)
    if rate == 1.0:
        cuts = losses * noise**2 + 0.5
    else:
        # log((e^l - 1 + q) / q), written for l near 0 and for large l.
        with np.errstate(divide="ignore", invalid="ignore"):
            inner = np.where(
                losses < 1.0,
                np.log1p(np.expm1(np.minimum(losses, 1.0)) / rate),
                losses - math.log(rate) + np.log1p(-(1.0 - rate) * np.exp(-np.maximum(losses, 1.0))),
            )
        # Losses below log(1-q) do not occur.
        cuts = np.where(np.isnan(inner), -np.inf, inner) * noise**2 + 0.5
    centre, shifted = _masses(cuts / noise), _masses((cuts - 1.0) / noise)
    return _between(losses, (1.0 - rate) * centre + rate * shifted, centre)


def _replaced_pieces(rate: float, noise: float) -> Pieces:
    """(1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1), standard deviation z; q below 1."""
    odds = math.log1p(-rate) - math.log(rate) + 0.5 / noise**2
    high = 1.0 + _TAIL * noise
    exponent = high / noise**2
    top = float(np.logaddexp(odds, exponent) - np.logaddexp(odds, -exponent))
    losses = _grid(-top, top, noise)
    # e^l = (c + e^y) / (c + e^-y) has the solution y = l/2 + asinh(c sinh(l/2)); c may be huge.
    half = np.abs(losses) / 2.0
    with np.errstate(divide="ignore"):
        log_term = odds + half + np.log(-np.expm1(-2.0 * half)) - math.log(2.0)
    inverse = np.where(
        log_term < 30.0, np.arcsinh(np.exp(np.minimum(log_term, 30.0))), log_term + math.log(2.0)
    )
    cuts = np.sign(losses) * (half + inverse) * noise**2
    centre = _masses(cuts / noise)
    upper = (1.0 - rate) * centre + rate * _masses((cuts - 1.0) / noise)
    lower = (1.0 - rate) * centre + rate * _masses((cuts + 1.0) / noise)
    return _between(losses, upper, lower)


def _between(losses: Floats, upper: Floats, lower: Floats) -> Pieces:
    """The pieces between these losses; the first and the last mass lie outside."""
    below, above = ((float(upper[end]), float(lower[end])) for end in (0, -1))
    return Pieces(round(losses[0] / STEP), upper[1:-1], lower[1:-1], below, above)


def _either_way(pieces: Pieces) -> Pieces:
    """The larger of a pair's two directions at every threshold, as one symmetric pair.

    Thresholds above 1 see only losses above 0, where taking away is the larger; thresholds below 1 see, by
    swapping the worlds, the same losses mirrored. What is left over has no loss.
    """
    upper, lower = pieces.upper[-pieces.first :], pieces.lower[-pieces.first :]
    sides = float(upper.sum() + lower.sum() + sum(pieces.above))
    return Pieces(
        first=-len(upper),
        upper=np.concatenate([lower[::-1], upper]),
        lower=np.concatenate([upper[::-1], lower]),
        below=pieces.above[::-1],
        above=pieces.above,
        point=max(0.0, 1.0 - sides),
    )


def _selection_pieces(bounded_range: float) -> Pieces:
    """The pair that dominates every mechanism whose losses lie within an interval of this length.

    Such a mechanism is, at each threshold e^l, worst with two outcomes whose losses are the ends of the
    interval (Dong, Durfee, Rogers 2020); the best interval gives (e^(r/2) - e^(l/2))^2 / (e^r - 1). That
    profile is convex in the threshold, hence a pair of its own: a loss density proportional to e^(l/2).
    """
    ends = math.ceil(bounded_range / STEP)
    if 2 * ends > _MOST_PIECES:
        raise GridError(f"selection epsilon: {bounded_range} is too large for the PLD accountant; use rdp")
    losses = np.clip(STEP * np.arange(-ends, ends + 1), -bounded_range, bounded_range)
    scale = 0.5 / math.sinh(bounded_range / 2.0)
    upper = np.diff(np.exp(losses / 2.0)) * scale
    return Pieces(first=-ends, upper=upper, lower=upper[::-1])


def _grid(low: float, high: float, noise: float) -> Floats:
    first, last = math.floor(low / STEP), math.ceil(high / STEP)
    if last - first > _MOST_PIECES:
        raise GridError(f"noise_multiplier: {noise:g} is too small for the PLD accountant; use rdp")
    return STEP * np.arange(first, last + 1, dtype=np.float64)


def _masses(cuts: Floats) -> Floats:
    """Standard normal mass below the first cut, between cuts, and above the last one."""
    below, above = ndtr(cuts), ndtr(-cuts)
    # Differences of the smaller tail keep their digits.
    between = np.where(cuts[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.concatenate([below[:1], between, above[-1:]])
