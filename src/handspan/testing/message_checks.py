"""Checks of the contract that look at messages: what is sent, what it costs, what it shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Phase
from handspan.core.records import map_tensors, num_bytes, stack, take, tensors, to_named
from handspan.simulation.loop import through_bytes
from handspan.simulation.reduction import Reduction
from handspan.testing.case import Case, compare, numbers
from handspan.testing.playing import Exchange, in_blocks


def messages_survive_the_wire(case: Case) -> None:
    """10. Records come back from bytes as they were, and a run through bytes is the same run."""
    for exchange in case.exchanges:
        phase = exchange.phase
        records = [exchange.broadcast, take(exchange.clients, 0)]
        if exchange.uploads:
            _, upload = exchange.update(case.algorithm, case.made.data, 0, case.seed)
            records += [upload, upload if phase.wire is None else phase.wire(upload)]
            records += [exchange.before, exchange.after]
        for record in records:
            message = f"phase {phase.name!r}: {type(record).__name__} changes on the wire"
            compare(to_named(through_bytes(record)), to_named(record), 0.0, message)
    direct = numbers(*case.train(2))
    wired = numbers(*case.train(2, case.simulation("wire")))
    # Tensors that come from bytes lie otherwise in memory: sums may round otherwise.
    compare(wired, direct, 1e-12, "a run through bytes differs")


def the_server_sees_only_sums(case: Case) -> None:
    """12. Phases that sum do: other uploads with the same sum give the same server."""
    for exchange in case.exchanges:
        phase, what = exchange.phase, f"phase {exchange.phase.name!r}"
        if not exchange.uploads or phase.reduce == "stack":
            continue
        count = min(4, len(exchange.ids))
        ids = exchange.ids[:count]
        uploads = stack(_uploads(case, exchange, count))
        weights = phase.weight(case.made.data.num_train[ids]).to(torch.float64)
        for size in range(1, count):
            some, few = take(uploads, slice(size)), weights[:size]
            part = _reduce(phase, exchange.ids[:size], some, few)
            full = _reduce(phase, ids, uploads, weights)
            shapes = [[t.shape for t in tensors(r)] for r in (part, full)]
            assert shapes[0] == shapes[1], f"{what}: the reduction has a client axis"
        if phase.reduce == "sum":
            other = map_tensors(lambda t, w=weights: _same_sum(t, w), uploads)
            results = [
                phase.combine(exchange.before, _reduce(phase, ids, u, weights), exchange.round)
                for u in (uploads, other)
            ]
            compare(to_named(results[1]), to_named(results[0]), 1e-9, f"{what}: not only the sum")
        else:
            _check_additive(case, exchange, uploads, weights)


def _check_additive(case: Case, exchange: Exchange, uploads: Any, weights: Tensor) -> None:
    """Check that an own reduction adds up, and that what is sent suffices for the server."""
    phase, what = exchange.phase, f"phase {exchange.phase.name!r}"
    assert callable(phase.reduce) and phase.combine is not None
    whole = phase.reduce(uploads, weights)
    pieces = [
        phase.reduce(take(uploads, slice(a, b)), weights[a:b]) for a, b in ((0, 1), (1, None))
    ]
    added = map_tensors(lambda a, b: a + b, *pieces)
    compare(to_named(added), to_named(whole), 1e-10, f"{what}: reduce is not additive")
    if phase.wire is None:
        return
    sent = [phase.wire(take(uploads, j)) for j in range(len(weights))]
    if type(sent[0]) is type(uploads):
        return  # single uploads are sent as they are
    total = [torch.tensordot(weights, t.double(), dims=1) for t in tensors(stack(sent))]

    def known(tensor: Tensor) -> Tensor:
        """Keep what follows from the sum of the messages, spoil the rest."""
        if tensor.ndim == 0 and torch.allclose(tensor, weights.sum()):
            return tensor
        is_known = any(t.shape == tensor.shape and torch.allclose(t, tensor) for t in total)
        return tensor if is_known else torch.full_like(tensor, torch.nan)

    results = [
        phase.combine(exchange.before, reduction, exchange.round)
        for reduction in (map_tensors(known, whole), whole)
    ]
    message = f"{what}: combine needs more than the sum of what is sent"
    compare(to_named(results[0]), to_named(results[1]), 1e-9, message)


def uploads_are_counted_and_private(case: Case) -> None:
    """13. The ledger counts what is sent, and no client's record reaches another client."""
    algorithm, data = case.algorithm, case.made.data
    loop = case.simulation()
    for exchange in case.exchanges:
        phase, what = exchange.phase, f"phase {exchange.phase.name!r}"
        if not exchange.uploads:
            continue
        upload = _uploads(case, exchange, 1)[0]
        size = num_bytes(upload if phase.wire is None else phase.wire(upload))
        down = sum(num_bytes(exchange.one(algorithm, j)[0]) for j in range(len(exchange.ids)))
        for engine in ("loop", "stacked"):
            simulation = loop if engine == "loop" else case.simulation("stacked")
            outcome = simulation.exchange(phase, exchange.broadcast, exchange.round)
            senders = data.num_clients if phase.uploads == "all" else len(exchange.round.ids)
            counted, sent = outcome.costs.bytes_up, size * senders
            assert counted == sent, f"{what}, {engine}: {counted} bytes up counted, {sent} sent"
            counted = outcome.costs.bytes_down
            assert counted == down, f"{what}, {engine}: {counted} bytes down counted, {down} sent"
            simulation.discard()
        _check_private(case, exchange)


def _check_private(case: Case, exchange: Exchange) -> None:
    """Spoil one client's private record: no other client may notice."""
    algorithm, data, victim = case.algorithm, case.made.data, exchange.probe

    def spoil(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed[victim] += 1
        return changed

    results = [
        in_blocks(
            algorithm,
            data,
            exchange,
            case.simulation("stacked").executor,
            case.seed,
            clients=clients,
        )
        for clients in (exchange.clients, map_tensors(spoil, exchange.clients))
    ]
    for i, result in results[0].items():
        if i != int(exchange.ids[victim]):
            message = f"phase {exchange.phase.name!r}: client {i} sees another's private record"
            compare(results[1][i], result, 0.0, message)


def _uploads(case: Case, exchange: Exchange, count: int) -> list[Any]:
    """Return uploads of the first clients of an exchange."""
    updates = (exchange.update(case.algorithm, case.made.data, j, case.seed) for j in range(count))
    return [upload for _, upload in updates]


def _reduce(phase: Phase, ids: Tensor, uploads: Any, weights: Tensor) -> Any:
    """Reduce as the engines do."""
    reduction = Reduction(phase, ids, weights)
    reduction.add(ids, uploads)
    return reduction.result()


def _same_sum(stacked: Tensor, weights: Tensor) -> Tensor:
    """Change the first two of a stack so that the weighted sum stays."""
    shift = torch.linspace(0.5, 1.5, stacked[0].numel(), dtype=torch.float64)
    shift = shift.view(stacked.shape[1:]).to(stacked)
    changed = stacked.clone()
    changed[0] += shift / float(weights[0])
    changed[1] -= shift / float(weights[1])
    return changed
