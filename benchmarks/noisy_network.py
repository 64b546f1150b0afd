"""What the noise of training in groups does to the DP-OGL publication's network by itself.

    python benchmarks/noisy_network.py

Noise is what so many epochs leave in a group's model (clip 0.05, noise multiplier 2, rate 0.7). Added to a
network that was trained without privacy for a moment (MNIST, 160 steps of 32 images): does it forget? Added
to the network that nobody trained: how long are its gradients, and how much does it learn then from 100 steps
of 200 images without privacy, with the publication's step size 0.001?
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
SLOW_STEPS, SLOW_BATCH, SLOW_RATE = 100, 200, 0.001
GROUPS = {"ring, 26 workers": 26, "one group of 100": 100}

Images = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    torch.manual_seed(0)
    dataset = load_dataset(DataSettings(name="mnist"), 0)
    train, test = (
        (torch.from_numpy(records.features[:count]), torch.from_numpy(records.targets[:count]).long())
        for records, count in ((dataset.train, TRAINED), (dataset.test, TESTED))
    )
    model = build_model(ModelSettings(name="mcmahan-cnn"), dataset.task, 0)
    begun = parameters_to_vector(model.parameters()).detach().clone()
    learn(model, train, STEPS, BATCH, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trained = parameters_to_vector(model.parameters()).detach().clone()
    moved = float((trained - begun).norm())
    print(f"{len(trained):,} parameters, moved by {moved:.1f} in norm; {score(model, test)}", flush=True)
    drawn = torch.randn_like(trained)
    for name, workers in GROUPS.items():
        each = noise_of_an_epoch(workers)
        print(
            f"{name}: noise of an epoch {each:.4f} a parameter, {each * math.sqrt(len(trained)):.1f} in norm"
        )
        for epochs in (1, 40, 200):
            vector_to_parameters(trained + each * math.sqrt(epochs) * drawn, model.parameters())
            print(f"  noise of {epochs} epochs: {score(model, test)}", flush=True)

    print("untrained network")
    print(f"  without noise: {gradient_and_learning(model, begun, train, test)}", flush=True)
    for name, workers in GROUPS.items():
        for epochs in (50, 100):
            noisy = begun + noise_of_an_epoch(workers) * math.sqrt(epochs) * drawn
            told = gradient_and_learning(model, noisy, train, test)
            print(f"  noise of {epochs} epochs, {name}: {told}", flush=True)


def noise_of_an_epoch(workers: int) -> float:
    return CLIP * NOISE / (RATE * workers)


def gradient_and_learning(model: nn.Module, start: torch.Tensor, train: Images, test: Images) -> str:
    vector_to_parameters(start, model.parameters())
    before = score(model, test)
    model.zero_grad()
    functional.cross_entropy(model(test[0]), test[1]).backward()
    length = math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
    torch.manual_seed(1)
    learn(model, train, SLOW_STEPS, SLOW_BATCH, torch.optim.SGD(model.parameters(), lr=SLOW_RATE))
    return f"{before}, gradient {length:.2f}; after {SLOW_STEPS} small steps {score(model, test)}"


def learn(model: nn.Module, train: Images, steps: int, batch: int, optimiser: torch.optim.Optimizer) -> None:
    for _ in range(steps):
        chosen = torch.randint(len(train[1]), (batch,))
        optimiser.zero_grad()
        functional.cross_entropy(model(train[0][chosen]), train[1][chosen]).backward()
        optimiser.step()


@torch.no_grad()
def score(model: nn.Module, images: Images) -> str:
    outputs, targets = model(images[0]), images[1]
    right = float((outputs.argmax(dim=1) == targets).float().mean())
    return f"accuracy {100 * right:.1f} %, loss {float(functional.cross_entropy(outputs, targets)):.2f}"


if __name__ == "__main__":
    main()
