"""`gmfsc`: a cluster with fewer than B clients takes the update of all instead of its own.

The "global model for small cluster" baseline of RR-Cluster's appendix E.4. Which cluster is small is read off
the noisy histogram; the update of all is the sum of the released sums, which costs nothing more but carries
the noise of every one of them.
"""

from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from coterie.algorithms.client.clustered import Clustered, ClusteredSettings, ClusteredState
from coterie.algorithms.protocol import Choice, Count, Histogram, PublicFacts, Rounds, Sum, Sums, ask
from coterie.algorithms.settings import PRIVATE, Ratio
from coterie.privacy import Mechanism
from coterie.privacy.plans import HISTOGRAM_RATIO


class GMFSCSettings(ClusteredSettings):
    """Options of gmfsc."""

    minimum: PositiveInt | None = Field(
        None, description="B, least clients in a cluster's own update; null: half a fair share"
    )
    histogram_ratio: Annotated[Ratio, PRIVATE] = Field(
        HISTOGRAM_RATIO, description="noise of the histogram over that of the sums"
    )


class GMFSC(Clustered):
    name = "gmfsc"
    choice = Choice.LOWEST_LOSS
    settings: GMFSCSettings

    def release(self, facts: PublicFacts) -> Mechanism:
        super().release(facts)
        return self.about.sums(histogram_ratio=self.settings.histogram_ratio)

    def round(self, state: ClusteredState) -> Rounds[ClusteredState]:
        least = self.settings.minimum or self.fair_share(state) / 2
        cohort = yield from self.opened(state)
        histogram = (yield from ask(Count(cohort), Histogram)).counts
        sums = yield from ask(Sum(cohort), Sums)
        small = histogram.value < least
        rows = sums.rows.map(lambda own: np.where(small[:, None], own.sum(axis=0), own))
        divisors = np.where(small, self.expected(state), np.maximum(histogram.value, least))
        return self.revived(self.moved(state, replace(sums, rows=rows), divisors), histogram)
