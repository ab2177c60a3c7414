"""What clients of span do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Model
from handspan.core.data import Batch, ClientData
from handspan.core.method import Setting
from handspan.core.records import Params, Record, map_tensors
from handspan.core.task import Task, value_and_grad
from handspan.numerics.averaging import parts
from handspan.numerics.label_prior import log_prior, shifted
from handspan.numerics.local_work import LocalWork
from handspan.numerics.low_rank import compose, outer_sums, weighted_sum
from handspan.numerics.mixture import nearest, sum_by_centre
from handspan.numerics.spanning.records import (
    Candidates,
    CutBroadcast,
    ServeBroadcast,
    SpanBroadcast,
    SpanClient,
    SpanServed,
    SpanSums,
    SpanUpload,
    SpanWorking,
)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run of span is made of: the task, and the settings in their final form."""

    task: Task
    names: tuple[str, ...]  # factorised parameters
    bias: str | None  # the parameter that takes the label prior
    width: int
    groups: int
    weight: Callable[[Tensor], Tensor]
    scaled: bool
    offset: bool
    damping: float
    average: float


class Fitting(Record):
    """A client on its way to its centre: losses of all centres on its rows."""

    inner: SpanWorking
    losses: Tensor  # (groups,) float64
    counts: Tensor  # (classes,) rows of each label


def extended(coordinates: Tensor) -> Tensor:
    """Coordinates with the offset's 1 in front."""
    return torch.cat([coordinates.new_ones(1), coordinates])


def mapped(client: SpanClient, b: SpanBroadcast) -> Tensor:
    """Coordinates after the cuts that the client has not seen."""
    v = client.coordinates
    for cut in range(len(b.matrices)):
        v = torch.where(client.seen <= cut, b.matrices[cut] @ v + b.shifts[cut], v)
    return v


class Clients:
    """The functions of clients, bound to one problem."""

    def __init__(self, setting: Setting, made: Parts) -> None:
        self.task, self.made, self.like = made.task, made, setting.scalar
        self.work: LocalWork = setting.work
        self.sgd = self.work.sgd

    # -- training ----------------------------------------------------------------------------

    def init(self, key: Tensor, data: ClientData) -> SpanClient:
        """v_i ~ N(0, I / r)."""
        width = self.made.width
        draw = keys.normal(keys.fold(data.key, "coordinates"), (width,)) / width**0.5
        zero = torch.zeros_like(data.num, device=self.like.device)
        return SpanClient(coordinates=draw.to(self.like), seen=zero, centre=zero)

    def begin(self, b: SpanBroadcast, client: SpanClient, data: ClientData) -> SpanWorking:
        """Start at the stored v, in today's coordinates."""
        return self.working(b, mapped(client, b)[: len(b.gram)], self.label_shift(data))

    def working(self, b: SpanBroadcast, v: Tensor, shift: Tensor | None) -> SpanWorking:
        """Return the working record at given coordinates."""
        zeros = {name: torch.zeros_like(rows[0]) for name, rows in b.basis.items()}
        return SpanWorking(
            coordinates=v,
            velocity=torch.zeros_like(v),
            fixed=extended(v),
            choice=torch.zeros_like(b.is_there),
            start=zeros,
            delta=zeros,
            body=b.body,
            buffers=b.buffers,
            shared_velocity=self.sgd.start({**zeros, **b.body}),
            shift=shift,
        )

    def label_shift(self, data: ClientData) -> Tensor | None:
        """Logarithms of the client's label frequencies, where the model can take them."""
        if self.made.bias is None:
            return None
        assert data.label_counts is not None
        return log_prior(data.label_counts, self.like, 1.0, 1.0, None)

    def told(self, params: Params, shift: Tensor | None, temperature: Tensor) -> Params:
        """Parameters that have been told the label frequencies."""
        if shift is None or self.made.bias is None:
            return params
        return shifted(params, self.made.bias, temperature * shift)

    def coordinate_step(self, b: SpanBroadcast, k: SpanWorking, batch: Batch) -> SpanWorking:
        """V <- v - eta (U^T U)^-1 U^T grad f_i."""
        _, _, gradient = value_and_grad(
            lambda v: self.task.loss(
                self.told({**k.body, **compose(b.basis, extended(v))}, k.shift, b.temperature),
                k.buffers,
                batch,
            ),
            k.coordinates,
        )
        moved, velocity = self.sgd.step(
            {"v": k.coordinates},
            {"v": b.inverse @ gradient},
            {"v": k.velocity},
            b.learning_rate,
        )
        return dataclasses.replace(
            k, coordinates=moved["v"], velocity=velocity.get("v", k.velocity)
        )

    def shrink(self, b: SpanBroadcast, k: SpanWorking) -> SpanWorking:
        """Find the nearest centre; body and basis learn with v shrunk to it."""
        choice = nearest(k.coordinates, b.means, b.is_there > 0, b.gram)
        centre = choice @ b.means
        fixed = extended(centre + b.own * (k.coordinates - centre))
        return dataclasses.replace(k, choice=choice, fixed=fixed, start=compose(b.basis, fixed))

    def shared_step(self, b: SpanBroadcast, k: SpanWorking, batch: Batch) -> SpanWorking:
        """One step on body and head: a step of the head on D, where U moves by D [1, v]^T."""
        v = k.fixed if self.made.offset else k.fixed[1:]  # what multiplies a part that moves
        scale = torch.ones_like(b.learning_rate) if self.made.scaled else v @ v
        head = {name: start + scale * k.delta[name] for name, start in k.start.items()}
        _, buffers, gradient = value_and_grad(
            lambda params: self.task.loss(
                self.told(params, k.shift, b.temperature), k.buffers, batch
            ),
            {**head, **k.body},
        )
        moved, velocity = self.sgd.step(
            {**k.delta, **k.body}, gradient, k.shared_velocity, b.learning_rate
        )
        delta, body = parts(moved, tuple(k.delta))
        return dataclasses.replace(
            k, delta=delta, body=body, buffers=buffers, shared_velocity=velocity
        )

    def kept(self, b: SpanBroadcast, k: SpanWorking) -> SpanClient:
        """Return the private record: all coordinates, and the cuts that it has seen."""
        missing = k.coordinates.new_zeros(self.made.width - len(k.coordinates))
        return SpanClient(
            coordinates=torch.cat([k.coordinates, missing]),
            seen=torch.full_like(k.choice.argmax(), len(b.matrices)),
            centre=k.choice.argmax(),
        )

    def end(
        self, b: SpanBroadcast, k: SpanWorking, data: ClientData
    ) -> tuple[SpanClient, SpanUpload]:
        """Keep the own v; upload the changes."""
        # All that is sent will be weighted; of centres, every client counts as one.
        weight = self.made.weight(data.num).to(k.choice.device)
        return self.kept(b, k), SpanUpload(
            delta=k.delta,
            fixed=k.fixed,
            coordinates=k.coordinates,
            choice=k.choice / weight,
            body=k.body,
            buffers=k.buffers,
        )

    def reduce(self, uploads: SpanUpload, weights: Tensor) -> SpanSums:
        """Sum over a block of clients; no stack of outer products is made."""
        own = torch.cat([uploads.fixed[:, :1], uploads.coordinates], 1)

        def products(v: Tensor) -> Tensor:
            v = v.to(torch.float64)
            return (v * weights.to(v.device).unsqueeze(1)).T @ v

        weights = weights.to(own.device)
        return SpanSums(
            products=outer_sums(uploads.delta, uploads.fixed, weights),
            moments=products(uploads.fixed),
            spread=products(own),
            centres=sum_by_centre(uploads.choice, uploads.coordinates, weights),
            body=weighted_sum(uploads.body, weights),
            buffers=weighted_sum(uploads.buffers, weights),
            weight=weights.sum(),
        )

    def wire(self, upload: SpanUpload) -> SpanSums:
        """Return what one client sends: its own summands."""
        one = map_tensors(lambda tensor: tensor.unsqueeze(0), upload)
        sums = self.reduce(one, torch.ones(1, dtype=torch.float64))
        return map_tensors(lambda tensor: tensor.to(self.like), sums)

    # -- candidates --------------------------------------------------------------------------

    def outputs(self, b: SpanBroadcast, k: Any, coordinates: Tensor, batch: Batch) -> list[Tensor]:
        """Outputs of the heads at ``coordinates`` (q, k); rows pass through the body once."""

        def one(v: Tensor) -> Tensor:
            head = compose(b.basis, extended(v))
            params = self.told({**b.body, **head}, k.shift, b.temperature)
            return self.task.predict(params, b.buffers, batch.x, batch.side)

        return list(torch.vmap(one)(coordinates).unbind(0))

    def refit(self, b: CutBroadcast, k: Candidates, batch: Batch) -> Candidates:
        """One scaled step of every candidate's coordinates."""
        inner = b.inner

        def total(coordinates: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            def one(v: Tensor) -> Tensor:
                head = compose(inner.basis, extended(v))
                params = self.told({**inner.body, **head}, k.shift, inner.temperature)
                return self.task.loss(params, inner.buffers, batch)[0]

            return torch.vmap(one)(coordinates).sum(), {}

        _, _, gradient = value_and_grad(total, k.coordinates)
        step = (b.inverses @ gradient.unsqueeze(2)).squeeze(2)
        return dataclasses.replace(k, coordinates=k.coordinates - inner.learning_rate * step)

    # -- serving -----------------------------------------------------------------------------

    def start_fitting(self, b: ServeBroadcast, v: Tensor, shift: Tensor | None) -> Fitting:
        """Begin to look for the centre that fits."""
        losses = torch.zeros_like(b.share, dtype=torch.float64)
        classes = self.task.num_outputs if self.made.bias is not None else 1
        counts = torch.zeros(classes).to(self.like)
        return Fitting(inner=self.working(b.inner, v, shift), losses=losses, counts=counts)

    def fit_centres(self, b: ServeBroadcast, k: Fitting, batch: Batch) -> Fitting:
        """Add up the losses of all centres."""
        assert batch.y is not None
        every = self.outputs(b.inner, k.inner, b.inner.means, batch)
        losses = [
            (self.task.row_loss(outputs, batch.y) * batch.weight).double().sum()
            for outputs in every
        ]
        return dataclasses.replace(k, losses=k.losses + torch.stack(losses))

    def chosen(self, b: ServeBroadcast, k: Fitting) -> tuple[Tensor, Tensor]:
        """One-hot centre of the largest posterior, and its coordinates."""
        # All rows speak together: sums of losses are logarithms of likelihoods.
        score = (k.losses.to(torch.float64) - b.share.double()) * 1e9
        best = score.round().nan_to_num(nan=torch.inf, posinf=torch.inf).argmin()
        choice = (torch.arange(len(b.share), device=best.device) == best).to(self.like)
        return choice, choice @ b.inner.means

    def settle(self, b: ServeBroadcast, k: Fitting, data: ClientData) -> tuple[SpanClient, None]:
        """Shrink the client's v to the centre that fits its rows."""
        choice, centre = self.chosen(b, k)
        v = centre + b.inner.own * (k.inner.coordinates - centre)
        # Without rows nothing fits. The counts stay on the CPU.
        v = torch.where((data.num > 0).to(v.device), v, k.inner.coordinates)
        settled = dataclasses.replace(k.inner, coordinates=v, choice=choice)
        return self.kept(b.inner, settled), None

    def count_labels(self, b: ServeBroadcast, k: Fitting, batch: Batch) -> Fitting:
        """Count the labels of all rows that are the client's own."""
        assert batch.y is not None
        classes = torch.arange(len(k.counts), device=batch.y.device)
        y = batch.y.reshape(len(batch.weight), -1, 1)
        found = (y == classes).to(self.like) * batch.weight.view(-1, 1, 1)
        return dataclasses.replace(k, counts=k.counts + found.sum((0, 1)))

    def served(self, b: ServeBroadcast, k: Fitting, data: ClientData) -> tuple[SpanServed, None]:
        """Return what the model is made of."""
        shift = None
        if self.made.bias is not None:
            shift = log_prior(k.counts, self.like, 1.0, 1.0, None)
        centre = k.inner.choice.argmax()
        return SpanServed(coordinates=k.inner.coordinates, shift=shift, centre=centre), None

    def model(self, b: ServeBroadcast, c: SpanServed) -> Model:
        """Return head U [1, v], the body, and the label prior."""
        inner = b.inner
        params = {**inner.body, **compose(inner.basis, extended(c.coordinates))}
        return Model(params=self.told(params, c.shift, inner.temperature), buffers=inner.buffers)
