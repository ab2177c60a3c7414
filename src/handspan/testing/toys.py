"""Tiny problems on which every method can be checked in a moment.

All are pure functions of a seed. Clients are ragged: one has a single training row, several have
fewer rows than a usual rank, and most have validation rows, so that a confusion of splits shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from handspan.core import keys
from handspan.core.data import Batch, Csr, FederatedData
from handspan.core.method import Method, Setting
from handspan.core.records import Params
from handspan.core.task import Task
from handspan.numerics.local_work import LocalWork

SIZES = (1, 6, 3, 9, 4, 2, 5, 7, 3, 8, 4)
"""Training rows of the toy clients."""
NUM_FEATURES, NUM_HIDDEN, NUM_CLASSES, NUM_SIDE, NUM_GROUPS = 4, 3, 3, 2, 3


class ToyTask(Task):
    """A network with one hidden layer, written by hand: features = tanh(hidden x).

    Parameters
    ----------
    side_width
        Width of a linear encoder of the client's side information, joined to the features; 0
        for a model that reads none.
    has_norm
        Whether the hidden layer is normalised over the batch, before tanh.
    dtype
        Type of the parameters.
    """

    kind = "classification"
    num_outputs = NUM_CLASSES
    head = ("head.weight", "head.bias")

    def __init__(
        self, *, side_width: int = 0, has_norm: bool = False, dtype: torch.dtype = torch.float64
    ) -> None:
        self.side_width = side_width
        self.needs_side = side_width > 0
        self.has_norm = has_norm
        self.dtype = dtype
        self.shapes = {
            "hidden.weight": (NUM_HIDDEN, NUM_FEATURES),
            "hidden.bias": (NUM_HIDDEN,),
            "head.weight": (NUM_CLASSES, NUM_HIDDEN + side_width),
            "head.bias": (NUM_CLASSES,),
        }
        if side_width:
            self.shapes |= {"encoder.weight": (side_width, NUM_SIDE), "encoder.bias": (side_width,)}
        if has_norm:
            self.shapes |= {"norm.weight": (NUM_HIDDEN,), "norm.bias": (NUM_HIDDEN,)}
        self.names = tuple(self.shapes)

    def init(self, key: Tensor) -> tuple[Params, Params]:
        """Draw all parameters from one normal distribution; running statistics are 0 and 1."""
        zero, one = torch.zeros(NUM_HIDDEN), torch.ones(NUM_HIDDEN)
        buffers = {"norm.running_mean": zero, "norm.running_var": one} if self.has_norm else {}
        return {
            name: 0.5 * keys.normal(keys.fold(key, name), shape, self.dtype)
            for name, shape in self.shapes.items()
        }, {name: value.to(self.dtype) for name, value in buffers.items()}

    def normalised(self, params: Params, buffers: Params, hidden: Tensor) -> Tensor:
        """Normalise the hidden layer by the given statistics."""
        scale = params["norm.weight"] / (buffers["norm.running_var"] + 1e-5).sqrt()
        return scale * (hidden - buffers["norm.running_mean"]) + params["norm.bias"]

    def statistics(self, params: Params, batch: Batch) -> Params:
        """Mean and variance of the hidden layer over the real rows of a batch."""
        hidden = batch.x @ params["hidden.weight"].T + params["hidden.bias"]
        share = (batch.weight / batch.weight.sum()).unsqueeze(1)
        hidden = torch.where(share > 0, hidden, 0.0)  # padding may hold anything
        mean = (share * hidden).sum(0)
        return {
            "norm.running_mean": mean,
            "norm.running_var": (share * (hidden - mean).square()).sum(0),
        }

    def features(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Input of the head."""
        hidden = x @ params["hidden.weight"].T + params["hidden.bias"]
        hidden = torch.tanh(self.normalised(params, buffers, hidden) if self.has_norm else hidden)
        if not self.needs_side:
            return hidden
        assert side is not None
        code = params["encoder.weight"] @ side + params["encoder.bias"]
        return torch.cat([hidden, code.expand(*hidden.shape[:-1], self.side_width)], dim=-1)

    def predict(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Logits."""
        features = self.features(params, buffers, x, side)
        return features @ params["head.weight"].T + params["head.bias"]

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of each row."""
        return torch.nn.functional.cross_entropy(outputs, y, reduction="none")

    def loss(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Mean over the real rows; running statistics go a tenth of the way to the batch's."""
        if self.has_norm:
            now = self.statistics(params, batch)
            outputs = self.predict(params, now, batch.x, batch.side)
            buffers = {n: 0.9 * b + 0.1 * now[n].detach() for n, b in buffers.items()}
        else:
            outputs = self.predict(params, buffers, batch.x, batch.side)
        assert batch.y is not None
        losses = self.row_loss(outputs, batch.y)
        return (losses * batch.weight).sum() / batch.weight.sum(), buffers


class LinearTask(Task):
    """A linear model of numbers: outputs = weight x + bias, the loss half the squared error."""

    kind = "regression"
    num_outputs = 1
    names = head = ("bias", "weight")

    def __init__(self, *, num_features: int = NUM_FEATURES, dtype: torch.dtype = torch.float64):
        self.shapes = {"weight": (1, num_features), "bias": (1,)}
        self.dtype = dtype

    def init(self, key: Tensor) -> tuple[Params, Params]:
        """Draw all parameters from one normal distribution."""
        return {
            name: keys.normal(keys.fold(key, name), shape, self.dtype)
            for name, shape in self.shapes.items()
        }, {}

    def features(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Return the rows: there is no other layer."""
        return x

    def predict(self, params: Params, buffers: Params, x: Tensor, side: Tensor | None) -> Tensor:
        """Values (rows, 1)."""
        return x @ params["weight"].T + params["bias"]

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Half the squared error of each row."""
        return 0.5 * (outputs.squeeze(-1) - y).square()

    def loss(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Mean over the real rows."""
        assert batch.y is not None
        losses = self.row_loss(self.predict(params, buffers, batch.x, None), batch.y)
        return (losses * batch.weight).sum() / batch.weight.sum(), buffers


class Teachers(NamedTuple):
    """Planted linear models: y = <basis head_i, x>."""

    basis: Tensor  # (d, k) orthonormal
    heads: Tensor  # (n, k)


def teachers(
    seed: int = 0, *, num_clients: int = len(SIZES), num_features: int = NUM_FEATURES, rank: int = 2
) -> Teachers:
    """Draw models of a common subspace, heads of norm sqrt(rank) (Collins et al., Assumption 3)."""
    k = keys.key(seed, "toys", "teachers")
    basis = torch.linalg.qr(keys.normal(keys.fold(k, "basis"), (num_features, rank))).Q
    heads = keys.normal(keys.fold(k, "heads"), (num_clients, rank))
    return Teachers(basis, heads * (rank**0.5 / heads.norm(dim=1, keepdim=True)))


def numbers(
    seed: int = 0,
    *,
    sizes: Sequence[int] = SIZES,
    num_features: int = NUM_FEATURES,
    rank: int = 2,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> FederatedData:
    """Rows x ~ N(0, I) with labels of the clients' ``teachers``, plus noise of that deviation."""
    k = keys.key(seed, "toys", "numbers")
    train, validation, test, offsets = _splits(sizes)
    count, n = int(offsets[-1]), len(sizes)
    planted = teachers(seed, num_clients=n, num_features=num_features, rank=rank)
    x = keys.normal(keys.fold(k, "x"), (count, num_features))
    models = planted.heads @ planted.basis.T
    owner = torch.repeat_interleave(torch.arange(n), offsets.diff())
    y = (x * models[owner]).sum(1) + noise * keys.normal(keys.fold(k, "noise"), (count,))
    return FederatedData(
        x=x.to(dtype),
        y=y.to(dtype),
        offsets=offsets,
        num_train=train,
        num_validation=validation,
        num_test=test,
    )


def labelled(
    seed: int = 0,
    *,
    sizes: Sequence[int] = SIZES,
    num_groups: int = NUM_GROUPS,
    side: bool = True,
    dtype: torch.dtype = torch.float64,
) -> FederatedData:
    """Rows with labels of a linear teacher, one teacher for each planted group."""
    k = keys.key(seed, "toys", "labelled")
    train, validation, test, offsets = _splits(sizes)
    count = int(offsets[-1])
    groups = torch.arange(len(sizes)) % max(1, num_groups)
    x = keys.normal(keys.fold(k, "x"), (count, NUM_FEATURES))
    teachers = keys.normal(keys.fold(k, "teachers"), (max(1, num_groups), NUM_FEATURES, 3))
    owner = torch.repeat_interleave(torch.arange(len(sizes)), offsets.diff())
    y = torch.einsum("rf,rfc->rc", x, teachers[groups[owner]]).argmax(1)
    return FederatedData(
        x=x.to(dtype),
        y=y,
        offsets=offsets,
        num_train=train,
        num_validation=validation,
        num_test=test,
        num_classes=NUM_CLASSES,
        groups=groups if num_groups else None,
        side=keys.normal(keys.fold(k, "side"), (len(sizes), NUM_SIDE), dtype) if side else None,
    )


def matrix(
    seed: int = 0,
    *,
    sizes: Sequence[int] = SIZES,
    num_columns: int = 6,
    dtype: torch.dtype = torch.float64,
    sparse: bool = False,
) -> FederatedData:
    """Non-negative rows, a third of the entries zero, without labels."""
    k = keys.key(seed, "toys", "matrix")
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    count = int(offsets[-1])
    x = keys.uniform(keys.fold(k, "x"), (count, num_columns))
    x = torch.where(keys.uniform(keys.fold(k, "zero"), x.shape) < 1 / 3, 0.0, x)
    return _table(x.to(dtype), None, offsets, sparse=sparse)


def blocks(
    seed: int = 0,
    *,
    num_components: int = 3,
    num_clients: int = 6,
    rows: int = 10,
    sparse: bool = False,
) -> FederatedData:
    """Rows that each live on the columns of one component: clusters that nobody could miss."""
    k = keys.key(seed, "toys", "blocks")
    count = num_clients * rows
    label = torch.arange(count) % num_components
    owner = torch.arange(3 * num_components) // 3
    size = 1 + keys.uniform(keys.fold(k, "size"), (count, 3 * num_components))
    x = torch.where(owner == label.unsqueeze(1), size, 0.0)
    return _table(x, label, torch.arange(num_clients + 1) * rows, sparse=sparse)


class Problem(NamedTuple):
    """What a method is built for, and on whom it runs."""

    data: FederatedData
    setting: Setting


def problem(
    method: Method,
    *,
    work: LocalWork | None = None,
    seed: int = 0,
    sizes: Sequence[int] = SIZES,
    cohort: int = 4,
    rounds: int = 6,
    dtype: torch.dtype = torch.float64,
    sparse: bool = False,
    num_groups: int = NUM_GROUPS,
) -> Problem:
    """Give the toy problem that suits a method: labels (classes or numbers) or a matrix.

    Parameters
    ----------
    method
        As in the registry.
    work
        Local work; by default 3 steps on batches of 3 rows.
    seed, sizes, dtype, sparse, num_groups
        Of the data; ``sparse`` concerns matrix problems.
    cohort, rounds
        As in the setting.
    """
    task = None
    if method.problem == "matrix":
        data = matrix(seed, sizes=sizes, dtype=dtype, sparse=sparse)
    elif method.problem == "regression":
        data = numbers(seed, sizes=sizes, noise=0.1, dtype=dtype)
        task = LinearTask(dtype=dtype)
    else:
        data = labelled(seed, sizes=sizes, num_groups=num_groups, dtype=dtype)
        task = ToyTask(
            side_width=2 if method.needs_side else 0, has_norm=method.needs_norm, dtype=dtype
        )
    setting = Setting(
        task=task,
        work=work or LocalWork(steps=3, batch_size=3, learning_rate=0.2, adapt_steps=2),
        num_clients=data.num_clients,
        cohort=cohort,
        rounds=rounds,
        num_groups=num_groups,
        row_shape=data.row_shape,
        dtype=dtype,
    )
    return Problem(data, setting)


def _splits(sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training, validation and test rows of each client, and the offsets."""
    train = torch.tensor(sizes)
    place = torch.arange(len(sizes))
    validation, test = place % 3, 1 + place % 2
    total = train + validation + test
    return train, validation, test, torch.cat([total.new_zeros(1), total.cumsum(0)])


def _table(x: Tensor, y: Tensor | None, offsets: Tensor, *, sparse: bool) -> FederatedData:
    """All rows are training rows."""
    num = offsets.diff()
    return FederatedData(
        x=to_csr(x) if sparse else x,
        y=y,
        offsets=offsets,
        num_train=num,
        num_validation=torch.zeros_like(num),
        num_test=torch.zeros_like(num),
    )


def to_csr(x: Tensor) -> Csr:
    """Compress a dense matrix."""
    row, column = x.nonzero().T
    count = torch.bincount(row, minlength=len(x))
    return Csr(
        indptr=torch.cat([count.new_zeros(1), count.cumsum(0)]),
        indices=column.contiguous(),
        values=x[row, column],
        num_columns=torch.tensor(x.shape[1]),
    )
