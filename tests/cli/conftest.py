import numpy as np
import pytest


@pytest.fixture
def arrays():
    """Rows of ten clients, 20 each, with three classes and three numbers about every client."""
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(200, 6)).astype("float32"),
        "y": rng.integers(0, 3, 200),
        "client": np.repeat(np.arange(10), 20),
        "side": rng.normal(size=(10, 3)),
    }


@pytest.fixture
def table(arrays, tmp_path):
    """A file with them."""
    path = tmp_path / "table.npz"
    np.savez(path, **arrays)
    return path
