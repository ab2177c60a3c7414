"""FederatedNMF and FederatedClustering: FedMGS and FedMAvg behind scikit-learn's interface."""

from __future__ import annotations

import numbers
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    ClusterMixin,
    TransformerMixin,
    _fit_context,
)
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import check_is_fitted, check_non_negative, validate_data

from handspan.estimators.base import (
    Grouped,
    Trained,
    by_client,
    train,
    warn_of_small_clients,
)

_TYPES = (np.float64, np.float32)
# Numbers that go up in a round, as the paper counts them.
_PAPER = {"fedmgs": "m * (M * K + K * K)", "fedmavg": "m * M * K"}
_SWEEPS = 200  # of coordinate descent in ``transform``: far beyond what rows need to converge


class _Factorization(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Fit W (``components_``) on the rows of all clients; H stays with them."""

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "method": [StrOptions(set(_PAPER))],
        "max_iter": [Interval(numbers.Integral, 1, None, closed="left")],
        "cohort": [Interval(numbers.Real, 0, None, closed="neither")],
        "tol": [Interval(numbers.Real, 0, None, closed="left")],
        "settings": [dict, None],
        "engine": [str],
        "random_state": ["random_state"],
    }

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _size(self) -> int:
        raise NotImplementedError

    def _more_settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def _fit(self, X: Any, groups: Any) -> tuple[Grouped, Trained]:
        """Run the method on a validated table."""
        size = self._size()
        if size > X.shape[0]:
            raise ValueError(f"{size} components exceed n_samples={X.shape[0]}: ask for fewer")
        grouped = by_client(X, groups)
        warn_of_small_clients(grouped.data, size)
        trained = train(
            self.method,
            grouped.data,
            cohort=self.cohort,
            rounds=self.max_iter,
            engine=self.engine,
            random_state=self.random_state,
            dtype=X.dtype,
            settings={
                "num_components": size,
                "stop_tolerance": self.tol,
                **self._more_settings(),
                **(self.settings or {}),
            },
        )
        server = trained.state.server
        self.components_ = np.ascontiguousarray(server.basis.T.numpy().astype(X.dtype))
        self._n_features_out = len(self.components_)
        self.n_iter_ = trained.state.round
        self.objective_ = float(server.objective)
        self.communication_ = trained.communication(_PAPER[self.method], size)
        return grouped, trained

    def transform(self, X: Any) -> np.ndarray:
        """Explain rows by the fitted components: each client can do it alone.

        Parameters
        ----------
        X
            Rows, dense or CSR.

        Returns
        -------
        array of shape (n_samples, n_components)
            Non-negative least squares, row by row.
        """
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=_TYPES, reset=False)
        self._check_rows(X)
        return non_negative_rows(X, self.components_)

    def _check_rows(self, X: Any) -> None:
        """Refuse rows that the model cannot mean; any by default."""

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Minus the mean squared distance of rows from what explains them: larger is better.

        Parameters
        ----------
        X
            Rows, dense or CSR.
        y
            Ignored.
        sample_weight
            Weights of the rows in the mean.
        """
        H = self.transform(X)
        X = validate_data(self, X, accept_sparse="csr", dtype=_TYPES, reset=False)
        square = X.multiply(X).sum(axis=1) if hasattr(X, "multiply") else (X * X).sum(axis=1)
        cross = (H * safe_sparse_dot(X, self.components_.T, dense_output=True)).sum(axis=1)
        fitted = (H @ (self.components_ @ self.components_.T) * H).sum(axis=1)
        distance = np.asarray(square).reshape(-1) - 2 * cross + fitted
        return -float(np.average(distance, weights=sample_weight))


def non_negative_rows(X: Any, components: np.ndarray) -> np.ndarray:
    """Find argmin over H >= 0 of |X - H C|^2 by coordinate descent, each row on its own."""
    gram = components @ components.T
    projected = safe_sparse_dot(X, components.T, dense_output=True)
    H = np.zeros_like(projected)
    for _ in range(_SWEEPS):
        before = H.copy()
        for k in np.flatnonzero(gram.diagonal() > 0):
            H[:, k] = np.maximum(0, H[:, k] + (projected[:, k] - H @ gram[:, k]) / gram[k, k])
        if np.abs(H - before).max(initial=0) <= 1e-12 * np.abs(H).max(initial=1e-300):
            break
    return H


class FederatedNMF(_Factorization):
    """Non-negative matrix factorisation of rows that their owners keep.

    Parameters
    ----------
    n_components
        Components K.
    method
        ``fedmgs`` (clients send sums) or ``fedmavg`` (clients send their W).
    max_iter
        Rounds.
    cohort
        Clients of a round: a fraction (float) or a count (int).
    tol
        Relative change of the objective below which the run ends.
    settings
        Further settings of the method, by name.
    engine
        As in ``handspan.fit``; ``steady`` gives the same numbers again.
    random_state
        Seed of start and cohorts.

    Attributes
    ----------
    components_
        (n_components, n_features), W transposed.
    n_iter_, objective_
        Rounds, and the objective after them (``fedmavg``: before the last mean of W).
    communication_
        Numbers and bytes that were sent, and the paper's count.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.random.default_rng(0).random((40, 6))
    >>> model = FederatedNMF(n_components=2, max_iter=20, random_state=0)
    >>> H = model.fit_transform(X, groups=np.arange(40) % 4)
    >>> H.shape, model.components_.shape, bool((model.components_ >= 0).all())
    ((40, 2), (2, 6), True)
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **_Factorization._parameter_constraints,
        "n_components": [Interval(numbers.Integral, 1, None, closed="left")],
    }

    def __init__(
        self,
        n_components: int = 2,
        *,
        method: str = "fedmgs",
        max_iter: int = 200,
        cohort: float | int = 1.0,
        tol: float = 1e-8,
        settings: dict[str, Any] | None = None,
        engine: str = "steady",
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.method = method
        self.max_iter = max_iter
        self.cohort = cohort
        self.tol = tol
        self.settings = settings
        self.engine = engine
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        return tags

    def _size(self) -> int:
        return self.n_components

    def _more_settings(self) -> dict[str, Any]:
        # No push to one component; and W may leave the range of the data, as NMF allows.
        return {
            "orthogonality": 0,
            "shrinkage": 0,
            "penalty_growth": 1,
            "basis_set": "non_negative",
        }

    def _check_rows(self, X: Any) -> None:
        check_non_negative(X, f"{type(self).__name__}.transform")

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None, groups: Any = None) -> FederatedNMF:
        """Fit the components.

        Parameters
        ----------
        X
            Rows >= 0, dense or CSR.
        y
            Ignored.
        groups
            Client id of each row; one client by default.
        """
        X = validate_data(self, X, accept_sparse="csr", dtype=_TYPES)
        check_non_negative(X, f"{type(self).__name__}.fit")
        self._fit(X, groups)
        return self


class FederatedClustering(ClusterMixin, _Factorization):
    """Clustering by orthogonal NMF (SNCP) of rows that their owners keep.

    Parameters
    ----------
    n_clusters
        Clusters K.
    method, max_iter, cohort, tol, settings, engine, random_state
        As in ``FederatedNMF``.

    Attributes
    ----------
    labels_
        Cluster of each row: the largest entry of h_j.
    components_
        (n_clusters, n_features), W transposed.
    n_iter_, objective_, communication_
        As in ``FederatedNMF``.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.kron(np.eye(2), np.ones((10, 3))) + 0.1
    >>> model = FederatedClustering(2, random_state=0).fit(X, groups=np.arange(20) % 2)
    >>> len(set(model.labels_[:10])), len(set(model.labels_))
    (1, 2)
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **_Factorization._parameter_constraints,
        "n_clusters": [Interval(numbers.Integral, 1, None, closed="left")],
    }

    def __init__(
        self,
        n_clusters: int = 3,
        *,
        method: str = "fedmgs",
        max_iter: int = 500,
        cohort: float | int = 1.0,
        tol: float = 1e-8,
        settings: dict[str, Any] | None = None,
        engine: str = "steady",
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.method = method
        self.max_iter = max_iter
        self.cohort = cohort
        self.tol = tol
        self.settings = settings
        self.engine = engine
        self.random_state = random_state

    def _size(self) -> int:
        return self.n_clusters

    def _more_settings(self) -> dict[str, Any]:
        return {}

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None, groups: Any = None) -> FederatedClustering:
        """Find the clusters.

        Parameters
        ----------
        X
            Rows, dense or CSR.
        y
            Ignored.
        groups
            Client id of each row; one client by default.
        """
        X = validate_data(self, X, accept_sparse="csr", dtype=_TYPES)
        grouped, trained = self._fit(X, groups)
        everyone, state = torch.arange(grouped.data.num_clients), trained.state
        found = trained.simulation.row_labels(state.server, everyone, state.round)
        self.labels_ = grouped.restore(found.numpy())
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Cluster of new rows: the column of W that explains most of a row alone.

        Parameters
        ----------
        X
            Rows, dense or CSR.
        """
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=_TYPES, reset=False)
        # The limit of large rho: h_j has one entry, max_k max(0, w_k^T x) / |w_k|.
        norms = np.linalg.norm(self.components_, axis=1)
        projected = safe_sparse_dot(X, self.components_.T, dense_output=True)
        gain = np.maximum(projected, 0) / np.where(norms > 0, norms, np.inf)
        nearest = (norms**2 - 2 * projected).argmin(axis=1)
        return np.where(gain.max(axis=1) > 0, gain.argmax(axis=1), nearest)
