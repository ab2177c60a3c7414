"""Flower's side: its simulation on Ray, the FedAvg strategy, evaluation off, one core a client."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.stage import CLIENTS, COHORT, RATE, ROWS, Play, Turns, loss

_FOREVER = 1 << 30


class Over(Exception):
    """Nobody asks for more rounds."""


@functools.cache
def material(play: Play) -> Any:
    """Rows, read once in each process."""
    return play.rows()


def train_client(play: Play, message: Message, context: Context) -> Message:
    """One epoch of a client."""
    torch.set_num_threads(play.threads)
    module = play.module()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = play.client(*material(play), int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for index in torch.randperm(ROWS).split(play.batch_size):
        optimizer.zero_grad()
        loss(module, x[index], y[index]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": ROWS})
    content = {"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}
    return Message(content=RecordDict(content), reply_to=message)


def main() -> None:
    """Train until nobody asks for more."""
    play, turns = Play.given(), Turns()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        return train_client(play, message, context)

    def evaluate(index: int, arrays: ArrayRecord) -> MetricRecord | None:
        def accuracy() -> float:
            module = play.module()
            module.load_state_dict(arrays.to_torch_state_dict())
            return play.accuracy(module)

        if not turns.next(accuracy):
            raise Over
        return None

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        turns.tell(ready="flower, one core a client")
        strategy = FedAvg(fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0)
        start = ArrayRecord(play.module().state_dict())
        strategy.start(grid, start, num_rounds=_FOREVER, evaluate_fn=evaluate)

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    # Under the module's own name: the client's function travels to Ray's actors by reference, and
    # rows that they have read stay with them.
    from benchmarks.peers import side_flower

    side_flower.main()
