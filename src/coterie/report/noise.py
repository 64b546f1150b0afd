"""How training noise depends on the budget, the batch and the first round (R-DPCFL, Figures 3, 4, 14)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coterie.privacy import Adjacency, PoissonSteps
from coterie.privacy.mechanisms import Multiplier, NoiseRule
from coterie.privacy.units import Mode
from coterie.report.charts import Scale, Series, line_figure
from coterie.report.drawing import Figure, panels

NoiseAt = Callable[[float, int, Multiplier | None, Mode], float | None]
"""Training noise for (epsilon, batch, first-round noise or None for no such round, mode), if any does."""

_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
_FIRST_ROUND_NOISES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 40.0)


def draw_noise(
    path: Path, noise_at: NoiseAt, *, epsilon: float, records: int, batch: int, caption: str
) -> None:
    """Draw training noise against epsilon, batch and first-round noise, and the noise left in an update."""
    shared, sound = NoiseRule.SHARED, Mode.SOUND
    batches = sorted({batch, *(size for size in (8, 16, 32, 64, 128, 256, 512) if size <= records)})
    epsilons = [factor * epsilon for factor in _FACTORS]
    curves: dict[str, tuple[Multiplier | None, Mode]] = {
        "full first round": (shared, sound),
        "no such round": (None, sound),
        "first round, auto noise": (NoiseRule.AUTO, sound),
        "as published": (shared, Mode.PAPER),
    }
    by_epsilon = {name: [noise_at(x, batch, *curve) for x in epsilons] for name, curve in curves.items()}
    full, bare = ([noise_at(epsilon, size, rule, sound) for size in batches] for rule in (shared, None))
    given = [noise_at(epsilon, batch, noise, sound) for noise in _FIRST_ROUND_NOISES]
    alone = [noise_at(epsilon, batch, None, sound)] * len(given)
    whole = [_spread(records, records, noise) for noise in full]
    later = [_spread(records, size, noise) for size, noise in zip(batches, full, strict=True)]
    ratios = {
        f"batch {size}": [
            _ratio(noise_at(x, size, shared, sound), noise_at(x, size, None, sound)) for x in epsilons
        ]
        for size in batches[:: max(1, len(batches) // 4)]
    }
    of, first = "Noise multiplier of training against", "noise multiplier of the first round"
    update = "Noise in an update: std per parameter / (learning rate x clip)"
    figures = [
        _figure(f"{of} epsilon", "epsilon", epsilons, by_epsilon),
        _figure(f"{of} batch", "batch", batches, {"full first round": full, "no such round": bare}, "x"),
        _figure(
            f"{of} that of round 1", first, _FIRST_ROUND_NOISES, {"given": given, "no such round": alone}, "x"
        ),
        _figure(update, "batch", batches, {"full-batch first round": whole, "a later round": later}, "xy"),
        _figure("Full first round over small batches only: ratio of noise", "epsilon", epsilons, ratios),
    ]
    panels(path, figures, caption)


def _figure(
    heading: str, title: str, xs: Sequence[float], ys: Mapping[str, Sequence[float | None]], log: str = ""
) -> Figure:
    """A line for each name, where there is a noise that does; `log` names the logarithmic axes."""
    points = {name: zip(xs, values, strict=True) for name, values in ys.items()}
    lines = [Series(name, [(x, y) for x, y in each if y is not None]) for name, each in points.items()]
    places = (xs[0], *xs[1:-1:2], xs[-1]) if "x" in log else ()
    across = Scale(title, "{:g}".format, places, logarithmic="x" in log, margin=0.03)
    up = Scale(label="{:.3g}".format, logarithmic="y" in log)
    return line_figure("noise", heading, [each for each in lines if each.points], across, up, "")


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other is not None else None


def _spread(records: int, batch: int, noise: float | None) -> float | None:
    """Standard deviation of the noise in one parameter of an update, per learning rate and clip."""
    if noise is None:
        return None
    return PoissonSteps(1.0, noise, records, batch, 1, Adjacency.ZERO_OUT).noise_in_release(lr=1.0, pull=0.0)
