"""Products with rows that are dense or compressed, never made dense."""

from __future__ import annotations

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


def stored(x: Any) -> Tensor:
    """Stored entries of the rows: all of them, or the compressed ones."""
    return x.values if isinstance(x, Csr) else x


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
