"""Parameters of remembered.py's two ops, and what records their launches."""

import pytest
import torch
from remembered import D, recording


@pytest.fixture
def weights(device):
    torch.manual_seed(1)
    return [torch.randn(*s, device=device) for s in ((D,), (D,), (24, D), (24,), (D, 24), (D,))]


@pytest.fixture
def heads(device):
    torch.manual_seed(2)
    return [torch.randn(*s, device=device) for s in ((48, D), (48,), (D, D), (D,))]


@pytest.fixture
def recorder(triton_backend):
    with recording() as recorder:
        yield recorder
