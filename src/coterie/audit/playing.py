"""Play a game to its verdict: find the scene and the statistic that serve best, then test the claim with
them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from coterie.audit.bounds import Scores
from coterie.audit.claims import Claim
from coterie.audit.games import Game
from coterie.audit.verdicts import Judgement, below_curve, judge

EXPLORE, AT_ONCE = 32, 4
"""Trials of each world with which every scene is looked at, and how many of them share a run: what clients of
a run have in common must not pass for what tells the worlds apart."""
SURPRISE = 0.08
"""By how much a scene or a statistic must come closer to the claimed curve than the one that theory prefers:
less is chance."""
OFTEN, AGAIN = 0.25, 3
LEAST = 200
"""Trials of each world below which no bound is tried."""
MOST = 200_000


@dataclass(frozen=True)
class Effort:
    """How much to try: so many trials of a release in both worlds together, or as many as so many seconds
    allow."""

    trials: int | None = None
    seconds: float = 20.0
    explore: int = EXPLORE


@dataclass(frozen=True)
class Outcome:
    """A game and how it ended.

    Args:
        scene, statistic: those that were chosen.
        found: the verdict.
        scores: of the trials that bound, for the receiver curve.
    """

    game: Game
    scene: str
    statistic: str
    found: Judgement
    scores: Scores = field(repr=False)
    seconds: float = 0.0


@dataclass(frozen=True)
class Attack:
    """A scene and a statistic; `sign` is -1 where small values speak for the canary."""

    scene: int
    statistic: str
    sign: float


def turned(scores: Scores, sign: float) -> Scores:
    return Scores(sign * scores.present, sign * scores.absent)


def promise(claim: Claim, scores: Scores) -> float:
    """How far below the claimed curve a test with these scores comes, or how close to it.

    A score that is always the same without the canary, and often not with it, gives it away: the most there
    is.
    """
    if np.ptp(scores.absent) == 0 and np.mean(scores.present > scores.absent[0]) > OFTEN:
        return 1.0
    return scores.best_threshold(lambda rates: below_curve(claim, rates), 0.5)[1]


def explore(game: Game, trials: int, tell: Callable[[str], None]) -> Attack:
    """The scene and the statistic that serve best in a few trials of each."""
    usual = Attack(0, game.usual, 1.0)
    found: dict[Attack, float] = {}
    for scene, name in enumerate(game.scenes()):
        tell(f"{game.name}: {name}")
        wanted = None if game.thorough(scene) else game.usual
        plays = [game.play(scene, AT_ONCE, wanted) for _ in range(trials // AT_ONCE)]
        for statistic in plays[0]:
            scores = _joined([own[statistic] for own in plays])
            for sign in (1.0, -1.0):
                choice = Attack(scene, statistic, sign)
                found[choice] = promise(game.claim, turned(scores, sign)) - SURPRISE * (choice != usual)
    best = max(found, key=lambda choice: found[choice])
    if best == usual:
        return usual
    # The best of many looks better than it is: on fresh trials it must cross the claimed curve.
    fresh = _joined(
        [
            game.play(best.scene, AT_ONCE, best.statistic)[best.statistic]
            for _ in range(AGAIN * trials // AT_ONCE)
        ]
    )
    return best if promise(game.claim, turned(fresh, best.sign)) > 0 else usual


def play(
    game: Game, effort: Effort, significance: float, tell: Callable[[str], None] = lambda text: None
) -> Outcome:
    """The verdict on one release.

    Args:
        significance: the probability with which a release that holds may be called violated.
        tell: is told what is being played.
    """
    began = time.monotonic()
    chosen = explore(game, effort.explore, tell)
    halves: list[list[Scores]] = [[], []]
    for turn, trials in enumerate(_chunks(game, effort, began)):
        halves[turn % 2].append(
            turned(game.play(chosen.scene, trials, chosen.statistic)[chosen.statistic], chosen.sign)
        )
        done = sum(part.trials for half in halves for part in half)
        tell(f"{game.name}: {done:,} trials of {game.scenes()[chosen.scene]}")
    first, second = (_joined(half) for half in halves)
    found = judge(game.claim, first, second, game.delta, significance)
    scene, seconds = game.scenes()[chosen.scene], time.monotonic() - began
    return Outcome(game, scene, chosen.statistic, found, second, seconds)


def _chunks(game: Game, effort: Effort, began: float) -> Iterator[int]:
    """Trials of each world to play at once: always two chunks, one for each half."""
    if effort.trials is not None:
        each = max(1, effort.trials // 4)  # of each world in each half
        while each > 0:
            yield from (min(each, game.chunk),) * 2
            each -= game.chunk
        return
    done, chunk = 0, min(game.chunk, LEAST // 4)
    while done < LEAST or time.monotonic() - began < effort.seconds:
        if done >= MOST:
            return
        yield from (chunk, chunk)
        done += 2 * chunk
        chunk = min(game.chunk, 2 * chunk)


def _joined(parts: list[Scores]) -> Scores:
    return Scores(
        np.concatenate([part.present for part in parts]), np.concatenate([part.absent for part in parts])
    )
