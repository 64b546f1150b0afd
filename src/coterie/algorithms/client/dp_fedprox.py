"""`dp-fedprox`: dp-fedavg whose clients are pulled towards the model that they were sent.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from dataclasses import replace

from pydantic import Field

from coterie.algorithms.client.client_level import ClientLevelSettings
from coterie.algorithms.client.dp_fedavg import FedAvg
from coterie.algorithms.protocol import LocalTraining
from coterie.algorithms.settings import Pull


class FedProxSettings(ClientLevelSettings):
    """Options of dp-fedprox."""

    proximal: Pull = Field(0.01, gt=0, description="weight mu of the pull towards the model that was sent")


class FedProx(FedAvg):
    name = "dp-fedprox"
    settings: FedProxSettings

    def local_training(self) -> LocalTraining:
        return replace(super().local_training(), proximal=self.settings.proximal)
