"""What all contestants are given, and how they are asked: torch and numpy alone."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

CLIENTS, ROWS, COHORT, RATE = 100, 525, 10, 0.05


@dataclass(frozen=True, kw_only=True)
class Play:
    """What is to be trained.

    Attributes
    ----------
    material
        An npz file with rows, labels and the start of the model.
    model, batch_size, threads, method
        The network (``mlp`` or ``cnn``), rows of a batch, threads of a process, and the method (of
        handspan's side; the others know FedAvg).
    engine
        Of handspan's side: ``auto``, or one by name, with its block size behind a colon.
    """

    material: str
    model: str
    batch_size: int
    threads: int = 1
    method: str = "fedavg"
    engine: str = "auto"

    @staticmethod
    def given() -> Play:
        """Return the play that stands on the command line."""
        return Play(**json.loads(sys.argv[1]))

    def told(self) -> str:
        """Return the play for a command line."""
        return json.dumps(dataclasses.asdict(self))

    def module(self) -> nn.Module:
        """Return the network at its start."""
        made = _mlp() if self.model == "mlp" else _cnn()
        with np.load(self.material) as arrays:
            state = {name: torch.from_numpy(arrays[f"start {name}"]) for name in made.state_dict()}
        made.load_state_dict(state)
        return made

    def rows(self) -> tuple[Tensor, Tensor]:
        """Training rows and labels, client after client."""
        with np.load(self.material) as arrays:
            return torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])

    def client(self, x: Tensor, y: Tensor, client: int) -> tuple[Tensor, Tensor]:
        """Rows and labels of one client."""
        part = slice(client * ROWS, (client + 1) * ROWS)
        return x[part], y[part]

    @torch.no_grad()
    def accuracy(self, predict: Callable[[Tensor], Tensor]) -> float:
        """Share of the test rows that are predicted well."""
        with np.load(self.material) as arrays:
            x, y = torch.from_numpy(arrays["x_test"]), torch.from_numpy(arrays["y_test"])
        outputs = torch.cat([predict(part) for part in x.split(500)])
        return float((outputs.argmax(1) == y).double().mean())


def _mlp() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden1=nn.Linear(784, 200),
            relu1=nn.ReLU(),
            hidden2=nn.Linear(200, 200),
            relu2=nn.ReLU(),
            head=nn.Linear(200, 10),
        )
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            channel=nn.Unflatten(1, (1, 28)),
            conv1=nn.Conv2d(1, 32, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            hidden1=nn.Linear(1024, 128),
            relu3=nn.ReLU(),
            head=nn.Linear(128, 10),
        )
    )


def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of a batch."""
    return functional.cross_entropy(module(x), y)


class Turns:
    """A contestant's end of the line: it trains when it is its turn, and waits meanwhile."""

    def __init__(self) -> None:
        self._line = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever others print is no answer
        self._left, self._begin = 0, 0.0

    def next(self, accuracy: Callable[[], float]) -> bool:
        """Wait until a round may be trained; False when there is none any more."""
        if self._begin and not self._left:
            self.tell(seconds=time.perf_counter() - self._begin)
            self._begin = 0.0
        while not self._left:
            words = sys.stdin.readline().split()
            if not words:
                return False
            if words[0] == "score":
                self.tell(accuracy=accuracy())
                continue
            self._left, self._begin = int(words[0]), time.perf_counter()
        self._left -= 1
        return True

    def tell(self, **answer: Any) -> None:
        """Answer."""
        print(json.dumps(answer), file=self._line, flush=True)
