"""Parameters of replaying.py's two ops."""

import pytest
import torch
from replaying import D


@pytest.fixture
def weights(device):
    torch.manual_seed(1)
    return [torch.randn(*s, device=device) for s in ((D,), (D,), (24, D), (24,), (D, 24), (D,))]


@pytest.fixture
def heads(device):
    torch.manual_seed(2)
    return [torch.randn(*s, device=device) for s in ((48, D), (48,), (D, D), (D,))]
