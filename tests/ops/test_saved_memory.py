"""Count what a pre-norm block of the public ops saves for backward, in token tensors of B * N * D."""

import sys
import weakref
from unittest import mock

import pytest
import torch
from models import randomised
from oracle import inputs

from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload
from fastvit import layers, ops
from fastvit.study.memory.peak import peak_bytes, saved_bytes

B, N, H, D = 2, 17, 2, 32


def weights_and_biases(p):
    names = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    return ((p[f"{name}.weight"], p[f"{name}.bias"]) for name in names)


def block(x, p, drop_path, recompute, dropout_p, **heads):
    norm1, qkv, proj, norm2, fc1, fc2 = weights_and_biases(p)
    scale1, scale2 = drop_path
    branch = {"layer_scale": p["ls1.gamma"], "row_scale": scale1, "residual": x}
    x = ops.layer_norm_attention(x, *norm1, *qkv, *proj, H, **branch, **heads)
    branch = {"layer_scale": p["ls2.gamma"], "row_scale": scale2, "residual": x}
    return ops.layer_norm_mlp(x, *norm2, *fc1, *fc2, **branch, recompute=recompute, dropout_p=dropout_p)


@pytest.fixture
def x_and_parameters(device):
    """In bfloat16, so that a token tensor kept in float32 would count double."""
    make = {"dtype": torch.bfloat16, "device": device}
    module = randomised(layers.Block(D, H, qkv_bias=True, init_values=1.0, **make))
    return inputs("normal", B, N, D, **make).requires_grad_(), dict(module.named_parameters())


# x, qkv (3), attention's output, x', fc1's pre-activation (4) [, fc1's activation (4)]
@pytest.mark.parametrize(("recompute", "tokens"), [("all", 6), ("activation", 10), ("none", 14)])
def test_block_saves_no_more_than(recompute, tokens, x_and_parameters):
    """With stochastic depth, dropout, positions and norms of q and k, whose tables and seeds are all that is added."""
    x, parameters = x_and_parameters
    drop_path = torch.full((2, B), 1.25, dtype=x.dtype, device=x.device)
    rotary = ops.Rotary(*torch.randn(2, N - 1, D // H, device=x.device), 1)
    norm = ops.Norm(torch.ones(D // H, dtype=x.dtype, device=x.device, requires_grad=True), kind="rms")
    added = drop_path.nbytes + 2 * rotary.sin.nbytes + norm.weight.nbytes + 2 * 8
    heads = {"rotary": rotary, "qk_norm": (norm, norm)}
    saved = saved_bytes(lambda: block(x, parameters, drop_path, recompute, 0.1, **heads), parameters.values())
    statistics = 4 * (2 * 2 * B * N + B * H * N)  # mean and rstd of two norms, log-sum-exp, float32
    token_tensor = B * N * D * x.element_size()
    assert saved <= tokens * token_tensor + statistics + added
    assert saved > (tokens - 1) * token_tensor  # the count itself works


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
        step()
        peaks[provider] = peak_bytes(step, device)
    fused = peaks.pop("fastvit")
    extra = 4 * (6 * 33 + 2 * 96)  # log-sum-exp of six heads; gradients of the norm, which come earlier than PyTorch's
    assert fused <= max(peaks.values()) + extra
    assert fused > 4 * 96 * 96 * 3  # the count itself works: there are gradients of weights


@pytest.mark.parametrize(("activation", "dact"), [("gelu", "linear_dact"), ("swiglu", "gated_dact")])
def test_the_scaled_gradient_is_gone_before_the_norm_s_backward_pass(activation, dact, device):
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
        mock.patch.object(module, dact, noted(getattr(module, dact), lambda g: seen.append(weakref.ref(g)))),
        mock.patch.object(module, "norm_backward", noted(module.norm_backward, lambda _: alive.append(seen[0]()))),
    ):
        out.backward(torch.ones_like(out))
    assert alive == [None]
