"""The registered ops of norms: statistics, what the backward pass computes next to gradients, sums in chunks."""

import pytest
import torch
from op_cases import tensors_of
from oracle import GRADIENT, assert_as_accurate, assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.ops.layer_norm import aten as aten_layer_norm
from fastvit.study.accuracy import formulas

registered = torch.ops.fastvit

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def summed(*shape):
    return {"residual": shape, "branch": shape, "weight": shape[-1:], "bias": shape[-1:]}


@pytest.mark.parametrize(("row_scale", "dtype"), [(False, F32), (True, F32), (True, BF16)], ids=str)
def test_gradient_of_layer_scale_in_chunks(row_scale, dtype, device, monkeypatch):
    """Chunks of 7 rows, which divide neither the 13 rows of a sample nor all 65."""
    monkeypatch.setattr(aten_layer_norm, "_CHUNK", 7 * 72)
    shapes = summed(5, 13, 72) | {"layer_scale": (72,), "row_scale": (5,) if row_scale else None}
    with ops.use_backend("aten"):
        assert_op_as_accurate(ops.add_layer_norm, formulas.add_layer_norm, tensors_of(shapes, dtype, device))


def test_add_layer_norm_uses_one_output(backend, device):
    """Only one of the two outputs has a gradient."""
    residual, branch, weight, bias = tensors_of(summed(2, 3, 8), F32, device).values()
    total, y = ops.add_layer_norm(residual, branch, weight, bias)
    (grad,) = torch.autograd.grad(total.sum(), residual, retain_graph=True)
    torch.testing.assert_close(grad, torch.ones_like(grad))
    (got,) = torch.autograd.grad(y.square().sum(), branch)
    (want,) = torch.autograd.grad(formulas.layer_norm(residual + branch, weight, bias).square().sum(), branch)
    torch.testing.assert_close(got, want)


def test_statistics_are_those_of_the_sum_that_is_returned(backend, device):
    """The backward pass reads the rounded sum: statistics of the exact one would not be its own."""
    for dtype in (BF16, F16):
        residual, branch, weight, bias = (t.detach() for t in tensors_of(summed(6, 40), dtype, device).values())
        residual += 1000
        s, _, mean, rstd = registered.add_layer_norm_fwd(residual, branch, weight, bias, None, None, 1e-6)
        exact = s.double()
        torch.testing.assert_close(mean, exact.mean(1, keepdim=True).float())
        torch.testing.assert_close(rstd, exact.var(1, correction=0, keepdim=True).rsqrt().float())


def test_recompute_returns_the_forward_output(backend, device):
    x, dy = (inputs("normal", 9, 40, dtype=BF16, device=device, seed=s) for s in (0, 1))
    weight, bias = (inputs("normal", 40, dtype=BF16, device=device, seed=s) for s in (1, 2))
    y, mean, rstd = registered.layer_norm_fwd(x, weight, bias, 1e-6, None)
    *_, again, _ = registered.layer_norm_bwd_recompute(dy, x, mean, rstd, weight, bias, None)
    exact = formulas.layer_norm(x.double(), weight.double(), bias.double())
    assert_as_accurate(again, y, exact, what="recomputed y")
    y, _, rstd = registered.layer_norm_fwd(x, weight, None, 1e-6, None, True)
    *_, again, _ = registered.layer_norm_bwd_recompute(dy, x, None, rstd, weight, None, None)
    assert_as_accurate(again, y, formulas.rms_norm(x.double(), weight.double()), what="recomputed y of RMSNorm")


@pytest.mark.parametrize(
    ("norm", "scaled", "shape", "dtype"),
    [
        ("rms", True, (2, 197, 48), BF16),
        ("layer", False, (37, 30, 16), BF16),
    ],
    ids=str,
)
def test_total_of_the_residual_s_gradient(norm, scaled, shape, dtype, backend, device):
    """The total of bfloat16, in either dtype. It changes no gradient, also of a norm that recomputes y."""
    dy, x, dresidual = (inputs("normal", *shape, dtype=BF16, device=device, seed=s) for s in (0, 1, 2))
    weight = inputs("normal", shape[-1], dtype=BF16, device=device, seed=3)
    row_scale = inputs("normal", shape[0], dtype=F32, device=device, seed=4) if scaled else None
    _, mean, rstd = registered.layer_norm_fwd(x, weight, None, 1e-6, None, norm == "rms")
    saved = x, mean if norm == "layer" else None, rstd, weight
    *gradients, none = registered.layer_norm_bwd(dy, *saved, dresidual)
    *others, total = registered.layer_norm_bwd(dy, *saved, dresidual, row_scale, dtype)
    *recomputed, _, again = registered.layer_norm_bwd_recompute(dy, *saved, None, dresidual, row_scale, dtype)
    assert (none.shape, total.shape, total.dtype) == ((0,), shape[-1:], dtype)
    for a, b in zip((*gradients, *gradients, total), (*others, *recomputed, again), strict=True):
        assert torch.equal(a, b)
    scale = torch.ones(shape[0], device=device) if row_scale is None else row_scale
    eager, exact = ((dresidual.to(t) * scale.to(t)[:, None, None]).sum((0, 1)) for t in (F32, torch.float64))
    assert_as_accurate(total, eager.to(dtype), exact, factor=GRADIENT, what="total")
