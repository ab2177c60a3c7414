"""FedAvg as a careful researcher would write it in plain PyTorch: the yardstick of the engines.

One module, one optimiser, minibatches by index from tensors that lie on the device; the global
model is copied into the module's parameters and the average is accumulated in place. No data
loader, no deep copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class PlainFedAvg:
    """A federation trained by FedAvg, one client after the other.

    Parameters
    ----------
    module
        The network, at the global model.
    x, y
        Rows of all clients.
    learning_rate
        Of ``torch.optim.SGD``.
    """

    def __init__(self, module: nn.Module, x: Tensor, y: Tensor, learning_rate: float) -> None:
        self.module = module.train()
        self.x, self.y = x, y
        self.parameters = list(module.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=learning_rate)
        self.model = [parameter.detach().clone() for parameter in self.parameters]

    def train_client(self, batches: Iterable[Tensor]) -> None:
        """Local steps from the global model; a batch is the positions of its rows."""
        with torch.no_grad():
            for parameter, start in zip(self.parameters, self.model, strict=True):
                parameter.copy_(start)
        for index in batches:
            self.optimizer.zero_grad(set_to_none=True)
            outputs = self.module(self.x[index])
            functional.cross_entropy(outputs, self.y[index]).backward()
            self.optimizer.step()

    def train_round(self, cohort: Sequence[Iterable[Tensor]], weights: Sequence[float]) -> None:
        """Train each client of the cohort and average their models."""
        average = [torch.zeros_like(start) for start in self.model]
        share = 1.0 / sum(weights)
        for batches, weight in zip(cohort, weights, strict=True):
            self.train_client(batches)
            with torch.no_grad():
                for total, parameter in zip(average, self.parameters, strict=True):
                    total.add_(parameter, alpha=weight * share)
        self.model = average

    @torch.no_grad()
    def loss(self, index: Tensor) -> float:
        """Mean loss of the global model on the given rows."""
        for parameter, start in zip(self.parameters, self.model, strict=True):
            parameter.copy_(start)
        outputs = self.module(self.x[index]).double()
        return float(functional.cross_entropy(outputs, self.y[index]))


def random_batches(start: int, num: int, batch_size: int, steps: int) -> list[Tensor]:
    """Positions of the rows of each step: a fresh permutation for each pass, no short batches."""
    per_pass = max(1, num // batch_size)
    passes = -(-steps // per_pass)
    found: list[Tensor] = []
    for _ in range(passes):
        order = start + torch.randperm(num)
        found += order[: per_pass * batch_size].split(batch_size)
    return found[:steps]
