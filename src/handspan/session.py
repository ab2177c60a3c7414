"""One sitting of a run: from the start or the last checkpoint to its result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from handspan.core.errors import HandspanError
from handspan.core.federation import RunState, run, start
from handspan.core.records import map_tensors
from handspan.disk import held
from handspan.evaluation.metrics import Metric
from handspan.evaluation.newcomers import curve
from handspan.evaluation.protocol import Evaluation, evaluate
from handspan.preparing import Problem
from handspan.result import Result
from handspan.runs import RunFolder
from handspan.simulation import profile
from handspan.simulation.engine import EngineChoice, choose_engine, num_threads
from handspan.simulation.federation import Simulation
from handspan.simulation.store import ClientStore

_MOST_WAITING = 1 << 28  # bytes of private records on their way to disk

Progress = Callable[[int, int, dict[str, Any]], None]


def execute(
    problem: Problem,
    config: dict[str, Any],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    hooks: Sequence[Callable[[RunState], bool | None]] = (),
) -> Result:
    """Run a prepared problem, from the start or from its folder's last checkpoint."""
    begin = time.perf_counter()
    folder = None if out is None else RunFolder(out)
    if folder is None and problem.options.store == "disk":
        raise HandspanError("store=disk keeps private records in the run folder: give --out")
    goes_on = resume and folder is not None and folder.config_path.exists()
    if folder is not None and not goes_on:
        folder.refuse_existing()
    choice = None if goes_on else _choice(problem, None)  # a mistake in it leaves nothing behind
    with _opened(folder, config, problem, choice) as settled, num_threads(settled.threads):
        simulation = make_simulation(problem, settled, folder)
        state = None
        if folder is not None and goes_on:
            state = _stored_state(problem, simulation, folder)
        session = _Session(problem, simulation, settled, folder, progress, begin)
        return session.run(state, hooks, config)


@contextmanager
def _opened(
    folder: RunFolder | None, config: dict[str, Any], problem: Problem, choice: EngineChoice | None
) -> Iterator[EngineChoice]:
    """Begin the folder of a new run, or of one that goes on: then its own engine is taken."""
    if folder is None:
        assert choice is not None
        yield choice
        return
    with held(folder.path):
        if choice is None:
            choice = _choice(problem, folder.check(config))
            folder.clean()
            yield choice
            return
        try:
            folder.create({**config, "engine": choice.description(problem.setting.device)})
            folder.append_timing({"calibration_ms": dict(choice.milliseconds)})
            yield choice
        except HandspanError:
            folder.forget()
            raise


def _choice(problem: Problem, stored: dict[str, Any] | None) -> EngineChoice:
    options = problem.options
    if stored is not None:  # the same engine gives the same bits
        return EngineChoice.told(stored["engine"])
    return choose_engine(
        problem.algorithm,
        problem.data,
        engine=options.engine,
        block_size=options.block_size,
        threads=options.threads,
        workers=options.workers,
        cohort=options.cohort,
        rounds=options.rounds,
        seed=options.seed,
        name=f"{problem.spec.text} {options.model} {options.dtype}",
    )


def make_simulation(
    problem: Problem, choice: EngineChoice, folder: RunFolder | None = None
) -> Simulation:
    """Put the clients into this process, or into workers of it."""
    make_store: Callable[..., ClientStore] = ClientStore
    if folder is not None and problem.options.store == "disk":
        make_store = partial(ClientStore, folder=folder.path / "clients", reopen=folder.has_state)
    simulation = choice.simulation(
        problem.algorithm, problem.data, seed=problem.options.seed, make_store=make_store
    )
    simulation.precision = problem.options.precision
    return simulation


@dataclass
class _Session:
    """One sitting of a run: evaluates, saves and reports between the rounds."""

    problem: Problem
    simulation: Simulation
    choice: EngineChoice
    folder: RunFolder | None
    progress: Progress | None
    begin: float
    aside: float = 0.0  # seconds spent on anything but rounds
    saved: float = 0.0  # when the last checkpoint was made
    saving: float = 0.0  # seconds that it took
    before: tuple[float, float] = (0.0, 0.0)  # seconds of earlier sittings
    latest: tuple[int, Evaluation] | None = None  # round and scores

    def run(
        self,
        state: RunState | None,
        hooks: Sequence[Callable[[RunState], bool | None]],
        config: dict[str, Any],
    ) -> Result:
        options = self.problem.options
        if self.folder is not None:
            self.before = self.folder.seconds()
        self.aside = time.perf_counter() - self.begin
        self.saved = time.perf_counter()
        profile.start()
        state = run(
            self.problem.algorithm,
            self.simulation,
            rounds=options.rounds,
            cohort=options.cohort,
            seed=options.seed,
            state=state,
            hooks=(*hooks, self.after_round),
        )
        if not state.history or state.history[-1]["round"] != state.round:
            self.evaluate(state)
        self.save(state)
        result = self.result(state, config)
        if self.folder is not None:
            self.folder.write_clients(result.clients)
            self.folder.write_summary(result.summary)
        return result

    def after_round(self, state: RunState) -> None:
        """Evaluate every so often, save when it is time, and tell how far the run is."""
        options = self.problem.options
        if options.eval_every and state.round % options.eval_every == 0:
            self.evaluate(state)
        # A checkpoint may cost a twentieth of the time at most; but records that go to disk wait in
        # memory until it is made.
        pause = max(options.checkpoint_seconds, 20 * self.saving)
        is_full = self.simulation.store.waiting_bytes() > _MOST_WAITING
        if self.folder is not None and (is_full or time.perf_counter() - self.saved > pause):
            self.save(state)
        if self.progress is not None:
            self.progress(state.round, options.rounds, state.history[-1] if state.history else {})

    def evaluate(self, state: RunState) -> Evaluation:
        begin = time.perf_counter()
        if self.folder is not None:
            self.folder.append_timing({"evaluated": state.round, "after": self.seconds()[0]})
        with profile.part("evaluate"):
            scores = evaluate(
                self.simulation, state.server, state.round, self.problem.task, self.problem.metrics
            )
        state.history.append(
            {"round": state.round, **scores.summary, **dataclasses.asdict(state.costs)}
        )
        self.latest = (state.round, scores)
        self.aside += time.perf_counter() - begin
        return scores

    def seconds(self) -> tuple[float, float]:
        """Seconds in rounds, and in all, earlier sittings included."""
        total = time.perf_counter() - self.begin
        return self.before[0] + total - self.aside, self.before[1] + total

    def save(self, state: RunState) -> None:
        if self.folder is None:
            return
        begin = time.perf_counter()
        with profile.part("save"):
            self.folder.save(state, self.simulation.store)
        self.saved = time.perf_counter()
        self.saving = self.saved - begin
        self.aside += self.saving
        rounds, total = self.seconds()
        self.folder.append_timing({"round": state.round, "seconds": rounds, "seconds_total": total})

    def result(self, state: RunState, config: dict[str, Any]) -> Result:
        rounds_seconds, _ = self.seconds()
        scores = self.scores(state)
        summary = self.summary(state, scores, config)
        summary["seconds"] = rounds_seconds
        summary["seconds_total"] = self.seconds()[1]
        return Result(
            summary=summary,
            history=state.history,
            clients=self.columns(scores),
            state=state,
            simulation=self.simulation,
            problem=self.problem,
            choice=self.choice,
            config=config,
        )

    def scores(self, state: RunState) -> Evaluation:
        """Scores of the last round: those there are, or new ones after a resume."""
        if self.latest is not None and self.latest[0] == state.round:
            return self.latest[1]
        return evaluate(
            self.simulation, state.server, state.round, self.problem.task, self.problem.metrics
        )

    def summary(
        self, state: RunState, scores: Evaluation, config: dict[str, Any]
    ) -> dict[str, Any]:
        """Return all of ``summary.json`` but the seconds."""
        problem = self.problem
        everyone = torch.arange(problem.data.num_clients)
        served = self.simulation.personal_costs(state.server, everyone, state.round)
        costs = state.costs + served
        summary: dict[str, Any] = {
            "method": problem.spec.text,
            "rounds": state.round,
            "seed": problem.options.seed,
            **empty_scores(problem.metrics),
            **scores.summary,
            **dataclasses.asdict(costs),
            "empty_rounds": state.empty_rounds,
            "abandoned_rounds": state.abandoned_rounds,
            "engine": str(self.choice),
            "num_clients": problem.data.num_clients,
            "fingerprint": config["fingerprint"],
            "partition_hash": problem.data.info.get("partition_hash"),
        }
        if problem.held_out is not None and problem.metrics:
            summary.update(self.serve_held_out(state))
        return summary

    def columns(self, scores: Evaluation) -> dict[str, Any]:
        """Return what stands in ``clients.parquet``: one entry per client."""
        data = self.problem.data
        columns: dict[str, Any] = {
            "client": torch.arange(data.num_clients),
            "num_train": data.num_train,
            "num_test": data.num_test,
            **scores.clients,
        }
        if data.names:
            columns["name"] = list(data.names)
        if data.groups is not None:
            columns["group"] = data.groups
        return columns

    def serve_held_out(self, state: RunState) -> dict[str, Any]:
        """Score clients that took no part, against the rows they give; all of them come last."""
        problem = self.problem
        assert problem.held_out is not None
        newcomers = curve(
            problem.algorithm,
            state.server,
            state.round,
            problem.held_out,
            problem.task,
            problem.metrics[0],
            seed=problem.options.seed,
            choice=self.choice,
        )
        name = problem.metrics[0].name
        return {f"heldout_{name}_mean": newcomers[-1]["mean"], "newcomers": newcomers}


def empty_scores(metrics: list[Metric]) -> dict[str, None]:
    """Names that every summary has; what does not apply stays null."""
    name = metrics[0].name if metrics else "accuracy"
    return dict.fromkeys(
        (
            f"personal_{name}_mean",
            f"personal_{name}_pooled",
            f"global_{name}_pooled",
            "worst_decile",
            f"heldout_{name}_mean",
        )
    )


def reopen(problem: Problem, path: str | Path) -> Result:
    """Read a run folder without changing it."""
    folder = RunFolder(path)
    stored = folder.config()
    if problem.data.fingerprint() != stored["fingerprint"]:
        raise HandspanError(
            f"{path} was trained on other data ({stored['fingerprint']}) than these "
            f"({problem.data.fingerprint()}): put back those it was trained on"
        )
    if not folder.has_state:
        raise HandspanError(f"{path} holds no state yet: go on with handspan run --resume")
    choice = _choice(problem, stored)
    simulation = make_simulation(problem, choice, folder)
    state = _stored_state(problem, simulation, folder)
    assert state is not None
    return Result(
        summary=folder.summary(),
        history=state.history,
        clients=folder.clients(),
        state=state,
        simulation=simulation,
        problem=problem,
        choice=choice,
        config={key: value for key, value in stored.items() if key not in ("format", "engine")},
    )


def _stored_state(problem: Problem, simulation: Simulation, folder: RunFolder) -> RunState | None:
    """Return the state of the last checkpoint, its tensors where the problem lives."""
    like = start(problem.algorithm, simulation, problem.options.seed).server
    state = folder.load(like, simulation.store)
    if state is None:
        return None
    server = map_tensors(lambda value, old: value.to(old), state.server, like)
    return dataclasses.replace(state, server=server)
