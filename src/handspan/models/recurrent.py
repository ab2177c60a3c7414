"""Recurrent layers written out cell by cell.

Torch's fused kernels have no batching rule: under ``vmap`` they take the slow path. Weights keep
their names and order, results equal torch's. A single client on the CPU still takes the fused
kernel, which is three times faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from handspan.core.errors import HandspanError
from handspan.models.layers import drop
from handspan.models.skeleton import ForwardContext

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _lstm_step(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_step(given: Tensor, hidden: Tensor, h: Tensor) -> Tensor:
    input_r, input_z, input_n = given.chunk(3, -1)
    hidden_r, hidden_z, hidden_n = hidden.chunk(3, -1)
    z = torch.sigmoid(input_z + hidden_z)
    n = torch.tanh(input_n + torch.sigmoid(input_r + hidden_r) * hidden_n)
    return n + z * (h - n)


def _lstm_scan(x: Tensor, state: tuple[Tensor, ...], weights: Weights) -> Any:
    input_weight, hidden_weight, input_bias, hidden_bias = weights
    h, c = state
    bias = None if input_bias is None or hidden_bias is None else input_bias + hidden_bias
    recurrent = hidden_weight.t()
    outputs: list[Tensor] = []
    for given in functional.linear(x, input_weight, bias).unbind(0):
        h, c = _lstm_step(given + h @ recurrent, c)
        outputs.append(h)
    return torch.stack(outputs), (h, c)


def _gru_scan(x: Tensor, state: tuple[Tensor, ...], weights: Weights) -> Any:
    input_weight, hidden_weight, input_bias, hidden_bias = weights
    (h,) = state
    outputs: list[Tensor] = []
    for given in functional.linear(x, input_weight, input_bias).unbind(0):
        h = _gru_step(given, functional.linear(h, hidden_weight, hidden_bias), h)
        outputs.append(h)
    return torch.stack(outputs), (h,)


def _rnn_scan(x: Tensor, state: tuple[Tensor, ...], weights: Weights, relu: bool) -> Any:
    input_weight, hidden_weight, input_bias, hidden_bias = weights
    (h,) = state
    bias = None if input_bias is None or hidden_bias is None else input_bias + hidden_bias
    recurrent = hidden_weight.t()
    outputs: list[Tensor] = []
    for given in functional.linear(x, input_weight, bias).unbind(0):
        h = torch.relu(given + h @ recurrent) if relu else torch.tanh(given + h @ recurrent)
        outputs.append(h)
    return torch.stack(outputs), (h,)


class _Cells:
    """The walk over layers and directions, common to all three kinds."""

    num_states = 1

    def flatten_parameters(self) -> None:
        """Do nothing: there is no fused kernel to prepare weights for."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return (output, last state), as the layer that this one replaces."""
        if not isinstance(input, Tensor) or input.dim() != 3:
            raise HandspanError(
                f"{type(self).__name__} takes sequences as one tensor with three axes "
                "(rows, time, features); packed and single sequences are not supported"
            )
        if self._may_fuse(input):
            return self._fused(input, hx)
        x = input.transpose(0, 1) if self.batch_first else input  # type: ignore[attr-defined]
        given = _states(hx, self.num_states)
        directions = 2 if self.bidirectional else 1  # type: ignore[attr-defined]
        last: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):  # type: ignore[attr-defined]
            parts: list[Tensor] = []
            for direction in range(directions):
                index = layer * directions + direction
                output, state = self._direction(x, given, layer, direction, index)
                parts.append(output)
                last.append(state)
            x = parts[0] if directions == 1 else torch.cat(parts, -1)
            x = self._between(x, layer)
        output = x.transpose(0, 1) if self.batch_first else x  # type: ignore[attr-defined]
        states = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
        return output, states if self.num_states > 1 else states[0]

    def _may_fuse(self, x: Tensor) -> bool:
        # Not on a GPU, where cuDNN wants weights in one piece and promises no equal results.
        own: Any = self
        random = own.training and own.dropout > 0.0 and own.num_layers > 1
        inside = torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]
        return not (random or inside) and x.device.type == "cpu"

    def _fused(self, x: Tensor, hx: Any) -> Any:
        own: Any = self
        weights = [own._parameters[name] for name in own._flat_weights_names]
        if hx is None:
            directions = 2 if own.bidirectional else 1
            rows = x.shape[0 if own.batch_first else 1]
            zero = x.new_zeros(own.num_layers * directions, rows, own.hidden_size)
            hx = (zero, zero) if self.num_states > 1 else zero
        output, *states = getattr(torch, self.kernel())(
            x, hx, weights, own.bias, own.num_layers, 0.0, False, own.bidirectional, own.batch_first
        )
        return output, tuple(states) if self.num_states > 1 else states[0]

    def kernel(self) -> str:
        """Name of torch's function for one client."""
        raise NotImplementedError

    def _direction(
        self, x: Tensor, given: tuple[Tensor, ...] | None, layer: int, direction: int, index: int
    ) -> Any:
        own: Any = self
        suffix = f"_l{layer}" + ("_reverse" if direction else "")
        weights = tuple(
            own._parameters.get(f"{name}{suffix}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        if given is None:
            zero = x.new_zeros(x.shape[1], own.hidden_size)
            state = (zero,) * self.num_states
        else:
            state = tuple(part[index] for part in given)
        output, state = self._scan(x.flip(0) if direction else x, state, weights)
        return output.flip(0) if direction else output, state

    def _between(self, x: Tensor, layer: int) -> Tensor:
        own: Any = self
        if not own.training or own.dropout == 0.0 or layer == own.num_layers - 1:
            return x
        context: ForwardContext = own.context
        # Masks are hashed with rows first, so that padding rows do not change those of real rows.
        rows_first = x.transpose(0, 1)
        return drop(rows_first, context, own.dropout, tuple(rows_first.shape)).transpose(0, 1)

    def _scan(self, x: Tensor, state: tuple[Tensor, ...], weights: Any) -> Any:
        raise NotImplementedError


def _states(hx: Any, count: int) -> tuple[Tensor, ...] | None:
    if hx is None:
        return None
    return tuple(hx) if count > 1 else (hx,)


class CellLSTM(_Cells, nn.LSTM):
    """Long short-term memory."""

    num_states = 2

    def kernel(self) -> str:
        """Name of torch's function for one client."""
        return "lstm"

    def _scan(self, x: Tensor, state: tuple[Tensor, ...], weights: Any) -> Any:
        return _lstm_scan(x, state, weights)


class CellGRU(_Cells, nn.GRU):
    """Gated recurrent units."""

    def kernel(self) -> str:
        """Name of torch's function for one client."""
        return "gru"

    def _scan(self, x: Tensor, state: tuple[Tensor, ...], weights: Any) -> Any:
        return _gru_scan(x, state, weights)


class CellRNN(_Cells, nn.RNN):
    """Elman network with tanh or ReLU."""

    def kernel(self) -> str:
        """Name of torch's function for one client."""
        return f"rnn_{self.nonlinearity}"

    def _scan(self, x: Tensor, state: tuple[Tensor, ...], weights: Any) -> Any:
        return _rnn_scan(x, state, weights, self.nonlinearity == "relu")


def _cell_parts(cell: nn.RNNCellBase, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the input gives, what the state gives, and the state."""
    h = x.new_zeros(*x.shape[:-1], cell.hidden_size) if h is None else h
    given = functional.linear(x, cell.weight_ih, cell.bias_ih)
    return given, functional.linear(h, cell.weight_hh, cell.bias_hh), h


class PlainLSTMCell(nn.LSTMCell):
    """One step of an LSTM, for loops that users write themselves."""

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the next (h, c)."""
        given, hidden, h = _cell_parts(self, input, None if hx is None else hx[0])
        return _lstm_step(given + hidden, torch.zeros_like(h) if hx is None else hx[1])


class PlainGRUCell(nn.GRUCell):
    """One step of gated recurrent units."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next state."""
        return _gru_step(*_cell_parts(self, input, hx))


class PlainRNNCell(nn.RNNCell):
    """One step of an Elman network."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next state."""
        given, hidden, _ = _cell_parts(self, input, hx)
        return (
            torch.relu(given + hidden)
            if self.nonlinearity == "relu"
            else torch.tanh(given + hidden)
        )
