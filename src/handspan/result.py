"""What a run leaves in your hands: scores, models of single clients, and service for new ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm, Model
from handspan.core.data import FederatedData
from handspan.core.errors import HandspanError
from handspan.core.federation import RunState
from handspan.core.records import take
from handspan.simulation.engine import EngineChoice, num_threads
from handspan.simulation.federation import Simulation, personal_outputs
from handspan.simulation.loop import select_fields


@dataclass(frozen=True, kw_only=True)
class Served:
    """One client, ready to be asked: its personal phases have run."""

    algorithm: Algorithm
    task: Any
    broadcast: Any
    client: Any
    side: Tensor | None

    @property
    def model(self) -> Model:
        """Parameters of its model."""
        if self.algorithm.model is None:
            raise HandspanError(
                f"{self.algorithm.name} serves no single model, it mixes the outputs of several: "
                "ask for predictions"
            )
        return self.algorithm.model(self.broadcast, self.client)

    def outputs(self, rows: Tensor) -> Tensor:
        """Outputs for rows that are scaled as the training rows were."""
        with torch.no_grad():
            return personal_outputs(
                self.algorithm, self.task, self.broadcast, self.client, rows, self.side
            )


@dataclass(frozen=True, kw_only=True)
class AdaptedClient:
    """A client that took no part in training, with its fitted model."""

    _served: Served
    _transform: Any

    @property
    def model(self) -> Model:
        """Its parameters."""
        return self._served.model

    def predict(self, x: Any) -> Tensor:
        """Outputs for rows given as they stand in the source."""
        return self._served.outputs(self._transform(x))


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished (or interrupted) run.

    Attributes
    ----------
    summary
        Scores and costs, as in ``summary.json``.
    history
        One entry per evaluation.
    clients
        One column per score, one entry per client.
    state, simulation, problem, choice, config
        The run itself, for those who go on with it.
    """

    summary: dict[str, Any]
    history: list[dict[str, Any]]
    clients: dict[str, Any]
    state: RunState
    simulation: Simulation
    problem: Any
    choice: EngineChoice
    config: dict[str, Any]

    def __repr__(self) -> str:
        lead = next(
            (k for k in self.summary if k.startswith("personal_") and k.endswith("_mean")), None
        )
        score = (
            ""
            if lead is None or self.summary[lead] is None
            else (f", {lead} {self.summary[lead]:.4f}")
        )
        return f"Result({self.summary['method']!r}, {self.summary['rounds']} rounds{score})"

    def personal_model(self, client: int) -> Model:
        """Parameters of the model that serves a client."""
        self._check(client)
        return self._served(self.simulation, client).model

    def predict(self, client: int, x: Any) -> Tensor:
        """Outputs of a client's model for rows given as they stand in the source."""
        self._check(client)
        with num_threads(self.choice.threads):
            return self._served(self.simulation, client).outputs(self.transform(x))

    def transform(self, x: Any) -> Tensor:
        """Scale rows as the training rows were scaled."""
        from handspan.data import apply_transform

        if isinstance(x, Tensor) and not self.problem.data.info:
            rows = x
        else:
            rows = apply_transform(self.problem.data.info, np.asarray(x))
        if tuple(rows.shape[1:]) != self.problem.data.row_shape:
            raise HandspanError(
                f"rows of shape {tuple(rows.shape[1:])} do not fit: the run has "
                f"{self.problem.data.row_shape}"
            )
        dtype = self.problem.setting.dtype if rows.is_floating_point() else rows.dtype
        return rows.to(self.problem.setting.device, dtype)

    def labels(self, y: Any, num_rows: int) -> Tensor:
        """Check labels as they stand in the source, and bring them to the run's type."""
        from handspan.data.inputs import as_array, as_labels

        data = self.problem.data
        given = as_array(y, "y")
        wanted = (num_rows, *data.y.shape[1:])
        if given.shape != wanted:
            raise HandspanError(f"y has shape {given.shape}, and the rows need {wanted}")
        if data.num_classes is None:
            given, _ = as_labels(given, num_rows, "regression")
            return torch.from_numpy(given.astype("float64")).to(data.y)
        flat = given.reshape(-1)  # every position of a sequence is a label
        flat, _ = as_labels(flat, len(flat), "classification", data.num_classes)
        return torch.from_numpy(flat).reshape(given.shape).to(data.y)

    def adapt(self, x: Any, y: Any, *, side: Any = None, steps: int | None = None) -> AdaptedClient:
        """Fit a new client's private part on its rows; the shared part stays as it is.

        Parameters
        ----------
        x, y
            The client's rows and labels, as they stand in the source.
        side
            Its side information, where the method reads it: numbers, or for a table's columns a
            mapping from their names to values.
        steps
            Steps of the fit; the run's ``adapt_steps`` by default.
        """
        problem = self.problem
        if problem.task is None:
            raise HandspanError(f"{problem.spec.method.name} serves no new clients yet")
        rows = self.transform(x)
        labels = self.labels(y, len(rows))
        count = torch.tensor([len(rows)])
        none = torch.tensor([0])
        side_row = self._side_row(side, rows)
        guest = FederatedData(
            x=rows,
            y=labels,
            offsets=torch.tensor([0, len(rows)]),
            num_train=count,
            num_validation=none,
            num_test=none,
            side=side_row,
            num_classes=problem.data.num_classes,
        )
        algorithm = self.algorithm(steps)
        simulation = Simulation(
            algorithm,
            guest,
            seed=keys.seed_of(keys.key(problem.options.seed, "new client")),
            engine="loop",
        )
        only = torch.tensor([0])
        with num_threads(self.choice.threads):
            simulation.adapt(self.state.server, only, self.state.round)
            served = self._served(simulation, 0)
        return AdaptedClient(_served=served, _transform=self.transform)

    def algorithm(self, steps: int | None = None) -> Algorithm:
        """Return the method; with ``steps``, one whose new clients fit their part with so many."""
        problem = self.problem
        if steps is None:
            return problem.algorithm
        if steps < 1:
            raise HandspanError(f"steps must be at least 1, not {steps}")
        work = dataclasses.replace(problem.setting.work, adapt_steps=steps)
        return problem.spec.build(dataclasses.replace(problem.setting, work=work))

    def _side_row(self, side: Any, rows: Tensor) -> Tensor | None:
        known = self.problem.data.side
        if known is None or not self.problem.spec.method.needs_side:
            return None
        from handspan.data.side import new_side

        side = new_side(self.problem.data.info, side, rows, known.shape[1])
        if side is None:
            raise HandspanError(
                f"a new client needs its side information: {known.shape[1]} numbers"
            )
        from handspan.data.inputs import as_array, as_rows, check_finite

        row = as_rows(as_array(side, "side").reshape(1, -1), "side")
        check_finite(row, "side")
        if row.shape[1] != known.shape[1]:
            raise HandspanError(
                f"side information has {known.shape[1]} numbers, not {row.shape[1]}"
            )
        return torch.from_numpy(row.astype("float64")).to(known)

    def _served(self, simulation: Simulation, client: int) -> Served:
        algorithm, side = simulation.algorithm, simulation.data.side
        if algorithm.model is None and algorithm.predict is None:
            raise HandspanError(f"{algorithm.name} has no personal models")
        ids, per_client = torch.tensor([client]), algorithm.serving[2]
        for _, broadcast, mine in simulation.serve(self.state.server, ids, self.state.round):
            return Served(
                algorithm=algorithm,
                task=self.problem.task,
                broadcast=select_fields(broadcast, per_client, lambda field: take(field, 0)),
                client=take(mine, 0),
                side=None if side is None else side[client],
            )
        raise AssertionError("a served client is always in a block")

    def _check(self, client: int) -> None:
        count = self.problem.data.num_clients
        if not 0 <= client < count:
            raise HandspanError(f"there is no client {client}: they are numbered 0..{count - 1}")

    def save(self, folder: str | Path) -> Path:
        """Write the run to a folder of its own, as ``--out`` would have."""
        from handspan.runs import RunFolder

        target = RunFolder(folder)
        target.create(
            {
                **self.config,
                "engine": self.choice.description(self.problem.setting.device),
            }
        )
        target.save(self.state, self.simulation.store)
        target.append_timing(
            {
                "round": self.state.round,
                "seconds": self.summary["seconds"],
                "seconds_total": self.summary["seconds_total"],
            }
        )
        target.write_clients(self.clients)
        target.write_summary(self.summary)
        return target.path
