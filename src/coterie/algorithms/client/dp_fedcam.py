"""`dp-fedcam`: a model that everyone shares plus a model of the cluster; their outputs are added.

Ma et al., "Structured Federated Learning through Clustered Additive Modeling", NeurIPS 2023. The update of
both models is one vector under one clip: a client adds its first half to the sum of all, its second half to
the sum of its cluster, and both together move by the clip. Two clips would need two lots of noise.
"""

import numpy as np

from coterie.algorithms.client.rebalancing import Rebalanced
from coterie.algorithms.protocol import Choice, Mask, PublicFacts


class FedCAM(Rebalanced):
    name = "dp-fedcam"
    choice = Choice.LOWEST_LOSS
    additive = True

    def shared(self, facts: PublicFacts) -> Mask:
        """The model is two of a kind, one after the other; the first is everyone's."""
        return np.arange(facts.parameters) < facts.parameters // 2
