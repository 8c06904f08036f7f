"""ops.add_layer_norm: sums in chunks, one of two outputs, statistics of the sum that is returned."""

import pytest
import torch
from op_cases import tensors_of
from oracle import assert_op_as_accurate

from fastvit import ops
from fastvit.ops.layer_norm import aten as aten_layer_norm
from fastvit.reference import ops as formulas

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
        s, _, mean, rstd = torch.ops.fastvit.add_layer_norm_fwd(residual, branch, weight, bias, None, None, 1e-6)
        exact = s.double()
        torch.testing.assert_close(mean, exact.mean(1, keepdim=True).float())
        torch.testing.assert_close(rstd, exact.var(1, correction=0, keepdim=True).rsqrt().float())
