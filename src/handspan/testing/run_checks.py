"""Checks of the contract that look at whole runs: engines, seeds, resume, loss, messages."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor

from handspan.core.algorithm import Algorithm, Phase, by_examples
from handspan.core.data import FederatedData, Round
from handspan.core.federation import RunState
from handspan.core.records import tensors, to_named
from handspan.simulation.federation import Simulation
from handspan.simulation.loop import through_bytes
from handspan.testing.case import Case, compare, numbers
from handspan.testing.playing import Unrecorded, step_rows, watched


def the_default_type_does_not_matter(case: Case) -> None:
    """5. Numbers have the run's type, whatever ``torch.get_default_dtype`` says."""
    before = torch.get_default_dtype()
    for dtype in (torch.float32, torch.float64):
        results: list[dict[str, Tensor]] = []
        for default in (torch.float32, torch.float64):
            torch.set_default_dtype(default)
            try:
                made = case.problem(dtype=dtype)
                algorithm = case.build(made)
                simulation = Simulation(algorithm, made.data, seed=case.seed)
                simulation.executor.recorder = Unrecorded()
                state, _ = case.train(1, simulation, algorithm=algorithm)
                results.append(numbers(state, simulation, made.setting.task))
            finally:
                torch.set_default_dtype(before)
        compare(results[1], results[0], 0.0, f"{dtype} depends on torch's default type")


def blocks_run_without_warning(case: Case) -> None:
    """6. All runs under ``vmap`` with its randomness forbidden, and without slow fallbacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, simulation = case.train(1, case.simulation("stacked", is_recorded=True))
        got = numbers(state, simulation, case.made.setting.task)
    for name, tensor in got.items():
        assert not tensor.requires_grad, f"{name} still carries a graph"
    wanted = numbers(*case.train(1), case.made.setting.task)
    compare(got, wanted, 1e-10, "blocks, replayed from recordings, differ from single clients")


def the_key_decides_everything(case: Case) -> None:
    """7. One key gives one result, alone or in company; another key gives other plans."""
    results = [numbers(*case.train(2)) for _ in range(2)]
    compare(results[1], results[0], 0.0, "two runs with one seed differ")
    simulation = case.simulation()
    everyone = torch.arange(case.made.data.num_clients)
    together = simulation.initial(everyone)
    num = case.made.data.num_train
    for i in (0, 3):
        alone, rows = simulation.initial(torch.tensor([i])), int(num[i])
        for whole, single in zip(tensors(together), tensors(alone), strict=True):
            first = whole[i] if whole[i].shape == single[0].shape else whole[i][:rows]
            assert torch.equal(first, single[0]), "init_client depends on who else is there"
    draws, differs = plans_differ(case)
    assert differs or not draws, "another seed draws the same rows"


def one_row_suffices(case: Case) -> None:
    """9. Clients with one row, or with fewer rows than the rank, give finite numbers."""
    task = case.made.setting.task
    made = case.problem(sizes=(1, 1, 2, 1, 9, 1, 2, 1, 3, 1, 1))
    algorithm = case.build(made)
    for engine in ("loop", "stacked"):
        simulation = Simulation(algorithm, made.data, seed=case.seed, engine=engine)
        simulation.executor.recorder = Unrecorded()
        state, _ = case.train(1, simulation, algorithm=algorithm, cohort=11)
        for name, tensor in numbers(state, simulation, task).items():
            is_exempt = name.startswith("server") and bool(torch.isinf(tensor).all())
            finite = bool(torch.isfinite(tensor).all()) or is_exempt
            assert finite, f"{engine}: {name} is not finite with clients of one row"


def a_resumed_run_continues(case: Case) -> None:
    """11. A run that is saved and resumed ends as if uninterrupted, and repeats no round."""
    rounds, pause = 6, 3
    wanted_state, wanted_simulation = case.train(rounds)
    state, simulation = case.train(pause)
    saved = through_bytes(state.server)
    private = {name: t.clone() for name, t in simulation.store.to_named().items()}
    played: list[int] = []

    class Counting(Simulation):
        def exchange(self, phase: Phase, broadcast: Any, round: Any) -> Any:
            played.append(int(round.index))
            return super().exchange(phase, broadcast, round)

    resumed = Counting(case.algorithm, case.made.data, seed=case.seed)
    resumed.executor.recorder = Unrecorded()
    resumed.store.load_named(private)
    again = RunState(server=saved, round=state.round, is_set_up=True)
    again, _ = case.train(rounds, resumed, state=again)
    wanted = numbers(wanted_state, wanted_simulation, case.made.setting.task)
    got = numbers(again, resumed, case.made.setting.task)
    compare(got, wanted, 0.0, "a resumed run differs from an uninterrupted one")
    assert not played or min(played) >= pause, f"resumed, rounds {played} are played again"
    assert len(played) <= len(case.algorithm.rounds) * (rounds - pause)


def an_abandoned_round_leaves_no_trace(case: Case) -> None:
    """14. A round without enough uploads, or in which a phase raises, leaves all as it was."""
    phases = (*case.algorithm.setup, *case.algorithm.rounds)
    has_twin = any(phase.cohort_update is not None for phase in phases)
    for engine in ("loop", "stacked") if has_twin else ("loop",):
        before_state, before = case.train(1, case.simulation(engine))
        wanted = numbers(before_state, before)

        def lost(round: Round, ids: Tensor) -> Tensor:
            """Nobody arrives after the first round."""
            return torch.full_like(ids, int(round.index) > 0, dtype=torch.bool)

        simulation = case.simulation(engine, lost=lost)
        state, _ = case.train(2, simulation)
        message = f"{engine}: an abandoned round shows"
        compare(numbers(state, simulation), wanted, 0.0, message)
        played = state.abandoned_rounds + state.empty_rounds
        assert played == 1, f"{engine}: the abandoned round is not counted"
        _check_failing(case, engine, wanted)


class _Failure(Exception):
    """Raised on purpose."""


def _check_failing(case: Case, engine: str, wanted: dict[str, Tensor]) -> None:
    """Let the last phase of the second round fail after all clients have worked."""
    last = [exchange.phase for exchange in case.exchanges if int(exchange.round.index) == 1][-1]

    def combine(server: Any, reduction: Any, round: Round) -> Any:
        assert last.combine is not None
        if int(round.index) > 0:
            raise _Failure
        return last.combine(server, reduction, round)

    fails = dataclasses.replace(last, combine=combine)
    phases = tuple(fails if phase is last else phase for phase in case.algorithm.rounds)
    failing = dataclasses.replace(case.algorithm, rounds=phases)
    simulation = case.simulation(engine)
    state, _ = case.train(1, simulation, algorithm=failing)
    try:
        case.train(2, simulation, algorithm=failing, state=state)
    except _Failure:
        simulation.commit()  # of nothing
        compare(numbers(state, simulation), wanted, 0.0, f"{engine}: a failed round shows")
    else:
        raise AssertionError(f"{engine}: a failure inside a round is swallowed")


def the_flat_twin_is_the_same_method(case: Case) -> None:
    """15. ``cohort_update`` equals the per-client functions, on dense and on sparse rows."""
    for sparse in (False, True):
        made = case.problem(sparse=sparse)
        algorithm = case.build(made)
        if all(phase.cohort_update is None for phase in (*algorithm.setup, *algorithm.rounds)):
            return
        results = []
        for engine in ("loop", "stacked"):
            simulation = Simulation(algorithm, made.data, seed=case.seed, engine=engine)
            state, _ = case.train(3, simulation, algorithm=algorithm)
            results.append(numbers(state, simulation))
        kind = "sparse" if sparse else "dense"
        compare(results[1], results[0], 1e-10, f"cohort_update differs on {kind} rows")
        _check_twins(case, algorithm, made.data)


def _check_twins(case: Case, algorithm: Algorithm, data: FederatedData) -> None:
    """Compare single exchanges, with weights that differ and with a client that sends nothing."""
    seen, *_ = watched(algorithm, data, rounds=1, cohort=case.cohort, seed=case.seed)
    for exchange in seen:
        phase = exchange.phase
        if phase.cohort_update is None:
            continue
        weighted = dataclasses.replace(phase, weight=by_examples)
        results = []
        for engine in ("loop", "stacked"):
            simulation = Simulation(algorithm, data, seed=case.seed, engine=engine)
            simulation.store.stage(exchange.ids, exchange.clients)
            drawn = dataclasses.replace(exchange.round, multiplicity=exchange.round.ids + 1)
            outcome = simulation.exchange(weighted, exchange.broadcast, drawn)
            simulation.commit()
            results.append(
                {**to_named(outcome.reduction), **simulation.store.to_named()},
            )
        message = f"phase {phase.name!r}: cohort_update weighs otherwise"
        compare(results[1], results[0], 1e-10, message)


def plans_differ(case: Case) -> tuple[bool, bool]:
    """Whether any stage draws its rows at all, and whether another seed draws others."""
    data, draws, differs = case.made.data, False, False
    client = int(data.num_train.argmax())
    for exchange in case.exchanges:
        for n in range(len(exchange.phase.stages)):
            lists = [
                step_rows(data, exchange.phase, n, client, round=1, seed=seed)[0]
                for seed in (case.seed, case.seed, case.seed + 1)
            ]
            joined = [torch.cat(rows) if rows else torch.zeros(0) for rows in lists]
            assert torch.equal(joined[0], joined[1]), "one key gives two plans"
            is_drawn = any(not torch.equal(rows, rows.sort().values) for rows in lists[0])
            draws = draws or is_drawn
            differs = differs or not torch.equal(joined[0], joined[2])
    return draws, differs
