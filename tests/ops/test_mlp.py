"""ops.mlp and ops.layer_norm_mlp: dropout, gates without our kernel, and gradients that float16
could not hold."""

import pytest
import torch
from op_cases import function, made
from oracle import GRADIENT, assert_as_accurate, assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.ops.dropout.op import draw_seeds, dropout_op
from fastvit.reference import ops as formulas
from fastvit.study.accuracy.cases import arguments


@pytest.mark.parametrize(
    ("name", "hidden", "recompute"),
    [
        ("layer_norm_mlp gelu", 40, "all"),
        ("layer_norm_mlp inner", 40, "activation"),
        ("mlp swiglu", 20, "none"),
        ("layer_norm_mlp gated", 20, "all"),
    ],
)
def test_dropout(name, hidden, recompute, backend, device):
    """Against eager with the factors that the op draws from the same seeds."""
    tensors = made(name, 3, 7, device)
    torch.manual_seed(11)
    seeds = draw_seeds(3, device)
    factors = [
        dropout_op(torch.ones(21, n, device=device), seed, 0.3).view(3, 7, n)
        for seed, n in zip((seeds[:1], seeds[2:]), (hidden, 16), strict=True)
    ]
    assert not torch.equal(factors[0][..., :16], factors[1])
    call, options = function(name), {"dropout_p": 0.3, "recompute": recompute}

    def seeded(**tensors):
        torch.manual_seed(11)
        return call(**tensors, **options)

    assert_op_as_accurate(seeded, lambda **t: function(name, formulas)(**t, factors=factors), tensors, what="dropout")


@pytest.mark.parametrize(
    ("name", "dtype"), [("mlp swiglu", torch.bfloat16), ("layer_norm_mlp gated", torch.float32)], ids=str
)
def test_vendor_matmuls_of_a_gated_mlp(name, dtype, monkeypatch, triton_backend, device):
    """Where the kernel is not used, gate and value are two matmuls into one buffer and a pass over it."""
    from fastvit.ops.linear import launch

    monkeypatch.setattr(launch, "is_our_matmul", lambda *_, **__: False)
    monkeypatch.delattr(launch, "gemm")
    assert_op_as_accurate(function(name), function(name, formulas), made(name, 3, 7, device, dtype), what=name)


@pytest.mark.parametrize("hidden", [16, 64], ids=["more_rows", "fewer_rows"])
def test_small_layer_scale_in_float16(hidden, backend, device):
    """DINOv2's 1e-5 with the gradients that loss scaling makes of it: layer_scale * weight would underflow, and the
    weight's gradient before layer_scale would overflow."""
    tensors = made("mlp gelu", 4, 8, device, hidden=hidden)
    del tensors["row_scale"]
    tensors["layer_scale"] = torch.full((16,), 1e-5, device=device, requires_grad=True)
    dout = inputs("offset", 4, 8, 16, dtype=torch.float32, device=device, seed=70) * 8

    def gradients(module, dtype):
        cast = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in tensors.items()}
        with torch.autocast(device.type, torch.float16, enabled=dtype is None):
            out = module.mlp(**arguments(cast), residual=cast["x"])
        return torch.autograd.grad(out, list(cast.values()), dout.to(out.dtype))

    runs = gradients(ops, None), gradients(formulas, None), gradients(formulas, torch.float64)
    for name, got, same, exact in zip(tensors, *runs, strict=True):
        assert_as_accurate(got, same, exact, factor=GRADIENT, what=name)
