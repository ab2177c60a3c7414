"""What federated factorisations are measured against: central methods, distributed clustering.

All take one table (rows, columns), dense or CSR; where rows are distributed also the client of
each, and then they count the numbers that clients send.
"""

from handspan.baselines.ball_growing import ball_growing
from handspan.baselines.central import central_kmeans, central_nmf, sncp
from handspan.baselines.completion import central_completion
from handspan.baselines.coreset import distributed_coreset
from handspan.baselines.kmeans_parallel import kmeans_parallel
from handspan.baselines.rows import Clustering

__all__ = [
    "Clustering",
    "ball_growing",
    "central_completion",
    "central_kmeans",
    "central_nmf",
    "distributed_coreset",
    "kmeans_parallel",
    "sncp",
]
