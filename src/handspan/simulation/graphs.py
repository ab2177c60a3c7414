"""CUDA graphs: a run of kernels on memory that stays in place, launched as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Graphs(Protocol):
    """Makes graphs of functions that read and write nothing but fixed memory."""

    def warm_up(self, work: Work) -> None:
        """Do the work once, as it is to be captured."""
        ...

    def capture(self, work: Work) -> Work:
        """Return what does the work again; nothing is done yet."""
        ...


class CudaGraphs:
    """Graphs on a GPU, their temporary memory in one pool: they never run at once."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool = None

    def warm_up(self, work: Work) -> None:
        """Do the work on the stream of captures: libraries set themselves up for it."""
        stream = self._side()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            work()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, work: Work) -> Work:
        """Capture the work, which is not done meanwhile."""
        stream = self._side()
        graph = torch.cuda.CUDAGraph()
        with (
            torch.no_grad(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ),
        ):
            work()
        return graph.replay

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        return self._stream
