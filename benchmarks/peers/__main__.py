"""Race against other simulators: ``python -m benchmarks.peers --data mnist:FOLDER --cache FOLDER``.

FedAvg, 100 clients with 525 rows each, 10 a round, one epoch, on the same rows, from one start.
``--races`` chooses among mlp-10, mlp-64, cnn-10, cnn-64 (against pfl at one and at two threads),
flower (the MLP at batch 10) and personal (FedRep and pFL-MF against FedAvg, in time per gradient
step). Contestants take turns, so that what else the machine does hits everybody alike; a ratio is
the median over the turns. Without ``--data`` rows of MNIST's shape are made up.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.contest import Contestant, take_turns
from benchmarks.peers.side_handspan import problem_of
from benchmarks.peers.stage import CLIENTS, ROWS, Play
from benchmarks.problems import describe_machine, judge, synthetic_images
from handspan.core.federation import start
from handspan.simulation.federation import Simulation

TEST_ROWS = 10_000
BARS = {("mlp", 10): 5.0, ("mlp", 64): 2.5, ("cnn", 10): 2.5, ("cnn", 64): 2.0}
FLOWER_BAR, PERSONAL_BAR = 20.0, 1.3
PERSONAL = ("fedrep", "pflmf:factor=head")
AGREE = 0.03  # accuracies may differ so much: batches and cohorts are drawn differently
ROUNDS = {"mlp": 5, "cnn": 2}  # of a turn
RACES = (*(f"{model}-{size}" for model, size in BARS), "flower", "personal")
Claim = tuple[str, str, bool]


def prepare(data: str | None, folder: Path) -> Path:
    """Write rows for everybody, training rows client after client, all in one random order."""
    if data is None:
        made = synthetic_images(1, CLIENTS * ROWS + TEST_ROWS)
        assert isinstance(made.x, torch.Tensor) and made.y is not None
        x, y = made.x.numpy(), made.y.numpy()
    else:
        from handspan.data.sources import load_source

        source = load_source(data)
        assert source.y is not None
        x, y = np.asarray(source.x, dtype=np.float32) / 255, source.y.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = np.split(order, [CLIENTS * ROWS])
    arrays = {"x": x[train], "y": y[train], "x_test": x[test], "y_test": y[test]}
    path = folder / "rows.npz"
    np.savez(path, **arrays)
    return path


def with_start(rows: Path, model: str) -> str:
    """Add the start of a model to the rows."""
    path = rows.with_name(f"{model}.npz")
    if not path.exists():
        play = Play(material=str(rows), model=model, batch_size=10)
        problem = problem_of(play)
        server = start(problem.algorithm, Simulation(problem.algorithm, problem.data), 0).server
        named = {f"start {name}": value.numpy() for name, value in server.params.items()}
        with np.load(rows) as arrays:
            np.savez(path, **arrays, **named)
    return str(path)


class Race:
    """One race: who takes part, and how it ended."""

    def __init__(self, rows: Path, model: str, batch_size: int, cache: Path, engine: str) -> None:
        self.rows, self.model, self.batch_size, self.cache = rows, model, batch_size, cache
        self.engine = engine
        self.contestants: list[Contestant] = []

    def enter(self, peer: str, threads: int = 1, method: str = "fedavg") -> Contestant:
        """Bring a contestant to the start, warmed up."""
        play = Play(
            material=with_start(self.rows, self.model),
            model=self.model,
            batch_size=self.batch_size,
            threads=threads,
            method=method,
            engine=self.engine,
        )
        self.contestants.append(Contestant(peer, play, self.cache))
        return self.contestants[-1]

    def run(self, repeats: int, rounds: int) -> None:
        """Let them train, print what they reached, and let them go."""
        take_turns(self.contestants, rounds, repeats)
        print(f"\n{self.model}, batches of {self.batch_size}: {repeats} turns of {rounds} rounds")
        self.accuracies: dict[Contestant, float] = {}
        for one in self.contestants:
            if one.play.method == "fedavg":
                self.accuracies[one] = one.accuracy()
            one.leave()
            median = statistics.median(one.seconds)
            told = f"{100 * self.accuracies[one]:.1f} %" if one in self.accuracies else "-"
            spread = f"{1e3 * min(one.seconds):.1f} to {1e3 * max(one.seconds):.1f}"
            print(
                f"  {one.name:<50}{1 / median:8.2f} rounds/s  {1e3 * median:8.1f} ms ({spread})"
                f"  accuracy {told}",
                flush=True,
            )

    def claims(self, mine: Contestant, other: Contestant, bar: float) -> list[Claim]:
        """How often faster than the other, and whether both learned the same."""
        ratio = ratio_of(other, mine)
        apart = abs(self.accuracies[mine] - self.accuracies[other])
        what = f"{self.model}, batch {self.batch_size}: against {other.name}"
        return [
            (f"{what} {ratio:6.2f}x", f"at least {bar}x", ratio >= bar),
            (f"{what}: apart {100 * apart:.1f} points", f"at most {100 * AGREE}", apart <= AGREE),
        ]


def ratio_of(one: Contestant, other: Contestant) -> float:
    """Median over the turns of the time of one over that of the other."""
    return statistics.median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


def against_pfl(race: Race, repeats: int) -> list[Claim]:
    """Race against pfl at the better of one and two threads."""
    mine = race.enter("handspan")
    others = [race.enter("pfl", threads) for threads in (1, 2)]
    race.run(repeats, ROUNDS[race.model])
    best = min(others, key=lambda one: statistics.median(one.seconds))
    return race.claims(mine, best, BARS[race.model, race.batch_size])


def against_flower(race: Race, repeats: int) -> list[Claim]:
    """Race against Flower's simulation."""
    mine, other = race.enter("handspan"), race.enter("flower")
    race.run(repeats, ROUNDS[race.model])
    return race.claims(mine, other, FLOWER_BAR)


def personal(race: Race, repeats: int) -> list[Claim]:
    """Personalised methods against FedAvg, in time per gradient step."""
    base = race.enter("handspan")
    others = [race.enter("handspan", method=method) for method in PERSONAL]
    race.run(repeats, ROUNDS[race.model])
    claims: list[Claim] = []
    for one in others:
        ratio = ratio_of(one, base) * base.steps / one.steps
        what = f"{one.play.method}: time of a step over FedAvg's {ratio:6.2f}x"
        claims.append((what, f"at most {PERSONAL_BAR}x", ratio <= PERSONAL_BAR))
    return claims


def main() -> int:
    """Run the races."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--data", help="mnist:FOLDER with idx files, or a FILE.npz")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "handspan-peers")
    parser.add_argument("--races", default=",".join(RACES), help="by commas")
    parser.add_argument("--engine", default="auto", help="of handspan, as in workers:5")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print(describe_machine())
    claims: list[Claim] = []
    cache, engine, repeats = options.cache, options.engine, options.repeats
    with tempfile.TemporaryDirectory() as folder:
        rows = prepare(options.data, Path(folder))
        for name in options.races.split(","):
            if name == "flower":
                claims += against_flower(Race(rows, "mlp", 10, cache, engine), repeats)
            elif name == "personal":
                claims += personal(Race(rows, "mlp", 10, cache, engine), repeats)
            else:
                model, size = name.split("-")
                claims += against_pfl(Race(rows, model, int(size), cache, engine), repeats)
    return judge(*claims)


if __name__ == "__main__":
    raise SystemExit(main())
