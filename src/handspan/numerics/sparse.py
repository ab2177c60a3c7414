"""Products with rows that are dense or compressed, never made dense."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from handspan.core.data import Csr


def times(x: Any, matrix: Tensor) -> Tensor:
    """``x @ matrix`` for rows x (rows, columns)."""
    if isinstance(x, Csr):
        return _product(x, matrix, transposed=False)
    return x @ matrix


def transposed_times(x: Any, matrix: Tensor) -> Tensor:
    """``x.T @ matrix`` for rows x (rows, columns)."""
    if isinstance(x, Csr):
        return _product(x, matrix, transposed=True)
    return x.T @ matrix


def residual(x: Any, rows: Tensor, basis: Tensor) -> Any:
    """``rows @ basis.T - x`` where x is known: its stored entries, or those that are not 0."""
    if not isinstance(x, Csr):
        return torch.where(x != 0, rows @ basis.T - x, torch.zeros_like(x))
    owner = torch.repeat_interleave(torch.arange(len(x)), x.indptr.diff())
    fitted = (rows[owner] * basis[x.indices]).sum(1)
    return dataclasses.replace(x, values=fitted - x.values)


def entries(x: Any, weight: Tensor, padding: float = 0.0) -> Tensor:
    """Stored entries of the rows; dense rows of weight 0 are filled with ``padding``."""
    if isinstance(x, Csr):
        return x.values
    return torch.where(weight.unsqueeze(1) > 0, x, torch.full_like(x, padding))


def extremes(x: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest entry of the real rows; what compressed rows do not store is 0."""
    least = entries(x, weight, float("inf")).amin()
    largest = entries(x, weight, -float("inf")).amax()
    if isinstance(x, Csr) and len(x.values) < len(x) * int(x.num_columns):
        return least.clamp(max=0), largest.clamp(min=0)
    return least, largest


def _product(x: Csr, matrix: Tensor, *, transposed: bool) -> Tensor:
    shape = (len(x), int(x.num_columns))
    if matrix.device.type == "cpu":  # SciPy's products are 2 to 50 times faster than torch's here
        import scipy.sparse

        rows = scipy.sparse.csr_array(
            (x.values.numpy(), x.indices.numpy(), x.indptr.numpy()), shape=shape, copy=False
        )
        product = (rows.T if transposed else rows) @ matrix.contiguous().numpy()
        return torch.from_numpy(product)
    rows = torch.sparse_csr_tensor(x.indptr, x.indices, x.values, shape)
    return (rows.transpose(0, 1) if transposed else rows) @ matrix
