"""pFL-MF: personal models theta_i = U v_i, with a shared basis U (d x r) and private v_i.

A. Dadras, S. U. Stich, A. Yurtsever, Personalized Federated Learning via Low-Rank Matrix
Optimization, TMLR. Objective (6): min over U, v_i of 1/n sum_i f_i(U v_i).

One round, for each client i of the cohort S_t:

1. ``train``, stage 0, K steps with U fixed:  v <- v - eta_v U^T grad f_i(U v)            (8)
2. ``train``, stage 1, K_U steps with v fixed (the old or the new one), on the client's own
   d x r copy:  U_i <- U_i - eta_u grad f_i(U_i v) v^T                                    (7)
3. server: U <- U + sum_S c_i (U_i - U), c_i = 1/|S_t|, N_i / sum_S N_j, or 1/(p n).      (9)

Algorithm 1 is ``v_gradient="printed"`` (eta/n in step 1), ``v_for_basis="old"``, both step sizes
equal and one step in stage 1. Every d x r matrix is formed literally.

Variants that are not in the paper
    body      parameters not factorised are shared as in FedAvg: theta_i = (body, U v_i), and
              stage 1 moves the body and U_i together, by one gradient at one theta_i.
    affine    theta_i = theta_0 + U v_i: column 0 of the basis is theta_0, its coordinate is
              always 1 and never steps; it moves in stage 1 like the other columns.
    scaled    1. v <- v - eta_v (U^T U + gram_ridge I)^-1 U^T grad f_i(U v), the Gram matrix over
                 all factorised parameters together (affine: without column 0)
              2. Delta_i = the displacement of plain SGD with step eta_u on theta_i itself
              3. U <- U + (sum c_i Delta_i v_i^T)(sum c_i v_i v_i^T + damping I)^-1
                 (affine: with v_i extended by its leading 1).
Momentum acts on the step directions of v and of U_i (or theta_i), body included, and starts at 0
in each stage. There is no weight decay.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Rows = Sequence[NDArray[np.integer]]


def combine(basis: Params, vector: Array) -> Params:
    """Form U v: for each factorised parameter the sum over k of v_k times column k.

    Parameters
    ----------
    basis
        The columns of U, ``basis[name][k]``, each in the parameter's shape.
    vector
        One coordinate per column. With ``affine`` the first one is 1.

    Returns
    -------
    dict
        The factorised parameters of one personal model.
    """
    theta = {}
    for name, columns in basis.items():
        theta[name] = np.zeros(columns.shape[1:])
        for k in range(len(vector)):
            theta[name] = theta[name] + vector[k] * columns[k]
    return theta


def _outer(slope: Params, vector: Array) -> Params:
    """Form g v^T as columns: column k is v_k times g."""
    return {
        name: np.array([vector[k] * value for k in range(len(vector))])
        for name, value in slope.items()
    }


def _inner(left: Params, right: Params) -> float:
    """Multiply two parameter vectors, over the names of the first."""
    return sum(float(np.sum(left[name] * right[name])) for name in left)


def _column(basis: Params, k: int) -> Params:
    """Take column k of the basis of every factorised parameter."""
    return {name: columns[k] for name, columns in basis.items()}


def pflmf(
    clients: Sequence[tuple[Array, NDArray]],
    cohorts: Sequence[Sequence[int]],
    batches: Callable[[int, str, int, int], Rows],
    gradient: Callable[[Params, Array, NDArray], Params],
    basis: Params,
    coordinates: Array,
    body: Params | None = None,
    *,
    v_learning_rate: float,
    u_learning_rate: float,
    v_gradient: str = "client",
    v_for_basis: str = "old",
    momentum: float = 0.0,
    nesterov: bool = False,
    weights: str = "uniform",
    participation: float | None = None,
    scaled: bool = False,
    affine: bool = False,
    gram_ridge: float = 0.0,
    damping: float = 0.0,
) -> tuple[Params, Params, Array]:
    """Run pFL-MF.

    Parameters
    ----------
    clients
        Training rows (x, y) of each client.
    cohorts
        Sorted client ids of each round; a round without clients is skipped.
    batches
        Rows of each step: phase ``"train"``, stage 0 = steps on v, stage 1 = steps on U.
    gradient
        Gradient of the mean loss of a batch, at a whole model (body and factorised parameters).
    basis
        U of each factorised parameter, with a leading axis r: column k in the parameter's shape.
        With ``affine`` the leading axis is r + 1 and column 0 is theta_0.
    coordinates
        v_i of every client, (n, r).
    body
        The parameters that are not factorised; none by default.
    v_learning_rate, u_learning_rate
        eta_v and eta_u; the body moves with eta_u.
    v_gradient
        ``"client"``: v moves along U^T grad f_i; ``"printed"``: along (1/n) U^T grad f_i.
    v_for_basis
        ``"old"``: stage 1 uses v_i from before stage 0 (Algorithm 1); ``"new"``: from after it.
    momentum, nesterov
        Plain SGD in both stages.
    weights
        c_i of step 3: ``"uniform"``, ``"examples"``, or ``"bernoulli"`` for 1/(p n).
    participation
        The probability p of ``"bernoulli"``.
    scaled, affine, gram_ridge, damping
        See the module.

    Returns
    -------
    basis : dict
        The server's U.
    body : dict
        The server's body.
    coordinates : array
        v_i of every client, (n, r).
    """
    if v_gradient not in ("client", "printed") or v_for_basis not in ("old", "new"):
        raise ValueError("v_gradient is 'client' or 'printed', v_for_basis 'old' or 'new'")
    if weights not in ("uniform", "examples", "bernoulli"):
        raise ValueError(f"unknown weights: {weights!r}")
    n = len(clients)
    U = {name: np.array(value, dtype=float) for name, value in basis.items()}
    shared = {name: np.array(value, dtype=float) for name, value in (body or {}).items()}
    V = np.array(coordinates, dtype=float)
    rank = V.shape[1]
    first = 1 if affine else 0  # the first column of the basis that has a free coordinate
    lead = np.ones(first)  # (1,) or ()

    def sgd(values: Params, slope: Params, buffer: Params, rate: float) -> Params:
        """Take one SGD step on every entry; ``buffer`` is updated in place."""
        moved = {}
        for name in values:
            buffer[name] = momentum * buffer[name] + slope[name]
            step = slope[name] + momentum * buffer[name] if nesterov else buffer[name]
            moved[name] = values[name] - rate * step
        return moved

    def personal_steps(v: Array, gram: Array, x: Array, y: NDArray, steps: Rows) -> Array:
        """Stage 0: move v with U and the body fixed."""
        buffer = {"v": np.zeros(rank)}
        for rows in steps:
            theta = combine(U, np.concatenate([lead, v]))
            slope = gradient({**shared, **theta}, x[rows], y[rows])
            along = np.array([_inner(_column(U, first + k), slope) for k in range(rank)])
            if v_gradient == "printed":
                along = along / n  # Eq. (8)
            if scaled:
                along = np.linalg.solve(gram, along)
            v = sgd({"v": v}, {"v": along}, buffer, v_learning_rate)["v"]
        return v

    def shared_steps(vector: Array, x: Array, y: NDArray, steps: Rows) -> Params:
        """Stage 1: move the client's copies of the body and of U (scaled: of theta_i itself).

        Gives the displacements: of the body, and U_i - U or Delta_i v_i^T as columns.
        """
        start = {**shared, **(combine(U, vector) if scaled else U)}
        local = dict(start)
        buffer = {name: np.zeros_like(value) for name, value in local.items()}
        for rows in steps:
            own = {name: local[name] for name in U}
            theta = own if scaled else combine(own, vector)
            slope = dict(gradient({**local, **theta}, x[rows], y[rows]))
            if not scaled:  # G_i = grad f_i(U_i v_i) v_i^T
                slope.update(_outer({name: slope[name] for name in U}, vector))
            local = sgd(local, slope, buffer, u_learning_rate)
        moved = {name: local[name] - start[name] for name in local}
        if scaled:
            moved.update(_outer({name: moved[name] for name in U}, vector))
        return moved

    for t, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            continue
        if weights == "uniform":
            share = {i: 1 / len(cohort) for i in cohort}
        elif weights == "examples":
            rows_of_all = sum(len(clients[i][1]) for i in cohort)
            share = {i: len(clients[i][1]) / rows_of_all for i in cohort}
        elif participation is not None:
            share = {i: 1 / (participation * n) for i in cohort}
        else:
            raise ValueError("weights='bernoulli' needs the probability of participation")

        gram = gram_ridge * np.eye(rank)  # U^T U + gram_ridge I
        for k in range(rank):
            for m in range(rank):
                gram[k, m] += _inner(_column(U, first + k), _column(U, first + m))

        change = {name: np.zeros_like(value) for name, value in {**shared, **U}.items()}
        second_moment = np.zeros((first + rank, first + rank))
        for i in cohort:
            x, y = clients[i]
            v = personal_steps(V[i], gram, x, y, batches(t, "train", 0, i))
            vector = np.concatenate([lead, V[i] if v_for_basis == "old" else v])
            V[i] = v  # v_i^{t+1} = v_i^{t,K}
            moved = shared_steps(vector, x, y, batches(t, "train", 1, i))
            for name in change:  # sum c_i (U_i - U), sum c_i Delta_i v_i^T, the body likewise
                change[name] = change[name] + share[i] * moved[name]
            second_moment = second_moment + share[i] * np.outer(vector, vector)

        if scaled:  # (sum c_i Delta_i v_i^T)(sum c_i v_i v_i^T + damping I)^-1, column by column
            width = first + rank
            inverse = np.linalg.inv(second_moment + damping * np.eye(width))
            for name in U:
                columns = change[name]
                change[name] = np.array(
                    [sum(columns[m] * inverse[m, k] for m in range(width)) for k in range(width)]
                )
        U = {name: U[name] + change[name] for name in U}
        shared = {name: shared[name] + change[name] for name in shared}
    return U, shared, V
