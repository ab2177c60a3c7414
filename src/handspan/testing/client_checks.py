"""Checks of the contract that look at single clients: what their functions take and give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from handspan.core import keys
from handspan.core.algorithm import Algorithm, Model, Phase, client_update
from handspan.core.data import Batch
from handspan.core.records import Record, field_names, stack, take, tensors, to_named
from handspan.numerics.local_work import LocalWork
from handspan.simulation.loop import select_fields
from handspan.testing.case import Case, compare
from handspan.testing.playing import (
    Exchange,
    batches_of,
    in_blocks,
    named_result,
    take_pair,
    watched,
)

_HUGE = 1e30


def types_are_as_declared(case: Case) -> None:
    """1. All functions are there, their results are records, and no shape ever changes."""
    algorithm, (_, server, simulation) = case.algorithm, case.watched
    assert isinstance(algorithm, Algorithm), "build must return an Algorithm"
    assert algorithm.rounds, "there must be at least one phase in rounds"
    assert isinstance(server, Record), "the server record must be a Record"
    first = algorithm.init_server(keys.key(case.seed, "init"), simulation.population)
    assert _form(first) == _form(server), "the server record changes its form in the run"
    everyone = torch.arange(case.made.data.num_clients)
    initial = simulation.initial(everyone)
    assert isinstance(initial, Record), "the private record must be a Record"
    unknown = algorithm.per_row - set(field_names(type(initial)))
    assert not unknown, f"per_row names no field of the private record: {sorted(unknown)}"
    for tensor in tensors(initial):
        assert len(tensor) == len(everyone), "init_client must return one row for each client"
    for exchange in case.exchanges:
        _check_phase(case, exchange)
    if algorithm.model is not None:
        _check_models(case, server)


def _check_phase(case: Case, exchange: Exchange) -> None:
    phase = exchange.phase
    what = f"phase {phase.name!r}"
    assert isinstance(exchange.broadcast, Record), f"{what}: a broadcast must be a Record"
    known = set(field_names(type(exchange.broadcast)))
    unknown = (phase.per_client | phase.unbatched) - known
    assert not unknown, f"{what}: the broadcast has no field {sorted(unknown)}"
    received, client, about = exchange.one(case.algorithm, exchange.probe)
    working = phase.begin(received, client, about)
    assert isinstance(working, Record), f"{what}: begin must return a Record"
    form = _form(working)

    def steady(stage: Any) -> Any:
        def step(b: Any, k: Any, batch: Batch) -> Any:
            after = stage.step(b, k, batch)
            assert _form(after) == form, f"{what}: a step changed the form of the working record"
            return after

        return dataclasses.replace(stage, step=step)

    checked = dataclasses.replace(phase, stages=tuple(map(steady, phase.stages)))
    state, upload = dataclasses.replace(exchange, phase=checked).update(
        case.algorithm, case.made.data, exchange.probe, case.seed
    )
    assert isinstance(state, Record), f"{what}: end must return a private record"
    if exchange.kind != "personal":
        assert _form(state) == _form(client), f"{what}: the private record changes its form"
    if not exchange.uploads:
        is_silent = upload is None or not to_named(upload)
        assert is_silent, f"{what}: uploads, though nothing combines it"
        return
    assert isinstance(upload, Record), f"{what}: an upload must be a Record"
    wired = upload if phase.wire is None else phase.wire(upload)
    assert isinstance(wired, Record), f"{what}: what is sent must be a Record"
    for name, tensor in [*to_named(upload).items(), *to_named(wired).items()]:
        assert tensor.is_floating_point(), f"{what}: the upload {name} is {tensor.dtype}"
    assert _form(exchange.after) == _form(exchange.before), f"{what}: combine changes the server"


def _check_models(case: Case, server: Any) -> None:
    algorithm, task = case.algorithm, case.made.setting.task
    assert algorithm.model is not None and task is not None
    simulation = case.watched[2]
    _, unbatched, per_client = algorithm.serving
    for ids, broadcast, mine in simulation.serve(server, torch.arange(3), 2):
        assert unbatched | per_client <= set(field_names(type(broadcast))), "deploy lacks fields"
        for j in range(len(ids)):
            received = select_fields(broadcast, per_client, lambda f, j=j: take(f, j))
            model = algorithm.model(received, take(mine, j))
            _check_model(model, task)
    if algorithm.shared_model is not None:
        _check_model(algorithm.shared_model(server), task)


def _check_model(model: Any, task: Any) -> None:
    assert isinstance(model, Model), "model must return a Model"
    params, buffers = task.init(keys.key(0))
    wanted = Model(params=params, buffers=buffers)
    assert _form(model) == _form(wanted), "the served model has other parameters than the task"


def inactive_steps_change_nothing(case: Case) -> None:
    """2. A client that has finished is untouched while others of its block still work."""
    passes = dataclasses.replace(
        case.work or LocalWork(learning_rate=0.2, adapt_steps=2),
        steps=None,
        epochs=1,
        batch_size=2,
    )
    ragged = Case(case.spec, work=passes, seed=case.seed)
    algorithm, data = ragged.algorithm, ragged.made.data
    seen, *_ = watched(algorithm, data, rounds=1, cohort=4, seed=case.seed)
    executor = ragged.simulation("stacked").executor
    for exchange in seen:
        together = in_blocks(algorithm, data, exchange, executor, case.seed)
        for j, i in enumerate(exchange.ids.tolist()):
            alone = exchange.update(algorithm, data, j, case.seed)
            wanted = named_result(algorithm, alone, int(exchange.about.num[j]))
            message = f"phase {exchange.phase.name!r}: a client in a block is not as alone"
            compare(together[i], wanted, 1e-10, message)


def padding_is_invisible(case: Case) -> None:
    """3. Rows of weight 0 change nothing, whatever they hold; run under ``vmap``, as in blocks."""
    algorithm, data = case.algorithm, case.made.data
    num_classes = data.num_classes

    def spoil(batch: Batch) -> Batch:
        """Append two rows of weight 0: enormous, and with other labels."""
        x = batch.x if isinstance(batch.x, Tensor) else batch.x.to_dense()
        last, y = torch.zeros(2, dtype=torch.int64), batch.y
        if y is not None:
            others = (y[last] + 1) % num_classes if num_classes else y[last] + _HUGE
            y = torch.cat([y, others])
        return Batch(
            x=torch.cat([x, torch.full_like(x[last], _HUGE)]),
            y=y,
            weight=torch.cat([batch.weight, batch.weight.new_zeros(2)]),
            key=batch.key,
            rows=torch.cat([batch.rows, batch.rows[last]]),
            side=batch.side,
        )

    for exchange in case.exchanges:
        phase, j = exchange.phase, exchange.probe
        received, client, about = exchange.one(algorithm, j)
        index, i = int(exchange.round.index), int(exchange.ids[j])
        make = batches_of(data, phase, i, about, round=index, seed=case.seed, change=spoil)
        spoiled = [list(make(n, stage)) for n, stage in enumerate(phase.stages)]

        def update(b: Any, c: Any, a: Any, batches: Any, phase: Phase = phase) -> list[Any]:
            result = client_update(phase, b, c, a, lambda at, stage: batches[at])
            return [part for part in result if part is not None]

        grown = select_fields(
            client, algorithm.per_row, lambda f: torch.cat([f, torch.full_like(f[[0, 0]], 7.0)])
        )
        arguments = pytree.tree_map(
            lambda t: torch.stack([t, t]), (received, grown, about, spoiled)
        )
        got = take_pair(torch.vmap(update, randomness="error")(*arguments), 1)
        wanted = exchange.update(algorithm, data, j, case.seed)
        rows = int(about.num)
        message = f"phase {phase.name!r}: rows of weight 0 show"
        compare(
            named_result(algorithm, got, rows), named_result(algorithm, wanted, rows), 1e-9, message
        )


def inputs_stay_as_they_are(case: Case) -> None:
    """4. No function writes into its arguments."""
    algorithm, data = case.algorithm, case.made.data
    _, server, simulation = case.watched

    def guard(function: Callable[..., Any], *arguments: Any, name: str) -> Any:
        flat: list[Tensor] = pytree.tree_leaves(arguments)
        versions, copies = [t._version for t in flat], [t.clone() for t in flat]
        result = function(*arguments)
        for tensor, version, copy in zip(flat, versions, copies, strict=True):
            is_same = tensor._version == version and _same_bits(tensor, copy)
            assert is_same, f"{name} writes into its arguments"
        return result

    for exchange in case.exchanges:
        phase, what = exchange.phase, f"phase {exchange.phase.name!r}"
        guard(phase.broadcast, exchange.before or server, exchange.round, name=f"{what}: broadcast")
        received, client, about = exchange.one(algorithm, exchange.probe)
        index, i = int(exchange.round.index), int(exchange.ids[exchange.probe])
        make = batches_of(data, phase, i, about, round=index, seed=case.seed)
        working = guard(phase.begin, received, client, about, name=f"{what}: begin")
        for n, stage in enumerate(phase.stages):
            for batch in make(n, stage):
                working = guard(stage.step, received, working, batch, name=f"{what}: stage {n}")
            if stage.finish is not None:
                working = guard(stage.finish, received, working, name=f"{what}: finish {n}")
        _, upload = guard(phase.end, received, working, about, name=f"{what}: end")
        if not exchange.uploads:
            continue
        if callable(phase.reduce):
            weights = torch.ones(2, dtype=torch.float64)
            guard(phase.reduce, stack([upload, upload]), weights, name=f"{what}: reduce")
        guard(
            phase.combine,
            exchange.before,
            exchange.reduction,
            exchange.round,
            name=f"{what}: combine",
        )
    if algorithm.model is not None:
        for _, broadcast, mine in simulation.serve(server, torch.arange(1), 2):
            _, _, per_client = algorithm.serving
            received = select_fields(broadcast, per_client, lambda f: take(f, 0))
            guard(algorithm.model, received, take(mine, 0), name="model")


def the_order_of_clients_changes_nothing(case: Case) -> None:
    """8. A block in another order gives every client the same, and the server the same sums."""
    algorithm, data = case.algorithm, case.made.data
    executor = case.simulation("stacked").executor
    for exchange in case.exchanges:
        phase, what = exchange.phase, f"phase {exchange.phase.name!r}"
        forward = in_blocks(algorithm, data, exchange, executor, case.seed)
        backward = in_blocks(algorithm, data, exchange, executor, case.seed, is_turned=True)
        tolerance = 1e-10 if phase.unbatched else 0.0
        for i, result in forward.items():
            compare(backward[i], result, tolerance, f"{what}: a client depends on its place")
        if callable(phase.reduce):
            count = min(3, len(exchange.ids))
            uploads = [exchange.update(algorithm, data, j, case.seed)[1] for j in range(count)]
            weights = torch.arange(1, count + 1, dtype=torch.float64)
            sums = phase.reduce(stack(uploads), weights)
            turned = phase.reduce(stack(uploads[::-1]), weights.flip(0))
            compare(to_named(turned), to_named(sums), 1e-10, f"{what}: reduce counts places")


def _form(record: Any) -> Any:
    """Structure, shapes and types of a record."""
    leaves, spec = pytree.tree_flatten(record)
    return spec, [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())
