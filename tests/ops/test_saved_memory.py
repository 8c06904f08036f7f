"""When a backward pass lets go of what it holds. What is saved for it: promises/test_costs.py."""

import sys
import weakref
from unittest import mock

import pytest
import torch
from replaying import replays

from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload
from fastvit import ops
from fastvit.study.memory.peak import peak_bytes

PEAKS = {
    "linear": {"out": 4 * 96, "activation": "gelu"},
    "layer_norm_linear": {"out": 3 * 96},
    "layer_norm_attention": {"H": 6},
    "mlp": {},
    "layer_norm_mlp": {},
}


@pytest.mark.parametrize("op", PEAKS)
def test_a_training_step_peaks_no_higher_than_plain_pytorch(op, monkeypatch):
    """Where weights are larger than tokens, gradients of weights come on top of what is still alive: a node must not
    hold what it saved until its end."""
    monkeypatch.setenv("FASTVIT_BACKEND", "aten")
    workload, device = Workload(op, {"B": 1, "N": 33, "D": 96, **PEAKS[op]}), torch.device("cpu")
    peaks = {}
    for provider in ("sdpa" if "sdpa" in workload.providers else "eager", "fastvit"):
        step, _ = workload.step(provider, "training", Draw(torch.float32, device))
        with replays() as replayed:
            for _ in range(3):
                step()
            replayed.clear()
            peaks[provider] = peak_bytes(step, device)
    assert sum(replayed) == 2
    fused = peaks.pop("fastvit")
    extra = 4 * (6 * 33 + 2 * 96)  # log-sum-exp of six heads; gradients of the norm, which come earlier than PyTorch's
    assert fused <= max(peaks.values()) + extra
    assert fused > 4 * 96 * 96 * 3  # the count itself works: there are gradients of weights


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_scaled_gradient_is_gone_before_the_norm_s_backward_pass(activation, device):
    """The gradient after stochastic depth is as large as x."""
    module = sys.modules["fastvit.ops.block.mlp_node"]
    seen, alive = [], []

    def noted(operation, note):
        def call(*args, **options):
            note(args[0])
            return operation(*args, **options)

        return call

    x, norm = torch.randn(2, 5, 16, device=device, requires_grad=True), torch.ones(16, device=device)
    fc1 = torch.randn(48, 16, device=device, requires_grad=True)
    fc2 = torch.randn(16, 48 if activation == "gelu" else 24, device=device, requires_grad=True)
    scale = torch.tensor([0.0, 2.0], device=device)
    out = ops.layer_norm_mlp(x, norm, None, fc1, None, fc2, None, activation=activation, row_scale=scale, residual=x)
    with (
        mock.patch.object(module, "linear_dact", noted(module.linear_dact, lambda g: seen.append(weakref.ref(g)))),
        mock.patch.object(module, "norm_backward", noted(module.norm_backward, lambda _: alive.append(seen[0]()))),
    ):
        out.backward(torch.ones_like(out))
    assert alive == [None]
