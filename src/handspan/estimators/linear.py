"""FederatedLinearRepresentation: linear FedRep behind scikit-learn's interface."""

from __future__ import annotations

import numbers
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin, TransformerMixin, _fit_context
from sklearn.utils._param_validation import Interval
from sklearn.utils.validation import check_is_fitted, validate_data

from handspan.core.records import take
from handspan.estimators.base import Trained, by_client, train

_TYPES = (np.float64, np.float32)


class FederatedLinearRepresentation(TransformerMixin, RegressorMixin, BaseEstimator):
    """Linear regressions of many clients on a shared subspace: y = <w_i, B^T x>.

    Each client centres its rows and labels, so that it has an intercept of its own; features are
    scaled by their pooled deviations, which are sums. Then B (d x rank) is learned from all
    clients, and w_i stays with its client.

    Parameters
    ----------
    rank
        Dimensions of the subspace, at most the number of features and of clients.
    max_iter
        Rounds.
    cohort
        Clients of a round: a fraction (float) or a count (int).
    learning_rate
        Step size of B; that of Theorem 1 by default.
    engine, random_state
        As in ``FederatedNMF``.

    Attributes
    ----------
    components_
        (rank, n_features), the basis of scaled rows.
    coef_, intercept_
        (n_clients, n_features) and (n_clients,): each client's regression on rows as given.
    groups_
        (n_clients,) whose they are.
    n_iter_, communication_
        As in ``FederatedNMF``.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(60, 4))
    >>> groups = np.arange(60) % 3
    >>> y = X[:, 0] * (groups + 1)
    >>> model = FederatedLinearRepresentation(rank=1, random_state=0).fit(X, y, groups=groups)
    >>> bool(model.score(X, y, groups=groups) > 0.99)
    True
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "rank": [Interval(numbers.Integral, 1, None, closed="left")],
        "max_iter": [Interval(numbers.Integral, 1, None, closed="left")],
        "cohort": [Interval(numbers.Real, 0, None, closed="neither")],
        "learning_rate": [Interval(numbers.Real, 0, None, closed="neither"), None],
        "engine": [str],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        rank: int = 2,
        *,
        max_iter: int = 100,
        cohort: float | int = 1.0,
        learning_rate: float | None = None,
        engine: str = "steady",
        random_state: Any = None,
    ) -> None:
        self.rank = rank
        self.max_iter = max_iter
        self.cohort = cohort
        self.learning_rate = learning_rate
        self.engine = engine
        self.random_state = random_state

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any, groups: Any = None) -> FederatedLinearRepresentation:
        """Learn the subspace and the clients' regressions.

        Parameters
        ----------
        X, y
            Rows and numbers.
        groups
            Client id of each row; one client by default.
        """
        X, y = validate_data(self, X, y, dtype=_TYPES, y_numeric=True)
        y = y.astype(X.dtype)
        spread = X.std(axis=0)
        scale = np.where(spread > 0, spread, 1)
        first = by_client(X, groups)  # whose rows they are, before they are centred
        codes = first.ids.codes
        x_means, y_means = (client_means(part, codes) for part in (X, y.reshape(-1, 1)))
        centred = (X - x_means[codes]) / scale
        grouped = by_client(
            centred.astype(X.dtype), groups, (y - y_means[codes, 0]).astype(X.dtype)
        )
        rank = min(self.rank, X.shape[1], len(grouped.groups))
        rate = self.learning_rate
        options = {"step_size": "theorem"} if rate is None else {"learning_rate": rate}
        trained = train(
            "fedrep_linear",
            grouped.data,
            cohort=self.cohort,
            rounds=self.max_iter,
            engine=self.engine,
            random_state=self.random_state,
            dtype=X.dtype,
            settings={"rank": rank},
            batch_size=None,
            **options,
        )
        self.components_ = trained.state.server.basis.T.numpy()
        slopes = regressions(trained)
        self.coef_ = slopes / scale
        self.intercept_ = y_means[:, 0] - (self.coef_ * x_means).sum(axis=1)
        self._scale = scale
        self.groups_ = grouped.groups
        self.n_iter_ = trained.state.round
        self.communication_ = trained.communication("m * M * K", rank)
        self._n_features_out = len(self.components_)
        return self

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """Values of rows of known clients; without groups by the mean of the regressions.

        Parameters
        ----------
        X
            Rows.
        groups
            Client id of each row, of those that were fitted.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=_TYPES, reset=False)
        if groups is None:
            return X @ self.coef_.mean(axis=0) + self.intercept_.mean()
        groups = np.asarray(groups)
        if groups.shape != (X.shape[0],):
            raise ValueError(f"X has {X.shape[0]} rows and groups the shape {groups.shape}")
        place = {group: i for i, group in enumerate(self.groups_.tolist())}
        unknown = sorted({str(g) for g in groups.tolist() if g not in place})
        if unknown:
            raise ValueError(f"client {unknown[0]} took no part in fit: refit with its rows")
        at = np.array([place[g] for g in groups.tolist()])
        return np.einsum("rf,rf->r", X, self.coef_[at]) + self.intercept_[at]

    def transform(self, X: Any) -> np.ndarray:
        """Features of rows: their coordinates in the shared subspace.

        Parameters
        ----------
        X
            Rows.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=_TYPES, reset=False)
        return X / self._scale @ self.components_.T

    def score(self, X: Any, y: Any, groups: Any = None) -> float:
        """R^2 of the predictions.

        Parameters
        ----------
        X, y, groups
            As in ``fit``.
        """
        from sklearn.metrics import r2_score

        return float(r2_score(y, self.predict(X, groups)))


def client_means(rows: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Mean of each client's rows."""
    total = np.zeros((codes.max() + 1, rows.shape[1]), dtype=np.float64)
    np.add.at(total, codes, rows)
    return total / np.bincount(codes)[:, None]


def regressions(trained: Trained) -> np.ndarray:
    """Slopes of all clients' regressions on the rows that were trained on, (n, d)."""
    algorithm, state = trained.problem.algorithm, trained.state
    assert algorithm.model is not None
    everyone = torch.arange(trained.problem.data.num_clients)
    slopes: list[torch.Tensor] = []
    for ids, broadcast, mine in trained.simulation.serve(state.server, everyone, state.round):
        for j in range(len(ids)):
            params = algorithm.model(broadcast, take(mine, j)).params
            slopes += [weight.reshape(-1) for weight in params.values() if weight.ndim == 2]
    return torch.stack(slopes).numpy()
