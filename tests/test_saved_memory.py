"""What a pre-norm block of the public ops saves for its backward pass, counted in token tensors of B * N * D."""

import pytest
import torch
from oracle import inputs

from fastvit import ops

B, N, H, D = 2, 17, 2, 32
SHAPES = {
    "norm1_weight": (D,),
    "norm1_bias": (D,),
    "qkv_weight": (3 * D, D),
    "qkv_bias": (3 * D,),
    "proj_weight": (D, D),
    "proj_bias": (D,),
    "gamma1": (D,),
    "norm2_weight": (D,),
    "norm2_bias": (D,),
    "fc1_weight": (4 * D, D),
    "fc1_bias": (4 * D,),
    "fc2_weight": (D, 4 * D),
    "fc2_bias": (D,),
    "gamma2": (D,),
}


def block(x, p, drop_path, recompute, dropout_p):
    scale = None if drop_path is None else drop_path[0]
    y, x = ops.layer_norm_linear(
        x, p["norm1_weight"], p["norm1_bias"], p["qkv_weight"], p["qkv_bias"], return_residual=True
    )
    o = ops.attention_qkvpacked(y.view(B, N, 3, H, D // H))
    x = ops.linear(o.flatten(2), p["proj_weight"], p["proj_bias"], layer_scale=p["gamma1"], row_scale=scale, residual=x)
    return ops.layer_norm_mlp(
        x, p["norm2_weight"], p["norm2_bias"], p["fc1_weight"], p["fc1_bias"], p["fc2_weight"], p["fc2_bias"],
        layer_scale=p["gamma2"], row_scale=None if drop_path is None else drop_path[1], residual=x,
        recompute=recompute, dropout_p=dropout_p,
    )  # fmt: skip


def eager_block(x, p):
    F = torch.nn.functional
    y = F.linear(F.layer_norm(x, (D,), p["norm1_weight"], p["norm1_bias"]), p["qkv_weight"], p["qkv_bias"])
    q, k, v = y.view(B, N, 3, H, D // H).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + p["gamma1"] * F.linear(o, p["proj_weight"], p["proj_bias"])
    h = F.gelu(F.linear(F.layer_norm(x, (D,), p["norm2_weight"], p["norm2_bias"]), p["fc1_weight"], p["fc1_bias"]))
    return x + p["gamma2"] * F.linear(h, p["fc2_weight"], p["fc2_bias"])


def saved_bytes(function, x, parameters):
    """Bytes saved for backward by unique storage, parameters excluded."""
    known = {p.untyped_storage().data_ptr() for p in parameters.values()}
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(x, parameters).sum().backward()
    return sum(size for pointer, size in saved.items() if pointer not in known)


@pytest.fixture
def x_and_parameters(device):
    """In bfloat16, so that a token tensor kept in float32 would count double."""
    make = {"dtype": torch.bfloat16, "device": device}
    parameters = {n: inputs("normal", *s, seed=i, **make).requires_grad_() for i, (n, s) in enumerate(SHAPES.items())}
    return inputs("normal", B, N, D, seed=99, **make).requires_grad_(), parameters


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
    saved = saved_bytes(
        lambda x, p: block(x, p, drop_path, recompute, 0.1 if options == "dropout" else 0.0), x, parameters
    )
    statistics = 4 * (2 * 2 * B * N + B * H * N)  # mean and rstd of two norms, log-sum-exp, float32
    token_tensor = B * N * D * x.element_size()
    assert saved <= tokens * token_tensor + statistics + extra
    assert saved > (tokens - 1) * token_tensor  # the count itself works


def test_eager_block_saves_more(x_and_parameters):
    """The yardstick counts what PyTorch is known to save: both norms' outputs and both scaled branches too."""
    x, parameters = x_and_parameters
    assert saved_bytes(eager_block, x, parameters) >= 18 * B * N * D * x.element_size()
