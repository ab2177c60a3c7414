"""The evaluation protocol: one for all methods, and no way to pick the best round on test rows.

Scored are the models that would be served after the last aggregation: the personal model of every
client, and the global model where the method has one. Each metric is averaged over clients and
pooled over rows; the worst tenth of the clients is shown beside the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from handspan.core.data import FederatedData
from handspan.core.records import tensors
from handspan.evaluation.metrics import Metric, worst_decile
from handspan.simulation.federation import Simulation


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores of one moment of a run.

    Attributes
    ----------
    summary
        Means, pooled values and the worst decile, by name.
    clients
        One column per score, one entry per client.
    """

    summary: dict[str, float | None]
    clients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def test_rows(data: FederatedData, ids: Tensor, rows: str) -> tuple[Tensor, Tensor]:
    """Labels of a split, client after client, and where each client begins."""
    first, count = (part[ids] for part in data.span(rows))  # type: ignore[arg-type]
    offsets = torch.cat([count.new_zeros(1), count.cumsum(0)])
    start = torch.repeat_interleave(data.offsets[ids] + first - offsets[:-1], count)
    assert data.y is not None
    return data.y[(start + torch.arange(len(start))).to(data.y.device)], offsets


def evaluate(
    simulation: Simulation,
    server: Any,
    index: int,
    task: Any,
    metrics: list[Metric],
    *,
    rows: str = "test",
) -> Evaluation:
    """Score personal and global models on a split of all clients."""
    algorithm, data = simulation.algorithm, simulation.data
    ids = torch.arange(data.num_clients)
    if algorithm.model is None and algorithm.predict is None:
        return _evaluate_matrix(simulation, server, index)
    y, offsets = test_rows(data, ids, rows)
    personal = torch.cat(
        [outputs for _, outputs in simulation.predictions(server, ids, index, task, rows)]
    )
    shared = None
    if algorithm.shared_model is not None:
        if not algorithm.personal and not tensors(simulation.store.template):
            shared = personal  # nothing personal: the served model is the global one
        else:
            shared = torch.cat(
                [outputs for _, outputs in simulation.shared_predictions(server, ids, task, rows)]
            )
    summary: dict[str, float | None] = {}
    clients: dict[str, Tensor] = {}
    for position, metric in enumerate(metrics):
        values = metric.per_client(personal, y, offsets).cpu()
        clients[f"personal_{metric.name}"] = values
        summary[f"personal_{metric.name}_mean"] = _mean(values)
        summary[f"personal_{metric.name}_pooled"] = metric.pooled(personal, y)
        summary[f"global_{metric.name}_pooled"] = None
        if shared is not None:
            clients[f"global_{metric.name}"] = metric.per_client(shared, y, offsets).cpu()
            summary[f"global_{metric.name}_pooled"] = metric.pooled(shared, y)
        if position == 0:
            summary["worst_decile"] = worst_decile(values, metric.higher_is_better)
    summary.update(algorithm.describe(server))
    summary.update(_clusters(simulation, server, index))
    return Evaluation(summary=summary, clients=clients)


def _mean(values: Tensor) -> float | None:
    """Mean over the clients for which the metric is defined; None where it is not finite."""
    known = values[~values.isnan()]
    mean = float(known.mean()) if len(known) else float("nan")
    return mean if abs(mean) < float("inf") else None


def found_groups(simulation: Simulation, server: Any, index: int) -> Tensor | None:
    """Group of each client, for methods that find groups."""
    cluster = simulation.algorithm.cluster
    if cluster is None:
        return None
    ids = torch.arange(simulation.data.num_clients)
    blocks = simulation.serve(server, ids, index)
    return torch.cat([torch.vmap(cluster)(clients) for _, _, clients in blocks]).cpu()


def _clusters(simulation: Simulation, server: Any, index: int) -> dict[str, float]:
    """How many groups a clustering method uses, and how well they are the planted ones."""
    found = found_groups(simulation, server, index)
    if found is None:
        return {}
    result = {"num_groups": float(len(found.unique()))}
    if simulation.data.groups is not None:
        from sklearn.metrics import adjusted_rand_score

        result["ari"] = float(adjusted_rand_score(simulation.data.groups.numpy(), found.numpy()))
    return result


def _evaluate_matrix(simulation: Simulation, server: Any, index: int) -> Evaluation:
    """Objective, and with labels how well the components are the classes."""
    from handspan.evaluation.clustering import clustering_scores

    algorithm, data = simulation.algorithm, simulation.data
    summary: dict[str, float | None] = dict(algorithm.describe(server))
    if algorithm.labels is None or data.y is None or data.num_classes is None:
        return Evaluation(summary=summary)
    ids = torch.arange(data.num_clients)
    found = simulation.row_labels(server, ids, index).cpu()
    y, _ = test_rows(data, ids, "train")
    summary.update(clustering_scores(y.cpu(), found))
    return Evaluation(summary=summary)
