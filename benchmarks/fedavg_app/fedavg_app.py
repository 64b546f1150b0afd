"""Flower's own FedAvg over the same records, model and steps, with no privacy at all."""

import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model

TASK = Task("classification", (1, 8, 8), 10)
server = ServerApp()
client = ClientApp()


class Timed(FedAvg):
    """Notes when each round is done."""

    def __init__(self, path: Path, sites: int) -> None:
        shares = {"fraction_train": 1.0, "fraction_evaluate": 0.0}
        super().__init__(**shares, min_train_nodes=sites, min_available_nodes=sites)
        self.path = path

    def aggregate_train(self, *arguments, **options):
        found = super().aggregate_train(*arguments, **options)
        with self.path.open("a") as file:
            file.write(f"{time.time()}\n")
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    model = build_model(ModelSettings(name="softmax"), TASK, 0)
    path = Path(str(context.run_config["times"]))
    path.write_text(f"{time.time()}\n")
    Timed(path, int(context.run_config["sites"])).start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["rounds"]),
    )


@client.train()
def train(message: Message, context: Context) -> Message:
    model = build_model(ModelSettings(name="softmax"), TASK, 0)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with np.load(str(context.node_config["file"])) as content:
        features, targets = torch.from_numpy(content["x"]), torch.from_numpy(content["y"])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in torch.randperm(len(targets)).split(40):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(features[batch]), targets[batch]).backward()
        optimiser.step()
    reply = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(targets)}),
        }
    )
    return Message(reply, reply_to=message)
