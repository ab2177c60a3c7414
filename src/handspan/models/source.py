"""Where a task's fresh weights come from, as a pure function of a key."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from handspan.core import keys
from handspan.core.errors import HandspanError

Factory = Callable[[], nn.Module]


class Source:
    """Where fresh weights come from: a factory, or a module that is re-initialised."""

    def __init__(self, given: nn.Module | Factory, keep_weights: bool) -> None:
        self.keep_weights = keep_weights
        self.template = copy.deepcopy(given) if isinstance(given, nn.Module) else None
        if self.template is None and not callable(given):
            raise HandspanError(
                f"the model must be a torch module or a function, not {type(given).__name__}"
            )
        self.factory = None if isinstance(given, nn.Module) else given

    def structure(self) -> nn.Module:
        """Return a copy whose layers may be changed."""
        if self.template is not None:
            return copy.deepcopy(self.template)
        # A factory may hand out one and the same module again and again: never change it.
        return copy.deepcopy(self.fresh(keys.key(0, "constants")))

    def fresh(self, key: Tensor) -> nn.Module:
        """Return a module with weights drawn by the key."""
        with reproducible(key):
            if self.factory is not None:
                module = self.factory()
                if not isinstance(module, nn.Module):
                    raise HandspanError(
                        f"the model factory returned {type(module).__name__}, not a torch module"
                    )
                return module
            assert self.template is not None
            module = copy.deepcopy(self.template)
            return module if self.keep_weights else _reset(module)


def fresh_copy(module: nn.Module) -> nn.Module:
    """Return a copy whose layers start anew, drawn from torch's generator."""
    return _reset(copy.deepcopy(module))


@contextmanager
def reproducible(key: Tensor) -> Iterator[None]:
    """Seed torch's CPU generator from a key; generator and defaults are put back afterwards.

    Always float32 on the CPU, so that runs on other devices and in other types start alike.
    """
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        try:
            # Not torch.manual_seed, which reseeds the GPUs as well.
            torch.default_generator.manual_seed(keys.seed_of(key))
            yield
        finally:
            torch.set_default_dtype(dtype)


def _reset(module: nn.Module) -> nn.Module:
    # Children first: a parent's rule for its children (attention's output bias) has the last word.
    for layer in reversed(list(module.modules())):
        own = list(layer.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            continue  # frozen: pretrained statistics must survive as well
        for name in ("reset_parameters", "_reset_parameters"):
            reset: Any = getattr(layer, name, None)
            if callable(reset):
                reset()
                break
    return module
