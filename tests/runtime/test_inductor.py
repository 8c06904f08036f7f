"""Messages of Inductor about our ops."""

import pytest
import torch

from fastvit import ops
from fastvit.ops.runtime import inductor


def test_messages_do_not_write_out_the_arguments_of_our_ops(monkeypatch):
    """Before torch 2.13 they were composed for every op, arguments of arguments included: over two minutes of compiling
    12 blocks. Other libraries' ops keep theirs."""
    issue = pytest.importorskip("torch._inductor.exc").OperatorIssue
    monkeypatch.setattr(inductor, "_SHOWS_LATER", False)
    monkeypatch.setattr(inductor, "_done", set())
    monkeypatch.setattr(issue, "operator_str", staticmethod(issue.operator_str))
    with torch._subclasses.FakeTensorMode():
        ops.rms_norm(torch.empty(2, 3, 8), torch.empty(8))
    ours = torch.ops.fastvit.layer_norm_fwd.default
    assert issue.operator_str(ours, ["an argument"], {}) == "  target: fastvit.layer_norm_fwd.default"
    assert "an argument" in issue.operator_str(torch.ops.aten.mm.default, ["an argument"], {})
