"""Federated factorisations as scikit-learn estimators; ``groups`` says whose row is whose.

Without ``groups`` all rows belong to one client (of a completion: each to its own). ``groups`` is
routed through pipelines and searches where metadata routing is enabled and
``set_fit_request(groups=True)`` was said.
"""

from handspan.estimators.completion import FederatedMatrixCompletion
from handspan.estimators.factorization import FederatedClustering, FederatedNMF
from handspan.estimators.linear import FederatedLinearRepresentation

__all__ = [
    "FederatedClustering",
    "FederatedLinearRepresentation",
    "FederatedMatrixCompletion",
    "FederatedNMF",
]
