"""Tests of the package's CUDA half without a GPU: `make cuda` runs them. Elsewhere nothing here is collected."""

import os

import pytest
import torch

IS_PRETENDED = "PRETENDED_CUDA" in os.environ  # run.py sets it
collect_ignore_glob = [] if IS_PRETENDED else ["*"]


@pytest.fixture(scope="session", autouse=True)
def _first_use_of_cuda() -> None:
    """Let PyTorch allocate what it allocates once, and let the trace have its allocations from then on."""
    import device_trace

    for dtype in (torch.float32, torch.bfloat16):
        a = torch.zeros(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        (torch.addmm(a[0], a, a) @ a + torch.bmm(a[None], a[None])).sum().backward()
    device_trace.track()
