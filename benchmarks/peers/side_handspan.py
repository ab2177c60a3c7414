"""handspan's side: by default the engine that ``auto`` takes for a long run, evaluation off."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.peers.stage import CLIENTS, COHORT, RATE, ROWS, Play, Turns
from benchmarks.problems import Problem, equal_clients, make_problem
from handspan.core.federation import RunState, run, start
from handspan.numerics.local_work import LocalWork
from handspan.simulation.engine import choose_engine
from handspan.simulation.plans import step_counts
from handspan.simulation.threads import num_threads

MODELS = {"mlp": "mlp", "cnn": "cnn_bench"}


def problem_of(play: Play) -> Problem:
    """The method on the rows of the play."""
    work = LocalWork(epochs=1, batch_size=play.batch_size, learning_rate=RATE)
    data = equal_clients(*play.rows(), CLIENTS, 10)
    return make_problem(play.method, data, cohort=COHORT, model=MODELS[play.model], work=work)


def steps_of(problem: Problem) -> int:
    """Gradient steps of a client and round."""
    return sum(
        int(step_counts(stage, torch.tensor([ROWS]))[0])
        for phase in problem.algorithm.rounds
        for stage in phase.stages
        if not stage.forward_only
    )


def accuracy(play: Play, problem: Problem, state: RunState) -> float:
    """Accuracy of the global model."""
    assert problem.algorithm.shared_model is not None and problem.task is not None
    model = problem.algorithm.shared_model(state.server)
    task = problem.task

    def predict(x: Tensor) -> Tensor:
        return task.predict(model.params, model.buffers, x, None)

    return play.accuracy(predict)


def main() -> None:
    """Train until nobody asks for more."""
    play, turns = Play.given(), Turns()
    problem = problem_of(play)
    engine, _, block_size = play.engine.partition(":")
    choice = choose_engine(
        problem.algorithm,
        problem.data,
        engine=engine,
        block_size=int(block_size) if block_size else None,
        cohort=COHORT,
    )
    simulation = choice.simulation(problem.algorithm, problem.data)
    state = start(problem.algorithm, simulation, 0)
    turns.tell(ready=f"handspan {play.method}, {choice}", steps=steps_of(problem))
    with num_threads(choice.threads):
        while turns.next(functools.partial(accuracy, play, problem, state)):
            state = run(
                problem.algorithm, simulation, rounds=state.round + 1, cohort=COHORT, state=state
            )


if __name__ == "__main__":
    main()
