"""pfl's side: its simulated backend, FedAvg, evaluation off, a user's batches made once."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.peers.stage import CLIENTS, COHORT, RATE, Play, Turns, loss

_FOREVER = 1 << 30


class Network(nn.Module):
    """The network with what pfl asks of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss of a batch."""
        return loss(self.inner, x, y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Nothing is evaluated."""
        return {}


class Waits(TrainingProcessCallback[Any]):
    """Lets other contestants have their turn between the rounds."""

    def __init__(self, turns: Turns, accuracy: Any) -> None:
        self.turns, self.accuracy = turns, accuracy

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Wait for the next turn."""
        return not self.turns.next(self.accuracy), Metrics()


def main() -> None:
    """Train until nobody asks for more."""
    play, turns = Play.given(), Turns()
    torch.set_num_threads(play.threads)
    logging.disable(logging.WARNING)
    x, y = play.rows()

    @functools.cache
    def user(number: int) -> Dataset:
        return Dataset(raw_data=play.client(x, y, number), user_id=str(number))

    sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    network = Network(play.module())
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    users = FederatedDataset(user, sampler)
    waits = Waits(turns, functools.partial(play.accuracy, network.inner))
    turns.tell(ready=f"pfl, {play.threads} thread{'s' * (play.threads > 1)}")
    if not turns.next(waits.accuracy):
        return
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=_FOREVER,
            evaluation_frequency=_FOREVER,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(users, users, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=play.batch_size
        ),
        callbacks=[waits],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
