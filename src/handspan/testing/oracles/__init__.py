"""Oracles: slow, obvious, independent NumPy reference implementations.

An *oracle* is a second implementation of a published algorithm, written to be compared with the
paper by eye and with the fast implementation by test. It trades everything for being obviously
right: float64, plain loops, one client at a time, the equation number beside the line, no
identity exploited (the pFL-MF oracle forms every d x r matrix), no stacking, no engine.

Rules of this package:

- Nothing of the library is imported, and no tensor library: NumPy and the standard library only.
  No oracle imports another one either (`span` is one in three modules). The five lines of SGD are
  repeated in each on purpose, so that one mistake cannot hide in two places and each page is
  checked alone.
- Nothing is random. The cohorts, the rows of every local step and every initial value are
  arguments; an oracle and an engine that are given the same ones must give the same numbers.
- Arguments are never changed in place; results are fresh arrays.

Arguments that the modules share:

``clients``
    One pair ``(x, y)`` of training rows per client, first axis = rows.
``cohorts``
    For each round the sorted ids of the clients that take part. A round without any is skipped.
``batches``
    ``batches(round, phase, stage, client)`` gives the integer row indices of each local step in
    order. Rounds count from 0, the phase is ``"train"`` (``"local"`` in `local`), and stages
    count from 0 in the order in which the client runs them. (`finetune` concerns one client once
    and takes the list itself; `fedmavg`, `fedmgs`, `fedpalm` and `palm` always use all columns of
    their matrices.)
``gradient``
    ``gradient(params, x, y)``: the gradient of the mean loss of these rows, with the names of
    ``params``. `models` has two models with hand-written back-propagation.
``learning_rate``, ``momentum``, ``nesterov``, ``weight_decay``
    Plain SGD: ``g += weight_decay * p``, ``buf = momentum * buf + g``, then ``p -= lr * buf``, or
    ``p -= lr * (g + momentum * buf)`` with Nesterov. The buffer starts at 0 in each stage.
``weights``
    ``"examples"``: the mean over the cohort weighted by numbers of rows; ``"uniform"``: plain.

Modules: one for each method, by its name (`fedavg` has server optimisers, and runs inside given
groups); and `models` (losses and gradients), `finetune`, `palm` (the centralised counterpart of
`fedmgs`), `centres` and `span_clients` (parts of `span`).

Examples
--------
>>> import numpy as np
>>> from handspan.testing.oracles.fedavg import fedavg
>>> clients = [(np.zeros((2, 1)), np.array([1.0, 3.0])), (np.zeros((1, 1)), np.array([8.0]))]
>>> def gradient(params, x, y):
...     return {"mean": params["mean"] - y.mean()}
>>> def batches(round_index, phase, stage, client):
...     return [np.arange(len(clients[client][1]))]
>>> start = {"mean": np.zeros(1)}
>>> fedavg(clients, [[0, 1]], batches, gradient, start, learning_rate=1.0)
{'mean': array([4.])}
"""

__all__ = [
    "apfl",
    "centres",
    "ditto",
    "fedalt",
    "fedavg",
    "fedbabu",
    "fedbasis",
    "fedbn",
    "fedcomplete",
    "fedem",
    "fedmavg",
    "fedmgs",
    "fedpalm",
    "fedper",
    "fedprox",
    "fedrep",
    "fedsim",
    "finetune",
    "ifca",
    "l2gd",
    "lgfedavg",
    "local",
    "models",
    "palm",
    "perfedavg",
    "perfedsi",
    "pfedfda",
    "pfedme",
    "pflmf",
    "scaffold",
    "span",
    "span_clients",
]
