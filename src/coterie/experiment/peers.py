"""What others do for the same work: a Python loop over clients, each with a model of its own.

Only for `coterie bench`. Opacus is a peer to measure against, not a dependency: where it is not installed,
its rows are missing.
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

Step = Callable[[Tensor, Tensor], None]
"""One training step of one client on a batch."""
Peer = Callable[[nn.Module, float, float, float], Step]
"""From a client's model, step size, clip and noise multiplier to its step."""


def plain_sgd(model: nn.Module, lr: float, clip: float, noise: float) -> Step:
    """No privacy at all."""
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)

    def step(features: Tensor, targets: Tensor) -> None:
        optimiser.zero_grad()
        functional.cross_entropy(model(features), targets).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def torch_func(model: nn.Module, lr: float, clip: float, noise: float) -> Step:
    """`vmap(grad)` over the records of a batch, then clipping, noise and the step."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, weights, (record[None],)), target[None])

    per_record = vmap(grad(loss), in_dims=(None, 0, 0))

    def step(features: Tensor, targets: Tensor) -> None:
        rows = per_record(parameters, features, targets)
        squares = torch.stack([value.flatten(1).square().sum(dim=1) for value in rows.values()]).sum(dim=0)
        scales = (clip / squares.sqrt().clamp(min=1e-12)).clamp(max=1.0)
        for name, value in rows.items():
            total = torch.einsum("n,n...->...", scales, value)
            total += noise * clip * torch.randn_like(total)
            parameters[name] = parameters[name] - lr * total / len(targets)

    return step


def opacus_hooks(model: nn.Module, lr: float, clip: float, noise: float) -> Step:
    """Opacus with per-sample gradients by hooks, as the authors of clustered private learning use it."""
    wrapped = import_module("opacus").GradSampleModule(model)
    optimiser = import_module("opacus.optimizers").DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=lr),
        noise_multiplier=noise,
        max_grad_norm=clip,
        expected_batch_size=1,
    )

    def step(features: Tensor, targets: Tensor) -> None:
        optimiser.expected_batch_size = len(targets)
        optimiser.zero_grad()
        functional.cross_entropy(wrapped(features), targets).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def opacus_ghost(model: nn.Module, lr: float, clip: float, noise: float) -> Step:
    """Opacus with ghost clipping: norms first, then a second backward pass."""
    layers = import_module("opacus.grad_sample")
    optimisers = import_module("opacus.optimizers.optimizer_fast_gradient_clipping")
    losses = import_module("opacus.utils.fast_gradient_clipping_utils")
    wrapped = layers.GradSampleModuleFastGradientClipping(model, max_grad_norm=clip, use_ghost_clipping=True)
    optimiser = optimisers.DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=lr),
        noise_multiplier=noise,
        max_grad_norm=clip,
        expected_batch_size=1,
    )
    criterion = losses.DPLossFastGradientClipping(wrapped, optimiser, nn.CrossEntropyLoss(reduction="mean"))

    def step(features: Tensor, targets: Tensor) -> None:
        optimiser.expected_batch_size = len(targets)
        optimiser.zero_grad()
        criterion(wrapped(features), targets).backward()
        optimiser.step()

    return step


def installed_peers() -> dict[str, Peer]:
    """Every peer that can run here, by the name under which its ratio is reported."""
    peers: dict[str, Peer] = {"plain_sgd": plain_sgd, "torch_func": torch_func}
    if find_spec("opacus") is not None:
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        peers |= {"opacus": opacus_hooks, "opacus_ghost": opacus_ghost}
    return peers
