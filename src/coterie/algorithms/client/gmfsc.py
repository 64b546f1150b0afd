"""`gmfsc`: a cluster with fewer than B clients takes the update of all instead of its own.

The "global model for small cluster" baseline of RR-Cluster's appendix E.4. Which cluster is small is read off
the noisy histogram; the update of all is the sum of the released sums, which costs nothing more but carries
the noise of every one of them.
"""

import numpy as np
from pydantic import Field, PositiveInt

from coterie.algorithms.client.clustered import Clustered, ClusteredSettings, ClusteredState, Update
from coterie.algorithms.protocol import Choice, CohortJob, PublicFacts, Rounds, add_up, count, open_cohort
from coterie.algorithms.registry import register
from coterie.algorithms.settings import Ratio
from coterie.privacy import Mechanism
from coterie.privacy.plans import HISTOGRAM_RATIO, SUMS


class GMFSCSettings(ClusteredSettings):
    """Options of gmfsc."""

    minimum: PositiveInt | None = Field(
        None, description="B, least clients in a cluster's own update; null: half a fair share"
    )
    histogram_ratio: Ratio = Field(
        HISTOGRAM_RATIO, description="noise of the histogram over that of the sums"
    )


@register
class GMFSC(Clustered):
    name = "gmfsc"
    choice = Choice.LOWEST_LOSS
    settings_type = GMFSCSettings
    settings: GMFSCSettings

    def release(self, facts: PublicFacts) -> Mechanism:
        super().release(facts)
        return self.about.sums(histogram_ratio=self.settings.histogram_ratio)

    def ask(self, job: CohortJob, state: ClusteredState) -> Rounds[Update]:
        expected = self.expected(len(job.members))
        least = self.settings.minimum or self.fair_share(len(job.members)) / 2
        cohort = yield from open_cohort(SUMS, job)
        released = yield from count(cohort)
        histogram = released.value
        answer = yield from add_up(cohort)
        sums = answer.rows.value
        small = histogram < least
        rows = np.where(small[:, None], sums.sum(axis=0), sums)
        divisors = np.where(small, expected, np.maximum(histogram, least))
        return Update(rows, divisors, released, within=answer.within)
