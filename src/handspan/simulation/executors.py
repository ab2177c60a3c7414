"""What runs blocks of clients, by the name of its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from handspan.core.algorithm import Algorithm, Phase
from handspan.core.data import ClientData, FederatedData
from handspan.simulation.loop import LoopExecutor, WireExecutor
from handspan.simulation.plans import Block, Blocks
from handspan.simulation.ray_cluster import RayExecutor
from handspan.simulation.stacked import StackedExecutor
from handspan.simulation.tracing import Recorder
from handspan.simulation.workers import WorkersExecutor


class Executor(Protocol):
    """Runs blocks of clients; ``is_stacked`` if by ``vmap``, here or elsewhere."""

    name: str
    is_stacked: bool
    block_size: int
    recorder: Recorder

    def blocks(self, phase: Phase, ids: Tensor, k: Tensor) -> Blocks:
        """Blocks of a phase's clients, in canonical order."""
        ...

    def run(
        self, phase: Phase, broadcast: Any, clients: Any, about: ClientData, block: Block
    ) -> tuple[Any, Any]:
        """New private records and uploads of a block, with a leading client axis."""
        ...

    def predict(
        self,
        function: Callable[[Any, Any, Any, Any], Tensor],
        broadcast: Any,
        clients: Any,
        about: ClientData,
        ids: Tensor,
        rows: Any,
        unbatched: frozenset[str],
        per_client: frozenset[str] = frozenset(),
    ) -> Tensor:
        """Outputs for a split's rows of each client, joined in the clients' order."""
        ...


_IN_THIS_PROCESS: dict[str, Callable[..., Executor]] = {
    "loop": LoopExecutor,
    "stacked": StackedExecutor,
    "wire": WireExecutor,
}


def make_executor(
    engine: str,
    algorithm: Algorithm,
    data: FederatedData,
    *,
    seed: int,
    block_size: int,
    workers: int,
) -> Executor:
    """Return what runs the blocks of a federation."""
    if engine == "workers":
        return WorkersExecutor(algorithm, data, seed, block_size, workers)
    if engine == "ray":
        return RayExecutor(algorithm, data, seed, block_size, workers)
    return _IN_THIS_PROCESS[engine](data, algorithm.per_row, block_size)
