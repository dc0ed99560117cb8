"""Set-up shared by all tests."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The test workers share the cores already."""
    torch.set_num_threads(1)
