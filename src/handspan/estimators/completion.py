"""FederatedMatrixCompletion: ratings of people who keep them, behind scikit-learn's interface."""

from __future__ import annotations

import numbers
from typing import Any, ClassVar

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin, _fit_context
from sklearn.utils._param_validation import Interval
from sklearn.utils.validation import check_is_fitted, validate_data

from handspan.estimators.base import by_client, train

_TYPES = (np.float64, np.float32)


class FederatedMatrixCompletion(TransformerMixin, BaseEstimator):
    """Predict the unknown entries of a table whose rows belong to people.

    What a CSR matrix stores is known (a stored 0 is a rating of 0); of a dense table, what is not
    NaN. Because missing entries are its subject it does not pass ``check_estimator``, which refuses
    NaN and reads what is not stored as 0; its own tests say what it keeps instead.

    Parameters
    ----------
    n_components
        Directions of taste K.
    ridge
        Weight of the ridge for each known entry.
    max_iter, cohort, tol, engine, random_state
        As in ``FederatedNMF``.

    Attributes
    ----------
    components_, item_bias_, mean_
        (K, n_features) w_i, (n_features,) b_i, and mu.
    n_iter_, communication_
        As in ``FederatedNMF``.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.add.outer(np.arange(6.0), np.arange(4.0))
    >>> X[2, 3] = np.nan
    >>> model = FederatedMatrixCompletion(1, ridge=1e-3, random_state=0).fit(X)
    >>> bool(abs(model.predict(X)[2, 3] - 5) < 0.1)
    True
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_components": [Interval(numbers.Integral, 1, None, closed="left")],
        "ridge": [Interval(numbers.Real, 0, None, closed="neither")],
        "max_iter": [Interval(numbers.Integral, 1, None, closed="left")],
        "cohort": [Interval(numbers.Real, 0, None, closed="neither")],
        "tol": [Interval(numbers.Real, 0, None, closed="left")],
        "engine": [str],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        n_components: int = 5,
        *,
        ridge: float = 0.1,
        max_iter: int = 100,
        cohort: float | int = 1.0,
        tol: float = 0.0,
        engine: str = "steady",
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.ridge = ridge
        self.max_iter = max_iter
        self.cohort = cohort
        self.tol = tol
        self.engine = engine
        self.random_state = random_state

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None, groups: Any = None) -> FederatedMatrixCompletion:
        """Learn the columns.

        Parameters
        ----------
        X
            Known entries: CSR, or dense with NaN.
        y
            Ignored.
        groups
            Owner of each row; by default every row has an owner of its own.
        """
        X = self._known(X, reset=True)
        owner = np.arange(X.shape[0]) if groups is None else groups
        trained = train(
            "fedcomplete",
            by_client(X, owner).data,
            cohort=self.cohort,
            rounds=self.max_iter,
            engine=self.engine,
            random_state=self.random_state,
            dtype=X.dtype,
            settings={
                "num_components": self.n_components,
                "ridge": self.ridge,
                "stop_tolerance": self.tol,
            },
        )
        server = trained.state.server
        items = server.items.numpy().astype(X.dtype)
        self.components_, self.item_bias_ = items[:, :-1].T.copy(), items[:, -1].copy()
        self.mean_ = float(server.mean)
        self.n_iter_ = trained.state.round
        self.communication_ = trained.communication("m * M * (K + 1)", self.n_components)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Fold rows in: taste h_j and bias c_j of each, from what it knows, be it nothing.

        Parameters
        ----------
        X
            Known entries of old or new rows.

        Returns
        -------
        array of shape (n_samples, n_components + 1)
            The last column is the bias.
        """
        check_is_fitted(self)
        X = self._known(X, reset=False)
        folded = np.zeros((X.shape[0], self.components_.shape[0] + 1), dtype=X.dtype)
        for j in range(X.shape[0]):
            at = X.indices[X.indptr[j] : X.indptr[j + 1]]
            A = np.column_stack([self.components_[:, at].T, np.ones(len(at))])
            target = X.data[X.indptr[j] : X.indptr[j + 1]] - self.mean_ - self.item_bias_[at]
            own = self.ridge * max(1, len(at)) * np.eye(A.shape[1])
            folded[j] = np.linalg.solve(A.T @ A + own, A.T @ target)
        return folded

    def predict(self, X: Any, entries: tuple[Any, Any] | None = None) -> np.ndarray:
        """Complete rows.

        Parameters
        ----------
        X
            What is known of them.
        entries
            Positions (rows, columns) that are asked for; by default the whole table.
        """
        folded = self.transform(X)
        taste, bias = folded[:, :-1], folded[:, -1]
        if entries is None:
            return taste @ self.components_ + self.item_bias_ + bias[:, None] + self.mean_
        rows, columns = map(np.asarray, entries)
        fitted = (taste[rows] * self.components_[:, columns].T).sum(axis=1)
        return fitted + self.item_bias_[columns] + bias[rows] + self.mean_

    def _known(self, X: Any, *, reset: bool) -> Any:
        """Known entries as CSR in canonical form; a stored 0 is known."""
        X = validate_data(
            self, X, accept_sparse="csr", dtype=_TYPES, ensure_all_finite="allow-nan", reset=reset
        )
        if sparse.issparse(X):
            X = sparse.csr_array(X, copy=True)
            X.sum_duplicates()
            if not np.isfinite(X.data).all():
                raise ValueError("a stored entry is NaN or infinite: leave it out")
            return X
        if np.isinf(X).any():
            raise ValueError("an entry is infinite: mark what is unknown by NaN")
        row, column = np.nonzero(~np.isnan(X))
        return sparse.csr_array((X[row, column], (row, column)), shape=X.shape)
