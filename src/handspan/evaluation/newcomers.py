"""New clients: the score of what they are served, against the number of rows they have.

A held-out client is given its first n training rows as if it had no more, for n from 0 up. It fits
its private part on them with the shared part frozen, the personal phases run, and its test rows are
scored. Without rows nothing is fitted and nothing tuned: what is left is the shared model with the
private record that every client starts from.

The stored order of a client's rows is drawn from the seed and the client alone, so all methods are
given the same rows, and fewer are always among more. A method that chooses by validation rows
takes them out of the n: the same share of them as of all the rows the client has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.evaluation.metrics import Metric
from handspan.evaluation.protocol import evaluate
from handspan.simulation.engine import EngineChoice, num_threads

Count = int | None
COUNTS: tuple[Count, ...] = (0, 1, 2, 5, 10, 20, None)
"""Rows given to a new client; None stands for all it has."""


def first_rows(data: FederatedData, count: Count) -> FederatedData:
    """Return the clients with their first training rows only; test rows stay as they are.

    Side information that is the mean of a client's rows is made again, of those it keeps.

    Parameters
    ----------
    data
        Clients with all their rows.
    count
        Rows for training and validation together; a client with fewer keeps what it has.
    """
    from handspan.data.side import restated

    known = data.num_train + data.num_validation
    kept = known if count is None else known.clamp(max=count)
    num_validation = kept * data.num_validation // known.clamp(min=1)
    length = kept + data.num_test
    offsets = torch.cat([length.new_zeros(1), length.cumsum(0)])
    client = torch.repeat_interleave(torch.arange(data.num_clients), length)
    place = torch.arange(len(client)) - offsets[client]
    place += torch.where(place >= kept[client], (known - kept)[client], 0)
    rows = (data.offsets[client] + place).to(data.device)
    given = dataclasses.replace(
        data,
        x=data.x[rows] if isinstance(data.x, Tensor) else data.x.select(rows),
        y=None if data.y is None else data.y[rows],
        offsets=offsets,
        num_train=kept - num_validation,
        num_validation=num_validation,
    )
    return restated(given)


def curve(
    algorithm: Algorithm,
    server: Any,
    index: int,
    guests: FederatedData,
    task: Any,
    metric: Metric,
    *,
    seed: int,
    choice: EngineChoice,
    counts: Sequence[Count] = COUNTS,
) -> list[dict[str, Any]]:
    """Let new clients fit their private part on so many rows each, and score what they are served.

    Parameters
    ----------
    algorithm, server, index
        A method, the record that its server has learned, and after how many rounds.
    guests
        The new clients.
    task, metric
        How they are scored.
    seed, choice
        Those of the run.
    counts
        As in ``newcomer_curve``, and so is what is returned.
    """
    everyone = torch.arange(guests.num_clients)
    table: list[dict[str, Any]] = []
    for count in counts:
        given = first_rows(guests, count)
        seed_of_guests = keys.seed_of(keys.key(seed, "held out"))
        simulation = choice.simulation(algorithm, given, seed=seed_of_guests)
        costs = simulation.adapt(server, everyone, index)
        costs += simulation.personal_costs(server, everyone, index)
        scores = evaluate(simulation, server, index, task, [metric]).summary
        table.append(
            {
                "given": "all" if count is None else count,
                "given_mean": float((given.num_train + given.num_validation).double().mean()),
                "metric": metric.name,
                "mean": scores[f"personal_{metric.name}_mean"],
                "pooled": scores[f"personal_{metric.name}_pooled"],
                "worst_decile": scores["worst_decile"],
                "rows": costs.rows,
                "forward_rows": costs.forward_rows,
            }
        )
    return table


def newcomer_curve(
    result: Any,
    held_out: FederatedData | None = None,
    counts: Sequence[Count] = COUNTS,
    *,
    steps: int | None = None,
) -> list[dict[str, Any]]:
    """Score new clients against the number of their rows.

    Runs with held-out clients have this in their summary, as ``newcomers``.

    Parameters
    ----------
    result
        A finished run (``handspan.fit`` or ``handspan.load``).
    held_out
        Clients that took no part in it; those of the run by default.
    counts
        Rows given to each; None stands for all it has.
    steps
        Steps with which a client fits its private part; the run's ``adapt_steps`` by default.

    Returns
    -------
    list
        One entry for each count: ``given`` (a number, or ``all``), ``given_mean`` (clients with
        fewer rows give what they have), the leading ``metric`` (``mean`` over clients, ``pooled``
        over rows, ``worst_decile``), and the ``rows`` and ``forward_rows`` that all new clients
        together passed through the model to be served.

    Examples
    --------
    >>> import handspan
    >>> from handspan.data import load_data, split_holdout
    >>> data = load_data("digits", num_clients=12, holdout_clients=2)
    >>> data, guests = split_holdout(data, 2, seed=0)
    >>> result = handspan.fit("fedavg", data, held_out=guests, rounds=1, engine="loop")
    >>> [entry["given"] for entry in newcomer_curve(result, counts=(0, 5, None))]
    [0, 5, 'all']
    """
    problem = result.problem
    if problem.task is None:
        raise HandspanError(
            f"{problem.spec.text} factorises the rows it has: it serves no new clients"
        )
    with num_threads(result.choice.threads):
        return curve(
            result.algorithm(steps),
            result.state.server,
            result.state.round,
            _guests(problem, held_out),
            problem.task,
            problem.metrics[0],
            seed=problem.options.seed,
            choice=result.choice,
            counts=counts,
        )


def _guests(problem: Any, held_out: FederatedData | None) -> FederatedData:
    """New clients in the form in which the run holds its own."""
    if held_out is None:
        if problem.held_out is None:
            raise HandspanError(
                "the run held no clients out: train it with --holdout-clients, or give new ones"
            )
        return problem.held_out
    if not problem.spec.chooses:
        held_out = held_out.pooled()
    return held_out.to(problem.setting.device, problem.setting.dtype)
