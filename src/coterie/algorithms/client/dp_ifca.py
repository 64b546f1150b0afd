"""`dp-ifca` for clients: each sampled client trains the model that has the lowest loss on its records.

Ghosh, Chung, Yin and Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020,
private for whole clients; with `rebalance` it is RR-Cluster on IFCA, Algorithm 2 of that paper.
"""

from coterie.algorithms.client.rebalancing import Rebalanced
from coterie.algorithms.protocol import Choice


class ClientIFCA(Rebalanced):
    name = "dp-ifca"
    choice = Choice.LOWEST_LOSS
