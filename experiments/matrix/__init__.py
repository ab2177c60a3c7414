"""Experiments on factorisations: ``python -m experiments.matrix.clustering`` and its neighbours."""
