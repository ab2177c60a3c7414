"""+prior: the client's own label frequencies, as logarithms added to the logits it is served.

Under label shift the clients differ in P_i(y) alone, and the best personal model is the shared one
with the logits

    z(y) + log p_i(y) - log p(y),    p_i(y) = (n_i(y) + s C p(y)) / (n_i + s C)

for n_i(y) training rows of class y, C classes, strength s and a reference p: uniform, or the
frequencies over all clients. It is a closed form of the client's own labels: nothing is trained or
sent, and a new client has it at once. With balanced training the same term stands inside the
training loss, so that the shared model learns what is left when frequencies are told.

References
----------
    [1] Ren et al.: Balanced Meta-Softmax for Long-Tailed Visual Recognition. NeurIPS 2020.
        arXiv:2007.10740. (The prior in the training loss.)
    [2] Saerens, Latinne, Decaestecker: Adjusting the Outputs of a Classifier to New a Priori
        Probabilities. Neural Computation 14 (2002). (The correction.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm, Model, Phase, Reduced
from handspan.core.data import Batch, ClientData, Round
from handspan.core.errors import HandspanError
from handspan.core.method import Setting
from handspan.core.records import Empty, Params, Record
from handspan.core.task import Task
from handspan.numerics.carrying import carrying

Shift = Callable[[ClientData, Tensor | None], Tensor]


class PriorClient(Record):
    """What the method serves with, and the client's term of the logits; never stored."""

    client: Any
    shift: Tensor  # (classes,)


class PriorServer(Record):
    """The method's record, and the labels of all clients, counted."""

    inner: Any
    counts: Tensor  # (classes,) float64


class PriorBroadcast(Record):
    """Label frequencies over all clients, where they are the reference."""

    reference: Tensor | None


class LabelCounts(Record):
    """How many training rows of each class the client has."""

    counts: Tensor  # (classes,)


def log_prior(
    counts: Tensor, like: Tensor, strength: float, temperature: float, reference: Tensor | None
) -> Tensor:
    """Return the term of the logits, in the type of ``like``; 0 where nothing is known."""
    counts = counts.to(like)
    if reference is None:
        reference = torch.full_like(counts, 1 / len(counts))
    pseudo = strength * len(counts)
    frequency = (counts + pseudo * reference) / (counts.sum() + pseudo)
    return temperature * (frequency.log() - reference.log())


class PriorTask(Task):
    """A task that, inside ``using``, adds a client's term to the logits of all models.

    Methods know nothing of it: whatever loss or prediction they ask for has it inside.
    """

    def __init__(self, task: Task, bias: str) -> None:
        self.head, self.kind, self.names = task.head, task.kind, task.names
        self.num_outputs, self.needs_side = task.num_outputs, task.needs_side
        self._task, self._bias = task, bias
        self._shift: Tensor | None = None

    @contextmanager
    def using(self, shift: Tensor) -> Generator[None]:
        """Add a term to all logits while a client's function runs."""
        before, self._shift = self._shift, shift
        try:
            yield
        finally:
            self._shift = before

    def init(self, key: Tensor) -> tuple[Params, Params]:
        """As the task itself."""
        return self._task.init(key)

    def loss(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Mean training loss with the term in the logits."""
        return self._task.loss(self._shifted(params), buffers, batch)

    def predict(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Logits with the term."""
        return self._task.predict(self._shifted(params), buffers, x, side)

    def features(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """As the task itself."""
        return self._task.features(params, buffers, x, side)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """As the task itself: the outputs have the term already."""
        return self._task.row_loss(outputs, y)

    def _shifted(self, params: Params) -> Params:
        return params if self._shift is None else shifted(params, self._bias, self._shift)


def shifted(params: Params, bias: str, shift: Tensor) -> Params:
    """Return parameters whose logits are larger by ``shift``."""
    return {**params, bias: params[bias] + shift}


def output_bias(setting: Setting) -> str:
    """Name of the parameter that is added to the logits, tried out rather than believed."""
    task = setting.model
    if task.kind != "classification":
        raise HandspanError("+prior needs class labels: regression has no label frequencies")
    params, buffers = task.init(keys.key(0))
    shape = (task.num_outputs,)
    for name in task.head:
        if tuple(params[name].shape) == shape and _is_added(setting, params, buffers, name):
            return name
    raise HandspanError(
        "+prior adds to the bias of the model's last layer, and the head of this model "
        f"({', '.join(task.head)}) has none that is added to the logits as it is"
    )


def _is_added(setting: Setting, params: Params, buffers: Params, name: str) -> bool:
    """Whether logits move with the parameter, up to a constant in each row."""
    task = setting.model
    if task.needs_side:  # nobody knows yet how wide the side information is
        return True
    x, shift = torch.zeros(2, *setting.row_shape), torch.linspace(-1, 1, task.num_outputs)
    shift = shift.to(params[name])
    moved = shifted(params, name, shift)
    for dtype in (setting.dtype, torch.int64):
        rows = x.to(setting.device, dtype)
        try:
            with torch.no_grad():
                change = task.predict(moved, buffers, rows, None)
                change = change - task.predict(params, buffers, rows, None) - shift
        except (RuntimeError, TypeError):  # a model of words takes whole numbers
            continue
        return float((change - change.mean(-1, keepdim=True)).abs().max()) < 1e-3
    return True


def with_prior_in_task(setting: Setting) -> Setting:
    """Return the setting for balanced training."""
    return dataclasses.replace(setting, task=PriorTask(setting.model, output_bias(setting)))


def with_prior(
    algorithm: Algorithm,
    setting: Setting,
    *,
    strength: float = 1.0,
    temperature: float = 1.0,
    reference: str = "uniform",
    training: str = "plain",
) -> Algorithm:
    """Return the method with the label prior in the models it serves.

    Parameters
    ----------
    strength
        Rows of each class that every client is granted beside its own.
    temperature
        Factor of the term; 0 leaves the method as it is.
    reference
        ``uniform``, or ``pooled``: the label frequencies over all clients, a sum sent once.
    training
        ``plain``, or ``balanced``: the term also stands in the loss of every stage. The method
        must have been built for the setting of ``with_prior_in_task``.
    """
    if algorithm.per_row:
        raise HandspanError(f"+prior does not compose with {algorithm.name}")
    bias = output_bias(setting)
    like = setting.scalar

    def shift(data: ClientData, reference: Tensor | None) -> Tensor:
        assert data.label_counts is not None
        return log_prior(data.label_counts, like, strength, temperature, reference)

    if training == "balanced":
        algorithm = _balanced(algorithm, setting.model, shift)
    algorithm = _served(algorithm, bias, shift)
    return _with_pooled_counts(algorithm, setting) if reference == "pooled" else algorithm


def _balanced(algorithm: Algorithm, task: Task, shift: Shift) -> Algorithm:
    """Let all phases run with the client's term inside the task."""
    assert isinstance(task, PriorTask)

    def lifted(phase: Phase) -> Phase:
        return carrying(
            phase,
            enter=lambda client, data: (client, shift(data, None)),
            leave=lambda client, kept: client,
            inside=task.using,
        )

    return dataclasses.replace(
        algorithm,
        setup=tuple(map(lifted, algorithm.setup)),
        rounds=tuple(map(lifted, algorithm.rounds)),
        personal=tuple(map(lifted, algorithm.personal)),
        adapt=None if algorithm.adapt is None else lifted(algorithm.adapt),
    )


def _served(algorithm: Algorithm, bias: str, shift: Shift) -> Algorithm:
    """Add the term to what is served, as the last personal phase."""
    model, predict, cluster = algorithm.model, algorithm.predict, algorithm.cluster

    def end(b: PriorBroadcast, client: Any, data: ClientData) -> tuple[PriorClient, None]:
        return PriorClient(client=client, shift=shift(data, b.reference)), None

    def shifted_model(b: Any, c: PriorClient) -> Model:
        assert model is not None
        served = model(b, c.client)
        return Model(params=shifted(served.params, bias, c.shift), buffers=served.buffers)

    def shifted_outputs(b: Any, c: PriorClient, x: Any, side: Any) -> Tensor:
        assert predict is not None
        return predict(b, c.client, x, side) + c.shift

    phase = Phase(
        name="prior",
        broadcast=lambda server, round: PriorBroadcast(reference=None),
        begin=lambda b, client, data: client,
        end=end,
    )
    return dataclasses.replace(
        algorithm,
        name=f"{algorithm.name}+prior",
        personal=(*algorithm.personal, phase),
        model=None if model is None else shifted_model,
        predict=None if predict is None else shifted_outputs,
        cluster=None if cluster is None else lambda c: cluster(c.client),
        needs_label_counts=True,
    )


def _with_pooled_counts(algorithm: Algorithm, setting: Setting) -> Algorithm:
    """Let the clients' label counts be summed before the first round, as the reference."""
    zeros = torch.zeros(setting.model.num_outputs, dtype=torch.float64, device=setting.device)

    def lifted(phase: Phase) -> Phase:
        combine = phase.combine
        return dataclasses.replace(
            phase,
            broadcast=lambda server, round: phase.broadcast(server.inner, round),
            when=lambda server, round: phase.when(server.inner, round),
            combine=None
            if combine is None
            else lambda server, reduction, round: dataclasses.replace(
                server, inner=combine(server.inner, reduction, round)
            ),
        )

    def reference(server: PriorServer, round: Round) -> PriorBroadcast:
        known = server.counts + 1  # no class is impossible
        return PriorBroadcast(reference=(known / known.sum()).to(setting.scalar))

    *personal, prior = algorithm.personal
    deploy, unbatched, per_client = algorithm.serving
    shared = algorithm.shared_model
    return dataclasses.replace(
        algorithm,
        init_server=lambda key, population: PriorServer(
            inner=algorithm.init_server(key, population), counts=zeros
        ),
        setup=(_counting(setting), *map(lifted, algorithm.setup)),
        rounds=tuple(map(lifted, algorithm.rounds)),
        personal=(*map(lifted, personal), dataclasses.replace(prior, broadcast=reference)),
        adapt=None if algorithm.adapt is None else lifted(algorithm.adapt),
        deploy=lambda server, round: deploy(server.inner, round),
        deploy_unbatched=unbatched,
        deploy_per_client=per_client,
        shared_model=None if shared is None else lambda server: shared(server.inner),
        done=lambda server: algorithm.done(server.inner),
        describe=lambda server: algorithm.describe(server.inner),
    )


def _counting(setting: Setting) -> Phase:
    """Count the labels of all clients: the server needs the sum alone."""

    def end(b: Empty, client: Any, data: ClientData) -> tuple[Any, LabelCounts]:
        assert data.label_counts is not None
        return client, LabelCounts(counts=data.label_counts.to(setting.scalar))

    def combine(server: PriorServer, reduction: Reduced, round: Round) -> PriorServer:
        return PriorServer(inner=server.inner, counts=reduction.total.counts)

    return Phase(
        name="count_labels",
        broadcast=lambda server, round: Empty(),
        begin=lambda b, client, data: client,
        end=end,
        combine=combine,
        computes="all",
        uploads="all",
        infers="the client's label counts, unless only the sum is shown",
    )
