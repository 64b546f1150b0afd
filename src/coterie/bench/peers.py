"""What others do for the same work: a Python loop over clients, each with a model of its own.

Only for `coterie bench`. Opacus and pfl-research are peers to measure against, not dependencies: where one is
not installed, its rows are missing.
"""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

Step = Callable[[Tensor, Tensor], None]
"""One training step of one client on a batch."""
Peer = Callable[[nn.Module, float, float, float], Step]
"""From a client's model, step size, clip and noise multiplier to its step."""


def _step(optimiser: Any, loss: Callable[[Tensor, Tensor], Any]) -> Step:
    def step(features: Tensor, targets: Tensor) -> None:
        optimiser.expected_batch_size = len(targets)  # what Opacus divides by; others do not look
        optimiser.zero_grad()
        loss(features, targets).backward()
        optimiser.step()

    return step


def plain_sgd(model: nn.Module, lr: float, clip: float, noise: float) -> Step:
    """No privacy at all."""
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    return _step(optimiser, lambda features, targets: functional.cross_entropy(model(features), targets))


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
    optimiser = import_module("opacus.optimizers").DPOptimizer(**_private(wrapped, lr, clip, noise))
    return _step(optimiser, lambda features, targets: functional.cross_entropy(wrapped(features), targets))


def opacus_ghost(model: nn.Module, lr: float, clip: float, noise: float) -> Step:
    """Opacus with ghost clipping: norms first, then a second backward pass."""
    layers = import_module("opacus.grad_sample")
    optimisers = import_module("opacus.optimizers.optimizer_fast_gradient_clipping")
    losses = import_module("opacus.utils.fast_gradient_clipping_utils")
    wrapped = layers.GradSampleModuleFastGradientClipping(model, max_grad_norm=clip, use_ghost_clipping=True)
    optimiser = optimisers.DPOptimizerFastGradientClipping(**_private(wrapped, lr, clip, noise))
    criterion = losses.DPLossFastGradientClipping(wrapped, optimiser, nn.CrossEntropyLoss(reduction="mean"))
    return _step(optimiser, lambda features, targets: criterion(wrapped(features), targets))


def _private(wrapped: nn.Module, lr: float, clip: float, noise: float) -> dict[str, Any]:
    plain = torch.optim.SGD(wrapped.parameters(), lr=lr)
    return {"optimizer": plain, "noise_multiplier": noise, "max_grad_norm": clip, "expected_batch_size": 1}


def installed_peers() -> dict[str, Peer]:
    """Every peer that can run here, by the name under which its ratio is reported."""
    peers: dict[str, Peer] = {"plain_sgd": plain_sgd, "torch_func": torch_func}
    if find_spec("opacus") is not None:
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        peers |= {"opacus": opacus_hooks, "opacus_ghost": opacus_ghost}
    return peers


# --- a round of client-level learning ---------------------------------------------------------------

Arrays = tuple[NDArray[Any], NDArray[Any]]
Round = Callable[[], int]
"""Trains a sample of clients and returns how many."""
RoundPeer = Callable[[nn.Module, Mapping[str, Arrays], int, float, int, int], Round]
"""From the model, all clients' records, the number sampled, step size, local epochs and batch to a round."""


def plain_round(
    model: nn.Module, clients: Mapping[str, Arrays], sampled: int, lr: float, epochs: int, batch: int
) -> Round:
    """A loop over the sampled clients: load the weights, train, add up the difference."""
    device = next(model.parameters()).device
    tables = [tuple(torch.from_numpy(array).to(device) for array in arrays) for arrays in clients.values()]
    start = {name: value.clone() for name, value in model.state_dict().items()}
    rng = np.random.default_rng(0)

    def run() -> int:
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for chosen in rng.choice(len(tables), sampled, replace=False):
            features, targets = tables[chosen]
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=lr)
            for _ in range(epochs):
                for part in torch.split(torch.randperm(len(targets), device=device), batch):
                    optimiser.zero_grad()
                    functional.cross_entropy(model(features[part]), targets[part]).backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
            for name, value in model.state_dict().items():
                total[name] += value - start[name]
        return sampled

    return run


def pfl_round(
    model: nn.Module, clients: Mapping[str, Arrays], sampled: int, lr: float, epochs: int, batch: int
) -> Round:
    """pfl-research's simulation of federated averaging, without noise."""
    base, averaging = import_module("pfl.algorithm.base"), import_module("pfl.algorithm.federated_averaging")
    parameters, context = import_module("pfl.hyperparam.base"), import_module("pfl.context")
    dataset, population = import_module("pfl.data.federated_dataset"), import_module("pfl.common_types")
    wrapper, simulate = import_module("pfl.model.pytorch"), import_module("pfl.aggregate.simulate")

    class Module(nn.Module):
        """The model with the two methods that pfl-research asks for."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def loss(self, features: Tensor, targets: Tensor, eval: bool = False) -> Tensor:
            return functional.cross_entropy(self.inner(features), targets.long())

        def metrics(self, features: Tensor, targets: Tensor, eval: bool = True) -> dict[str, Any]:
            return {}

    module = Module()
    wrapped = wrapper.PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    rng = np.random.default_rng(0)
    names = list(clients)
    data = {name: [torch.from_numpy(array) for array in arrays] for name, arrays in clients.items()}
    people = dataset.FederatedDataset.from_slices(data, lambda: names[rng.integers(len(names))])
    backend = simulate.SimulatedBackend(training_data=people, val_data=people)
    algorithm = averaging.FederatedAveraging()
    settings = context.CentralContext(
        current_central_iteration=0,
        do_evaluation=False,
        cohort_size=sampled,
        population=population.Population.TRAIN,
        model_train_params=parameters.NNTrainHyperParams(
            local_num_epochs=epochs, local_learning_rate=lr, local_batch_size=batch
        ),
        model_eval_params=None,
        algorithm_params=base.NNAlgorithmParams(
            central_num_iterations=1, evaluation_frequency=1, train_cohort_size=sampled, val_cohort_size=None
        ),
        seed=0,
    )

    def run() -> int:
        backend.gather_results(wrapped, algorithm, central_context=settings)
        return sampled

    return run


def installed_round_peers() -> dict[str, RoundPeer]:
    """Every peer of a client-level round that can run here, by the name under which its ratio is reported."""
    installed: dict[str, RoundPeer] = {} if find_spec("pfl") is None else {"pfl_research": pfl_round}
    return {"plain_round": plain_round, **installed}
