"""What the noise of training in groups does to the DP-OGL publication's network by itself.

    python benchmarks/noisy_network.py

Trains the network without privacy for a moment (MNIST, 160 steps of 32 images), then adds the noise that so
many epochs leave in a group's model (clip 0.05, noise multiplier 2, rate 0.7) and scores 1,000 test images.
"""

import math

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from coterie.data import load_dataset
from coterie.data.datasets import DataSettings
from coterie.models import ModelSettings, build_model

CLIP, NOISE, RATE = 0.05, 2.0, 0.7
STEPS, BATCH, TRAINED, TESTED = 160, 32, 12_000, 1_000


def main() -> None:
    torch.manual_seed(0)
    dataset = load_dataset(DataSettings(name="mnist"), 0)
    train, test = (
        (torch.from_numpy(records.features[:count]), torch.from_numpy(records.targets[:count]).long())
        for records, count in ((dataset.train, TRAINED), (dataset.test, TESTED))
    )
    model = build_model(ModelSettings(name="mcmahan-cnn"), dataset.task, 0)
    begun = parameters_to_vector(model.parameters()).detach().clone()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        chosen = torch.randint(TRAINED, (BATCH,))
        optimiser.zero_grad()
        functional.cross_entropy(model(train[0][chosen]), train[1][chosen]).backward()
        optimiser.step()
    trained = parameters_to_vector(model.parameters()).detach().clone()
    moved = float((trained - begun).norm())
    print(f"{len(trained):,} parameters, moved by {moved:.1f} in norm; {score(model, *test)}", flush=True)
    drawn = torch.randn_like(trained)
    for name, workers in (("ring, 26 workers", 26), ("one group of 100", 100)):
        each = CLIP * NOISE / (RATE * workers)
        print(
            f"{name}: noise of an epoch {each:.4f} a parameter, {each * math.sqrt(len(trained)):.1f} in norm"
        )
        for epochs in (1, 40, 200):
            vector_to_parameters(trained + each * math.sqrt(epochs) * drawn, model.parameters())
            print(f"  noise of {epochs} epochs: {score(model, *test)}", flush=True)


@torch.no_grad()
def score(model: nn.Module, features: torch.Tensor, targets: torch.Tensor) -> str:
    outputs = model(features)
    right = float((outputs.argmax(dim=1) == targets).float().mean())
    return f"accuracy {100 * right:.1f} %, loss {float(functional.cross_entropy(outputs, targets)):.2f}"


if __name__ == "__main__":
    main()
