"""Any ``nn.Module`` as a :class:`~handspan.core.task.Task`.

The module is converted once, when the task is built; the user's own module is never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from handspan.core.data import Batch
from handspan.core.errors import HandspanError
from handspan.core.records import Params
from handspan.core.task import Task
from handspan.models.losses import BUILT_IN, RowLoss, checked
from handspan.models.probe import probe
from handspan.models.skeleton import Capture, ForwardContext, Skeleton, meta_like
from handspan.models.source import Factory, Source
from handspan.models.structure import find_head, replace_layers


def task_from_module(
    module_or_factory: nn.Module | Factory,
    *,
    kind: Literal["classification", "regression"] = "classification",
    loss: RowLoss | None = None,
    head: str | Sequence[str] | None = None,
    needs_side: bool = False,
    num_outputs: int | None = None,
    sample: Tensor | tuple[Tensor, Tensor] | None = None,
    keep_weights: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ModuleTask:
    """Turn a module, or a function that makes one, into a task.

    Parameters
    ----------
    module_or_factory
        A module, whose layers are re-initialised by ``init``, or a function without arguments
        that builds a fresh one. Parameters with ``requires_grad=False`` stay in the task as
        constants, with the values of this first construction.
    kind
        Cross-entropy on int64 labels, or half the squared error averaged over the outputs.
    loss
        Another loss (outputs, y) -> one number per row.
    head
        Name of the last layer, or several; by default the last ``nn.Linear``.
    needs_side
        Whether the module is called as ``module(x, side)``, side with one entry per row.
    num_outputs
        Width of the outputs; by default read off the head, or off ``sample``.
    sample
        A few rows, or rows and one client's side information: the model is tried on them, so that
        what does not work is refused here and not in the first round.
    keep_weights
        Start from the module's own weights (a pretrained model) whatever the key.
    dtype, device
        Of parameters, buffers and constants.

    Examples
    --------
    >>> from handspan.core import keys
    >>> task = task_from_module(nn.Linear(3, 2))
    >>> params, buffers = task.init(keys.key(0))
    >>> sorted(params), task.num_outputs
    (['bias', 'weight'], 2)
    """
    if kind not in BUILT_IN:
        raise HandspanError(f"kind must be 'classification' or 'regression', not {kind!r}")
    source = Source(module_or_factory, keep_weights)
    row_loss = BUILT_IN[kind] if loss is None else checked(loss)
    task = ModuleTask(source, kind, row_loss, head, needs_side, dtype, torch.device(device))
    outputs = None if sample is None else task.try_on(sample)
    task.settle_num_outputs(num_outputs, outputs)
    return task


class ModuleTask(Task):
    """A task whose model is a module; build it by :func:`task_from_module`."""

    def __init__(
        self,
        source: Source,
        kind: str,
        row_loss: RowLoss,
        head: str | Sequence[str] | None,
        needs_side: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kind = kind
        self.needs_side = needs_side
        self.dtype = dtype
        self.device = device
        self._source = source
        self._row_loss = row_loss
        module, context = source.structure(), ForwardContext()
        replace_layers(module, context)
        trainable, buffers = _named_tensors(module)
        self.names = tuple(sorted(trainable))
        self.buffer_names = tuple(sorted(buffers))
        self._head_parts = find_head(module, head)
        self.head = _head_names(module, trainable, self._head_parts)
        self._inferred_outputs = _num_outputs(module, self._head_parts)
        places = _to_meta(module, trainable | buffers, dtype, device)
        self._train = Skeleton(module.train(), places, context)
        self._eval = _evaluation_twin(module, places, context, self._head_parts)
        self._tiny = torch.finfo(dtype).tiny

    def init(self, key: Tensor) -> tuple[Params, Params]:
        """Fresh trainable parameters and buffers, a pure function of the key."""
        module = self._source.fresh(key)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())

        def pick(names: tuple[str, ...]) -> Params:
            # A copy in any case: parameters are the caller's own from here on.
            return {
                name: tensors[name].detach().to(self.device, self.dtype, copy=True)
                for name in names
            }

        try:
            return pick(self.names), pick(self.buffer_names)
        except KeyError as error:
            raise HandspanError(
                f"the model factory built another model than before: {error} is missing"
            ) from None
        except NotImplementedError:
            raise HandspanError(
                "the model has parameters without values (device 'meta'): make it on the CPU"
            ) from None

    def loss(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Mean training loss over the batch's real rows, and the new buffers."""
        if batch.y is None:
            raise HandspanError("this task needs labels, and the data have none")
        weight = batch.weight
        inputs = self._inputs(batch.x, batch.side)
        outputs, buffers = self._train(params, buffers, inputs, weight, batch.key)
        # The bound makes the loss of a batch without real rows 0 instead of 0/0. Shares first:
        # what needs no gradient costs no backward pass.
        share = weight / weight.sum().clamp_min(self._tiny)
        return (self._row_loss(outputs, batch.y) * share).sum(), buffers

    def predict(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Outputs (logits, or values) for rows, in evaluation mode."""
        return self._eval(params, buffers, self._inputs(x, side))[0]

    def features(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Input of the head for rows, in evaluation mode."""
        captured = self._eval.capture(params, buffers, self._inputs(x, side))
        if captured is None:
            raise HandspanError(
                f"the head {', '.join(self._head_parts)} is no layer that the model calls, so it "
                "has no features; name a layer as head"
            )
        return captured

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Loss of each row, from the outputs."""
        return self._row_loss(outputs, y)

    def try_on(self, sample: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Try the model on a few rows, stacked and alone; returns its outputs."""
        x, side = sample if isinstance(sample, tuple) else (sample, None)

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

        modules = (self._train.module, self._eval.module)
        return probe(self, modules, convert(x), None if side is None else convert(side))

    def settle_num_outputs(self, given: int | None, outputs: Tensor | None) -> None:
        """Decide the width of the outputs, and refuse contradictions."""
        seen = None if outputs is None else (1 if outputs.dim() == 1 else outputs.shape[-1])
        if given is not None and seen is not None and given != seen:
            raise HandspanError(f"the model has {seen} outputs where {given} are needed")
        found = given or seen or self._inferred_outputs
        if found is None:
            raise HandspanError("the width of the outputs is not clear; pass num_outputs or sample")
        self.num_outputs = int(found)

    def _inputs(self, x: Tensor, side: Tensor | None) -> tuple[Tensor, ...]:
        if not self.needs_side:
            return (x,)
        if side is None:
            raise HandspanError("the model needs side information, and the data have none")
        return x, side.expand(x.shape[0], side.shape[-1])


def _named_tensors(module: nn.Module) -> tuple[Params, Params]:
    """Trainable parameters and travelling buffers; the rest are constants of the task."""
    trainable: Params = {n: p for n, p in module.named_parameters() if p.requires_grad}
    hidden = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in child._non_persistent_buffers_set
    }
    buffers: Params = {
        name: buffer
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and name not in hidden
    }
    if not trainable:
        raise HandspanError("the model has no trainable parameters")
    return trainable, buffers


def _head_names(module: nn.Module, trainable: Params, parts: tuple[str, ...]) -> tuple[str, ...]:
    canonical = {id(tensor): name for name, tensor in trainable.items()}
    found = {
        canonical[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        for part in parts
        if (not part or name == part or name.startswith(f"{part}.")) and id(parameter) in canonical
    }
    if not found:
        raise HandspanError(f"the head {', '.join(parts)} has no trainable parameters")
    return tuple(sorted(found))


def _num_outputs(module: nn.Module, parts: tuple[str, ...]) -> int | None:
    children = dict(module.named_modules())
    inside = [layer for part in parts if part in children for layer in children[part].modules()]
    widths = [layer.out_features for layer in inside if isinstance(layer, nn.Linear)]
    return widths[-1] if widths else None


def _to_meta(module: nn.Module, named: Params, dtype: torch.dtype, device: torch.device) -> Params:
    """Take travelling tensors out of a module; constants get the task's type and device."""
    stand_in = {id(tensor): meta_like(tensor) for tensor in named.values()}
    constant: dict[int, Tensor] = {}

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) in stand_in:
            return stand_in[id(tensor)]
        if id(tensor) not in constant:
            target = dtype if tensor.is_floating_point() else tensor.dtype
            constant[id(tensor)] = tensor.detach().to(device, target)
        return constant[id(tensor)]

    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = convert(tensor)  # type: ignore[assignment]
    return {name: stand_in[id(tensor)] for name, tensor in named.items()}


def _evaluation_twin(
    module: nn.Module, places: Params, context: ForwardContext, parts: tuple[str, ...]
) -> Skeleton:
    """Copy in evaluation mode, constants shared: switching modes would walk all layers."""
    shared = [tensor for child in module.modules() for tensor in child._buffers.values()]
    shared += [tensor for child in module.modules() for tensor in child._parameters.values()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared if tensor is not None}
    own = ForwardContext()
    memo[id(context)] = own
    twin = copy.deepcopy(module, memo).eval()
    children = dict(twin.named_modules())
    for part in parts:
        if part in children:
            children[part].register_forward_pre_hook(Capture(own))
    return Skeleton(twin, places, own)
