"""Parameters of replaying.py's two ops, and what is noted of recorded calls."""

import pytest
import torch
from replaying import D

from fastvit import ops
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import record


@pytest.fixture
def weights(device):
    torch.manual_seed(1)
    return [torch.randn(*s, device=device) for s in ((D,), (D,), (24, D), (24,), (D, 24), (D,))]


@pytest.fixture
def heads(device):
    torch.manual_seed(2)
    return [torch.randn(*s, device=device) for s in ((48, D), (48,), (D, D), (D,))]


@pytest.fixture
def refusals(monkeypatch):
    """Yields a list with an entry for every call that was recorded: None, or why it could not be."""
    noted, plan = [], record.Recorder.plan

    def noting(self, outputs):
        made = plan(self, outputs)
        noted.append(self.refusal)
        return made

    monkeypatch.setattr(record.Recorder, "plan", noting)
    with runtime_call.forgotten(), ops.use_backend("aten"):
        yield noted
