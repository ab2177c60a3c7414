"""What an upload tells of a client: ``python -m experiments.side_attack RUNS/side-groups``.

For every finished run of the table ``side-groups`` in which z is the client's group, one-hot, and
for each client: its upload of one more round minus what it was sent, of the encoder alone; the
largest entry of the leading right singular vector is taken for its group (of five).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import handspan
from handspan.comparison.outcome import read
from handspan.core import keys
from handspan.core.federation import make_round
from handspan.simulation.engine import num_threads
from handspan.simulation.federation import Simulation
from handspan.simulation.reduction import Postprocessor


def told(folder: Path, is_first: bool, together: int = 1) -> tuple[float, float]:
    """Share of right guesses, and mean |cosine| with z, from sums of so many uploads."""
    result = handspan.load(folder)
    problem, seen = result.problem, []
    simulation = Simulation(
        problem.algorithm,
        problem.data,
        seed=problem.options.seed,
        postprocessors=[Postprocessor(upload=lambda u, ids, _: seen.append((ids, u)) or u)],
    )
    phase, side = problem.algorithm.rounds[0], problem.data.side
    assert side is not None
    index, server = result.state.round, result.state.server
    if is_first:
        key = keys.key(problem.options.seed, "init")
        index, server = 0, problem.algorithm.init_server(key, simulation.population)
    everyone = make_round(index, torch.arange(len(side)), simulation.population)
    with num_threads(1):
        sent = phase.broadcast(server, everyone)
        simulation.exchange(phase, sent, everyone)
    name = "encoder.weight"
    order = torch.cat([ids for ids, _ in seen]).argsort()  # uploads come sorted by length
    uploads = torch.cat([u.params[name] for _, u in seen])[order]
    changes = uploads.double() - sent.params[name].double()
    sums = torch.stack([changes.roll(-i, 0) for i in range(together)]).sum(0)
    vectors = torch.linalg.svd(sums).Vh[:, 0]
    right = (vectors.abs().argmax(1) == side.argmax(1)).double().mean()
    cosine = (vectors * side.double()).sum(1).abs() / side.double().norm(dim=1)
    return float(right), float(cosine.mean())


def main() -> None:
    """Print one line for each method, averaged over the seeds."""
    folder = Path(sys.argv[1])
    found: dict[str, list[tuple[float, float]]] = {}
    for row in read(folder):
        text = row["method"]
        if text.startswith("perfedsi:side=groups") and "gate" not in text:
            for is_first in (True, False):
                when = "first" if is_first else "last"
                for many in (1,) if "noise" in text else (1, 5, 20):
                    name = f"{text}, {when} round, sums of {many}"
                    found.setdefault(name, []).append(told(folder / row["cell"], is_first, many))
    for text, values in found.items():
        right, cosine = np.mean(values, axis=0)
        print(f"{text}: group right {100 * right:.0f} %, mean cosine {cosine:.3f}")


if __name__ == "__main__":
    main()
