import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Toys are too small for more; and numbers are promised for a fixed number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
