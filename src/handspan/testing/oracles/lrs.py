"""LRS for any model: theta_i = U w_i + b_i, the steps of AMHT-LRS taken by gradients.

S. Pal et al., Sample-Efficient Personalization: Modeling User Parameters as Low Rank Plus Sparse
Components, AISTATS 2024 (arXiv:2210.03505). U is one matrix here, theta one vector.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def lrs(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    directions: Sequence[Params],
    body: Params,
    coordinates: Array,
    *,
    keep: int,
    learning_rate: float,
    sparse_learning_rate: float | None = None,
    coordinate_learning_rate: float | None = None,
    damping: float = 1e-3,
    gram_ridge: float = 1e-8,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weights: str = "uniform",
) -> tuple[Array, Params, Array, Array]:
    """Run the gradient form of LRS.

    Parameters
    ----------
    clients, cohorts, batches, gradient, learning_rate, momentum, nesterov, weights
        As in the other modules; phase ``"train"``, stage 0 = sparse part, 1 = coordinates, 2 =
        basis (1 and 2 are 0 and 1 when ``keep`` is 0).
    directions, body
        The r first columns of U as models, and the first values of what is not factorised.
    coordinates
        The first w_i, (n, r).
    keep
        Entries of b_i that may differ from 0.
    sparse_learning_rate, coordinate_learning_rate
        Step sizes of b and w; ``learning_rate`` by default.
    damping, gram_ridge
        Ridges of the two Gram matrices.
    weight_decay
        Has to be 0.

    Returns
    -------
    basis, body, coordinates, sparse
        U (d, r), the shared rest, w_i (n, r) and b_i (n, d); entries in the order of sorted names.
    """
    assert weight_decay == 0
    names = sorted(directions[0])
    shapes = {name: np.shape(directions[0][name]) for name in names}

    def flat(params: Params) -> Array:
        return np.concatenate([np.ravel(params[name]) for name in names])

    def named(vector: Array) -> Params:
        result, at = {}, 0
        for name in names:
            size = int(np.prod(shapes[name]))
            result[name] = vector[at : at + size].reshape(shapes[name])
            at += size
        return result

    u = np.stack([flat(column) for column in directions], axis=1)
    ws, bs = np.array(coordinates, dtype=float), np.zeros((len(clients), len(u)))
    body = {name: np.array(value, dtype=float) for name, value in body.items()}
    sparse_rate = learning_rate if sparse_learning_rate is None else sparse_learning_rate
    w_rate = learning_rate if coordinate_learning_rate is None else coordinate_learning_rate
    eye = np.eye(u.shape[1])

    for round_index, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        inverse = np.linalg.inv(u.T @ u + gram_ridge * eye)
        products, moments = np.zeros_like(u), np.zeros_like(eye)
        new_body = {name: np.zeros_like(value) for name, value in body.items()}
        total = 0.0
        for i in cohort:
            x, y = clients[i]
            w, b, first = ws[i].copy(), bs[i].copy(), int(keep > 0)

            def slope(theta: Array, own: Params, rows, x=x, y=y) -> Params:
                return gradient({**own, **named(theta)}, x[rows], y[rows])

            for rows in batches(round_index, "train", 0, i) if keep else ():
                c = b - sparse_rate * flat(slope(u @ w + b, body, rows))
                b = np.zeros_like(c)
                largest = np.argsort(-np.abs(c), kind="stable")[:keep]
                b[largest] = c[largest]
            buffer = np.zeros_like(w)
            for rows in batches(round_index, "train", first, i):
                g = inverse @ (u.T @ flat(slope(u @ w + b, body, rows)))
                buffer = momentum * buffer + g
                w = w - w_rate * (g + momentum * buffer if nesterov else buffer)
            delta, own = np.zeros_like(b), dict(body)
            buffers = {name: np.zeros_like(value) for name, value in [*body.items(), ("", delta)]}
            for rows in batches(round_index, "train", first + 1, i):
                step = slope(u @ w + b + delta, own, rows)
                moving = {**own, "": delta}
                for name, value in moving.items():
                    g = flat(step) if name == "" else step[name]
                    buffers[name] = momentum * buffers[name] + g
                    g = g + momentum * buffers[name] if nesterov else buffers[name]
                    moving[name] = value - learning_rate * g
                delta = moving.pop("")
                own = moving
            ws[i], bs[i] = w, b
            p = 1.0 if weights == "uniform" else float(len(y))
            total += p
            products += p * np.outer(delta, w)
            moments += p * np.outer(w, w)
            for name in new_body:
                new_body[name] += p * own[name]
        u = u + products / total @ np.linalg.inv(moments / total + damping * eye)
        body = {name: value / total for name, value in new_body.items()}
    return u, body, ws, bs
