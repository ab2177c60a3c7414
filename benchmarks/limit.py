"""How much of the machine the engine uses: ``python -m benchmarks.limit [--device auto]``.

The limit is what bare products of the same shapes reach, in float32: for a dense layer three
batched matrix products (outputs, gradient of the weights, gradient of the rows, which the first
layer does without), for a convolution one grouped convolution and its backward pass. Both sides
count the same operations. The engine is timed over whole rounds: selection of the rows, local
steps, aggregation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.engine import CLASSES, CLIENTS, ROWS, SHAPE, Cell, Engine, cell_problem
from benchmarks.problems import describe_machine, judge, synthetic_images
from handspan.models.zoo import make_model
from handspan.simulation.engine import EngineChoice
from handspan.simulation.precision import multiplying

LEAST = 0.5  # of the limit, on the MLP in batches of 256
REPEATS = 5
Work = Callable[[], object]


@dataclass(frozen=True)
class Bare:
    """The products of one step of all clients: how many operations, and how to do them."""

    operations: int
    works: list[Work]

    def run(self) -> None:
        """Do them once."""
        for work in self.works:
            work()


def bare(cell: Cell, device: str) -> Bare:
    """Products of a step of the cell's network, on numbers of the right shapes."""
    network, found = make_model(cell.model, SHAPE, CLASSES)(), Bare(0, [])
    outputs = torch.zeros(2, *SHAPE)
    is_first = True
    for layer in network:
        inputs, outputs = outputs, layer(outputs)
        if not any(True for _ in layer.parameters()):
            continue
        is_dense = isinstance(layer, torch.nn.Linear)
        add = _dense if is_dense else _convolution
        shapes = tuple(inputs.shape[1:]), tuple(outputs.shape[1:]), tuple(layer.weight.shape)
        operations, work = add(cell, *shapes, is_first, device)
        found = Bare(found.operations + operations, [*found.works, work])
        is_first = False
    return found


def _dense(
    cell: Cell, inputs: tuple[int, ...], outputs: tuple[int, ...], _: object, first: bool, on: str
) -> tuple[int, Work]:
    x = torch.randn(cell.cohort, cell.batch_size, *inputs, device=on)
    weight = torch.randn(cell.cohort, *inputs, *outputs, device=on)
    grad = torch.randn(cell.cohort, cell.batch_size, *outputs, device=on)

    def work() -> None:
        torch.bmm(x, weight)
        torch.bmm(x.mT, grad)
        if not first:
            torch.bmm(grad, weight.mT)

    once = 2 * x.numel() * outputs[0]
    return once * (2 if first else 3), work


def _convolution(
    cell: Cell,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    kernel: tuple[int, ...],
    first: bool,
    on: str,
) -> tuple[int, Work]:
    groups, shape = cell.cohort, (cell.batch_size, cell.cohort * inputs[0], *inputs[1:])
    x, weight = torch.randn(shape, device=on), torch.randn(groups * kernel[0], *kernel[1:])
    weight = weight.to(on)
    grad = torch.randn(cell.batch_size, groups * outputs[0], *outputs[1:], device=on)
    options = [1, 1], [0, 0], [1, 1], False, [0, 0], groups

    def work() -> None:
        torch.conv2d(x, weight, groups=groups)
        torch.ops.aten.convolution_backward(
            grad, x, weight, None, *options, [not first, True, False]
        )

    once = 2 * grad.numel() * kernel[1] * kernel[2] * kernel[3]
    return once * (2 if first else 3), work


def seconds(work: Work, device: str) -> float:
    """Median time of some work; on a GPU as a graph, so that launching it costs nothing."""
    if device != "cpu":
        work = _captured(work)
    times: list[float] = []
    for _ in range(REPEATS + 1):
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _captured(work: Work) -> Work:
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def engine_seconds(cell: Cell, device: str) -> float:
    """Median time of a step of all clients, as a share of a whole round."""
    problem = cell_problem(cell, synthetic_images(CLIENTS, ROWS, device))
    size = 8 if device == "cpu" else 512
    engine = Engine(problem, cell, EngineChoice(engine="stacked", block_size=size, threads=1))
    times: list[float] = []
    for repeat in range(REPEATS + 2):
        _wait(device)
        begin = time.perf_counter()
        engine.round(repeat)
        _wait(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:]) / cell.steps


def main() -> int:
    """Compare the engine with bare products, in all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    device = parser.parse_args().device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    print(describe_machine(device))
    cohort, steps = (100, 20) if device != "cpu" else (10, 2)
    claims: list[tuple[str, str, bool]] = []
    with multiplying("float32"):
        for model, batch_size in (("mlp", 10), ("mlp", 256), ("cnn_bench", 10), ("cnn_bench", 64)):
            cell = Cell(model, cohort, batch_size, steps)
            limit = bare(cell, device)
            alone, whole = seconds(limit.run, device), engine_seconds(cell, device)
            share, rates = alone / whole, [limit.operations / t / 1e12 for t in (alone, whole)]
            text = (
                f"{model} x{cohort}, batch {batch_size}: {rates[1]:.2f} of {rates[0]:.2f} TFLOP/s"
            )
            is_judged = (model, batch_size) == ("mlp", 256) and device != "cpu"
            bar = f"{share:.0%}, at least {LEAST:.0%}" if is_judged else f"{share:.0%}"
            claims.append((text, bar, share >= LEAST or not is_judged))
    return judge(*claims)


if __name__ == "__main__":
    raise SystemExit(main())
