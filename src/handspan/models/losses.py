"""Losses of single rows; means over a batch's real rows are taken by the task."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from handspan.core.errors import HandspanError

RowLoss = Callable[[Tensor, Tensor], Tensor]
IGNORED = -100  # label of positions that do not count, torch's own default


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each row; for sequences the mean over the row's positions.

    Parameters
    ----------
    outputs
        (rows, classes), or (rows, time, classes).
    y
        (rows,) int64, or (rows, time) where -100 marks positions that do not count.
    """
    if outputs.dim() == 2 and y.dim() == 1:
        return functional.cross_entropy(outputs, y, reduction="none")
    if outputs.dim() != 3 or y.shape != outputs.shape[:2]:
        raise HandspanError(
            f"outputs of shape {tuple(outputs.shape)} do not fit labels of shape {tuple(y.shape)}: "
            "classification takes (rows, classes) and (rows,), or (rows, time, classes) and "
            "(rows, time)"
        )
    single = functional.cross_entropy(
        outputs.flatten(0, 1), y.flatten(), reduction="none", ignore_index=IGNORED
    ).reshape(y.shape)
    count = (y != IGNORED).sum(1).to(single.dtype)
    return single.sum(1) / count.clamp_min(1.0)


def half_squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Half of the squared error of each row, averaged over the outputs.

    The half makes the gradient of a single output the plain residual.
    """
    if outputs.numel() != y.numel():
        raise HandspanError(
            f"outputs of shape {tuple(outputs.shape)} do not fit targets of shape {tuple(y.shape)}"
        )
    error = (outputs - y.reshape(outputs.shape)).square()
    return 0.5 * (error if error.dim() == 1 else error.flatten(1).mean(1))


def checked(function: RowLoss) -> RowLoss:
    """Wrap a user's loss so that anything but one number per row is refused."""

    def row_loss(outputs: Tensor, y: Tensor) -> Tensor:
        values = function(outputs, y)
        if values.dim() != 1 or values.shape[0] != y.shape[0]:
            raise HandspanError(
                "the loss function must return one loss per row, of shape "
                f"({y.shape[0]},), not {tuple(values.shape)}; with torch's losses pass "
                "reduction='none'"
            )
        return values

    return row_loss


BUILT_IN: dict[str, RowLoss] = {
    "classification": cross_entropy,
    "regression": half_squared_error,
}
