"""Tables of the paper's clustering experiments, and how their rows are given to clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

NUM_CLIENTS = 100


@dataclass(frozen=True)
class Table:
    """Rows, their classes (never seen by a method), and the client of each (Case 2)."""

    x: Any
    y: np.ndarray
    owner: np.ndarray

    @property
    def num_classes(self) -> int:
        """Clusters that are asked for."""
        return len(np.unique(self.y))


def tdt2(folder: Path) -> Table:
    """9394 documents, raw counts of the 5000 terms of largest chi-squared: this uses the labels."""
    from sklearn.feature_selection import chi2

    d = np.load(folder / "tdt2.npz")
    parts = (d["data"].astype(np.float32), d["indices"].astype(np.int32), d["indptr"])
    x, y = sparse.csr_array(parts, shape=tuple(d["shape"])), d["y"].astype(np.int64)
    best = np.argsort(-np.nan_to_num(chi2(x, y)[0]), kind="stable")[:5000]
    x = sparse.csr_array(x[:, np.sort(best)])
    return Table(x, y, similar(x))


def mnist(folder: Path) -> Table:
    """10,000 images, pixels in [0, 1]; clients have images of two digits."""
    d = np.load(folder / "mnist.npz")
    x = (d["x_test"].reshape(10000, -1) / 255).astype(np.float32)
    y = d["y_test"].astype(np.int64)
    return Table(x, y, two_classes(y))


def synthetic(folder: Path) -> Table:
    """2000 columns, 10,000 rows, 20 classes, signal to noise -3 dB: X = WH + E, our own draw."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 20, 10000)
    signal = rng.normal(size=(20, 2000))[y] * rng.uniform(0.5, 1.5, (10000, 1))
    noise = rng.normal(size=signal.shape)
    noise *= np.linalg.norm(signal) / np.linalg.norm(noise) * 10 ** (3 / 20)
    x = (signal + noise).astype(np.float32)
    return Table(x, y, similar(x))


def similar(x: Any) -> np.ndarray:
    """Case 2: k-means into 100 groups, one for each client; unbalanced."""
    from sklearn.cluster import KMeans

    return KMeans(NUM_CLIENTS, n_init=1, random_state=0).fit(x).labels_


def two_classes(y: np.ndarray) -> np.ndarray:
    """Case 2 for digits: each client has rows of two classes, in very different numbers."""
    rng = np.random.default_rng(0)
    classes = len(np.unique(y))
    slots = rng.permuted(np.tile(np.arange(classes), 2 * NUM_CLIENTS // classes))
    sizes = rng.lognormal(0, 1, len(slots))
    owner = np.empty(len(y), dtype=np.int64)
    for label in range(classes):
        mine = np.flatnonzero(slots == label)
        rows = rng.permutation(np.flatnonzero(y == label))
        ends = np.cumsum(sizes[mine] / sizes[mine].sum() * len(rows)).round().astype(int)[:-1]
        for slot, part in zip(mine, np.split(rows, ends), strict=True):
            owner[part] = slot // 2
    return owner


TABLES = {"tdt2": tdt2, "mnist": mnist, "synthetic": synthetic}
