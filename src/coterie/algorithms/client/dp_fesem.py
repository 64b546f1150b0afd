"""`dp-fesem`: each sampled client trains the model that is nearest to one it trains itself.

Long et al., "Multi-Center Federated Learning: Clients Clustering for Better Personalization", WWW 2023, with
what privacy demands: one assignment a round, against centres that are released already, by a client's own
records alone. A client cannot keep a model of its own from earlier rounds without that model starting at a
centre and staying nearest to it; so it starts from the mean of all centres, each time, and the direction in
which it moves decides.
"""

from coterie.algorithms.client.rebalancing import Rebalanced
from coterie.algorithms.protocol import Choice


class FeSEM(Rebalanced):
    name = "dp-fesem"
    choice = Choice.NEAREST
