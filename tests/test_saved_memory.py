"""What a pre-norm block of the public ops saves for its backward pass, counted in token tensors of B * N * D."""

import pytest
import torch
import torch.nn.functional as F
from models import randomised
from oracle import inputs

from benchmarks.harness.memory import saved_bytes
from fastvit import layers, ops

B, N, H, D = 2, 17, 2, 32


def weights_and_biases(p):
    names = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    return ((p[f"{name}.weight"], p[f"{name}.bias"]) for name in names)


def block(x, p, drop_path, recompute, dropout_p):
    norm1, qkv, proj, norm2, fc1, fc2 = weights_and_biases(p)
    scale1, scale2 = (None, None) if drop_path is None else drop_path
    branch = {"layer_scale": p["ls1.gamma"], "row_scale": scale1, "residual": x}
    x = ops.layer_norm_attention(x, *norm1, *qkv, *proj, H, **branch)
    branch = {"layer_scale": p["ls2.gamma"], "row_scale": scale2, "residual": x}
    return ops.layer_norm_mlp(x, *norm2, *fc1, *fc2, **branch, recompute=recompute, dropout_p=dropout_p)


def eager_block(x, p):
    norm1, qkv, proj, norm2, fc1, fc2 = weights_and_biases(p)
    y = F.linear(F.layer_norm(x, (D,), *norm1), *qkv)
    q, k, v = y.view(B, N, 3, H, D // H).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + p["ls1.gamma"] * F.linear(o, *proj)
    h = F.gelu(F.linear(F.layer_norm(x, (D,), *norm2), *fc1))
    return x + p["ls2.gamma"] * F.linear(h, *fc2)


@pytest.fixture
def x_and_parameters(device):
    """In bfloat16, so that a token tensor kept in float32 would count double."""
    make = {"dtype": torch.bfloat16, "device": device}
    module = randomised(layers.Block(D, H, qkv_bias=True, init_values=1.0, **make))
    return inputs("normal", B, N, D, **make).requires_grad_(), dict(module.named_parameters())


# x, qkv (3), attention's output, x', fc1's pre-activation (4) [, fc1's activation (4)]
@pytest.mark.parametrize(("recompute", "tokens"), [("all", 6), ("activation", 10), ("none", 14)])
@pytest.mark.parametrize("options", ["plain", "drop_path", "dropout"])
def test_block_saves_no_more_than(recompute, tokens, options, x_and_parameters, backend):
    x, parameters = x_and_parameters
    drop_path = None
    extra = 0
    if options == "drop_path":
        drop_path = torch.full((2, B), 1.25, dtype=x.dtype, device=x.device)
        extra = drop_path.nbytes
    elif options == "dropout":
        extra = 2 * 8  # seeds
    dropout_p = 0.1 if options == "dropout" else 0.0
    saved = saved_bytes(lambda: block(x, parameters, drop_path, recompute, dropout_p), parameters.values())
    statistics = 4 * (2 * 2 * B * N + B * H * N)  # mean and rstd of two norms, log-sum-exp, float32
    token_tensor = B * N * D * x.element_size()
    assert saved <= tokens * token_tensor + statistics + extra
    assert saved > (tokens - 1) * token_tensor  # the count itself works


def test_eager_block_saves_more(x_and_parameters):
    """The yardstick counts what PyTorch is known to save: both norms' outputs and both scaled branches too."""
    x, parameters = x_and_parameters
    assert saved_bytes(lambda: eager_block(x, parameters), parameters.values()) >= 18 * B * N * D * x.element_size()
