"""From a user's module to layers that work for stacked clients, or a clear refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import batchnorm, instancenorm, lazy

from handspan.core.errors import HandspanError, nearest
from handspan.models import layers, recurrent
from handspan.models.attention import PlainAttention
from handspan.models.skeleton import ForwardContext

_REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: layers.WeightedBatchNorm1d,
    nn.BatchNorm2d: layers.WeightedBatchNorm2d,
    nn.BatchNorm3d: layers.WeightedBatchNorm3d,
    nn.Dropout: layers.KeyedDropout,
    nn.Dropout1d: layers.KeyedDropout1d,
    nn.Dropout2d: layers.KeyedDropout2d,
    nn.Dropout3d: layers.KeyedDropout3d,
    nn.LSTM: recurrent.CellLSTM,
    nn.GRU: recurrent.CellGRU,
    nn.RNN: recurrent.CellRNN,
    nn.LSTMCell: recurrent.PlainLSTMCell,
    nn.GRUCell: recurrent.PlainGRUCell,
    nn.RNNCell: recurrent.PlainRNNCell,
    nn.MultiheadAttention: PlainAttention,
}
_RANDOM = (
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
_FAMILIES = (
    batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)


def replace_layers(module: nn.Module, context: ForwardContext) -> None:
    """Change the layers of a module (the caller's own copy) that would not work stacked."""
    for name, layer in module.named_modules():
        reason = _refusal(layer)
        if reason is not None:
            kind = type(layer).__name__
            raise HandspanError(f"layer {name or 'model'!r} ({kind}) is not supported: {reason}")
    for layer in module.modules():
        replacement = _REPLACED.get(type(layer))
        if replacement is not None:
            layer.__class__ = replacement
            layer.context = context  # type: ignore[assignment]
        _adjust(layer)


def _adjust(layer: Any) -> None:
    if isinstance(layer, batchnorm._BatchNorm):
        tracked = layer._buffers["num_batches_tracked"]
        # Only a cumulative average needs the count, and it travels as a floating point number.
        layer._buffers["num_batches_tracked"] = (
            torch.zeros((), dtype=torch.float32, device=tracked.device)
            if layer.momentum is None and tracked is not None
            else None
        )
    elif isinstance(layer, nn.RNNBase):
        # Second references to the weights, for fused kernels only.
        layer._flat_weights = []
    elif isinstance(layer, PlainAttention):
        layer._qkv_same_embed_dim = False  # closes the fused path of TransformerEncoderLayer
    elif isinstance(layer, nn.TransformerEncoder):
        layer.use_nested_tensor = False


def _refusal(layer: nn.Module) -> str | None:
    """Say why a layer cannot be supported, or None."""
    if isinstance(layer, nn.SyncBatchNorm):
        return "clients do not share batches; use BatchNorm or GroupNorm"
    for family in _FAMILIES:
        if isinstance(layer, family) and type(layer) not in (*_REPLACED, *_RANDOM):
            return "subclasses of this torch layer cannot be converted; use torch's own class"
    if isinstance(layer, _RANDOM):
        return "it draws from the global random generator; use Dropout or a layer without chance"
    if isinstance(layer, lazy.LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
        return "its shapes are not known yet; run the model once on a batch before"
    if isinstance(layer, torch.jit.ScriptModule) or type(layer).__name__ == "OptimizedModule":
        return "compiled modules cannot be given other weights; give the plain module"
    return _normalisation(layer) or _embedding(layer) or _recurrent(layer) or _reparametrised(layer)


def _normalisation(layer: nn.Module) -> str | None:
    if isinstance(layer, instancenorm._InstanceNorm) and layer.track_running_stats:
        return "InstanceNorm with running statistics; leave track_running_stats=False"
    if isinstance(layer, batchnorm._BatchNorm) and not layer.track_running_stats:
        return (
            "without running statistics a prediction depends on the rows it comes with; leave "
            "track_running_stats=True or use GroupNorm"
        )
    return None


def _embedding(layer: nn.Module) -> str | None:
    if isinstance(layer, nn.EmbeddingBag):
        return "it cannot be stacked over clients; use Embedding and take the mean"
    if isinstance(layer, nn.Embedding):
        if layer.sparse:
            return "sparse gradients cannot be stacked over clients; leave sparse=False"
        if layer.max_norm is not None:
            return "max_norm changes the weights in place during the forward pass; leave it out"
        if layer.scale_grad_by_freq:
            return "scale_grad_by_freq would count padding rows; leave it False"
    return None


def _recurrent(layer: nn.Module) -> str | None:
    if isinstance(layer, nn.LSTM) and layer.proj_size:
        return "proj_size is not supported; put a Linear layer behind the LSTM"
    if isinstance(layer, nn.MultiheadAttention):
        if not layer._qkv_same_embed_dim:
            return "kdim and vdim must equal embed_dim"
        if layer.bias_k is not None or layer.add_zero_attn:
            return "add_bias_kv and add_zero_attn are not supported"
    return None


def _reparametrised(layer: nn.Module) -> str | None:
    hooks = list(layer._forward_pre_hooks.values())
    if hasattr(layer, "parametrizations") or any(
        type(hook).__module__.startswith("torch.nn.utils") for hook in hooks
    ):
        return "parametrised weights (spectral_norm, weight_norm, pruning) are not supported"
    return None


def find_head(module: nn.Module, head: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names of the head: modules, or single parameters, as given; or the last linear layer."""
    if head is not None:
        prefixes = (head,) if isinstance(head, str) else tuple(head)
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        for prefix in prefixes:
            if not any(name == prefix or name.startswith(f"{prefix}.") for name in names):
                known = [name for name, _ in module.named_modules() if name] + names
                raise HandspanError(f"the model has no part {prefix!r}{nearest(prefix, known)}")
        return prefixes
    with_parameters = [
        (name, child)
        for name, child in module.named_modules()
        if any(parameter.requires_grad for parameter in child.parameters(recurse=False))
    ]
    linear = [name for name, child in with_parameters if isinstance(child, nn.Linear)]
    if not with_parameters:
        raise HandspanError("the model has no trainable parameters")
    return (linear[-1] if linear else with_parameters[-1][0],)
