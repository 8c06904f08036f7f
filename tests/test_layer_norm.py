"""ops.layer_norm and ops.add_layer_norm against float64 and eager PyTorch, on both backends."""

import formulas
import pytest
import torch
from oracle import assert_as_accurate, assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.ops import _library

registered = torch.ops.fastvit

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# one row; rows that fill no tile; D below, at and above a power of two; more row tiles than programs; D of two elements
SHAPES = [(1, 1, 192), (2, 197, 48), (3, 7, 1000), (2, 17, 768), (37, 130, 16), (4, 3, 2)]


def parameters(dim, dtype, device, kind="normal"):
    return [inputs(kind, dim, dtype=dtype, device=device, seed=s).requires_grad_() for s in (1, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape, dtype, backend, device):
    x = inputs("normal", *shape, dtype=dtype, device=device).requires_grad_()
    weight, bias = parameters(shape[-1], dtype, device)
    assert_op_as_accurate(ops.layer_norm, formulas.layer_norm, {"x": x, "weight": weight, "bias": bias})


@pytest.mark.parametrize("kind", ["integer", "large", "offset"])
def test_layer_norm_inputs(kind, backend, device):
    """Rows with mean 1000 expose one-pass variance and masked lanes that enter it (D = 769)."""
    x = inputs(kind, 2, 5, 769, dtype=torch.float32, device=device).requires_grad_()
    weight, bias = parameters(769, torch.float32, device)
    assert_op_as_accurate(ops.layer_norm, formulas.layer_norm, {"x": x, "weight": weight, "bias": bias}, what=kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row_scale", [False, True], ids=["", "row_scale"])
@pytest.mark.parametrize("layer_scale", [False, True], ids=["", "layer_scale"])
def test_add_layer_norm(layer_scale, row_scale, dtype, backend, device):
    B, N, D = 5, 13, 72
    residual, branch = (inputs("normal", B, N, D, dtype=dtype, device=device, seed=s).requires_grad_() for s in (3, 4))
    gamma = inputs("normal", D, dtype=dtype, device=device, seed=5).requires_grad_() if layer_scale else None
    drop = torch.tensor([0.0, 1.25, 1.25, 0.0, 1.25], dtype=dtype, device=device) if row_scale else None

    weight, bias = parameters(D, dtype, device)
    tensors = {"residual": residual, "branch": branch, "weight": weight, "bias": bias}
    tensors |= {"layer_scale": gamma, "row_scale": drop}
    assert_op_as_accurate(ops.add_layer_norm, formulas.add_layer_norm, tensors)


def test_add_layer_norm_uses_one_output(backend, device):
    """Only one of the two outputs has a gradient."""
    residual, branch = (
        inputs("normal", 2, 3, 8, dtype=torch.float32, device=device, seed=s).requires_grad_() for s in (0, 1)
    )
    weight, bias = parameters(8, torch.float32, device)
    total, y = ops.add_layer_norm(residual, branch, weight, bias)
    (grad,) = torch.autograd.grad(total.sum(), residual, retain_graph=True)
    torch.testing.assert_close(grad, torch.ones_like(grad))
    (got,) = torch.autograd.grad(y.square().sum(), branch)
    (want,) = torch.autograd.grad(formulas.layer_norm(residual + branch, weight, bias).square().sum(), branch)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_those_of_the_sum_that_is_returned(dtype, backend, device):
    """The backward pass reads the rounded sum: statistics of the exact one would not be its own."""
    residual = inputs("offset", 6, 40, dtype=dtype, device=device)
    branch = inputs("normal", 6, 40, dtype=dtype, device=device, seed=1)
    weight, bias = (p.detach() for p in parameters(40, dtype, device))
    s, _, mean, rstd = registered.add_layer_norm_fwd(residual, branch, weight, bias, None, None, 1e-6)
    exact = s.double()
    torch.testing.assert_close(mean, exact.mean(1, keepdim=True).float())
    torch.testing.assert_close(rstd, exact.var(1, correction=0, keepdim=True).rsqrt().float())


def test_mixed_residual_dtype(backend, device):
    """A float32 residual stream with a bfloat16 branch, as autocast makes them."""
    residual = inputs("normal", 2, 7, 40, dtype=torch.float32, device=device).requires_grad_()
    branch = inputs("normal", 2, 7, 40, dtype=torch.bfloat16, device=device, seed=1).requires_grad_()

    weight, bias = parameters(40, torch.float32, device)
    tensors = {"residual": residual, "branch": branch, "weight": weight, "bias": bias}
    assert_op_as_accurate(ops.add_layer_norm, formulas.add_layer_norm, tensors)


def test_strided_parameters(backend, device):
    """Slices and expanded vectors, as a caller that keeps several parameters in one tensor passes them."""
    x, branch = (
        inputs("normal", 3, 5, 24, dtype=torch.float32, device=device, seed=s).requires_grad_() for s in (0, 1)
    )
    vectors = [
        inputs("normal", n, dtype=torch.float32, device=device, seed=5 + i) for i, n in enumerate((24, 24, 24, 3))
    ]

    def results(weight, bias, layer_scale, row_scale):
        y = ops.layer_norm(x, weight, bias)
        s, z = ops.add_layer_norm(x, branch, weight, bias, layer_scale=layer_scale, row_scale=row_scale)
        wanted = [x, branch, weight, bias, layer_scale]
        return y, s, z, *torch.autograd.grad((y * s * z).sum(), wanted)

    *scaled, row_scale = vectors
    want = results(*(t.requires_grad_() for t in scaled), row_scale)
    gaps = [torch.stack([t, torch.full_like(t, torch.nan)], 1)[:, 0].detach() for t in vectors]
    *scaled, row_scale = gaps
    got = results(*(t.requires_grad_() for t in scaled), row_scale)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    one = torch.ones(1, device=device)
    expanded = ops.layer_norm(x, one.expand(24), 0 * one.expand(24))
    torch.testing.assert_close(expanded, formulas.layer_norm(x, None, None))


def test_expanded_gradient(backend, device):
    x = inputs("normal", 3, 5, 24, dtype=torch.float32, device=device).requires_grad_()
    weight, bias = parameters(24, torch.float32, device)
    got = torch.autograd.grad(ops.layer_norm(x, weight, bias).sum(), (x, weight, bias))
    want = torch.autograd.grad(formulas.layer_norm(x, weight, bias).sum(), (x, weight, bias))
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_gradcheck(device):
    with _library.use_backend("aten"):
        double = {"dtype": torch.float64, "device": device}
        x, branch = (inputs("normal", 2, 3, 6, seed=s, **double).requires_grad_() for s in (0, 1))
        weight, bias = parameters(6, torch.float64, device)
        gamma = inputs("normal", 6, seed=5, **double).requires_grad_()
        drop = torch.tensor([0.0, 2.0], **double)
        assert torch.autograd.gradcheck(ops.layer_norm, (x, weight, bias))
        assert torch.autograd.gradcheck(
            lambda *a: ops.add_layer_norm(*a[:4], layer_scale=a[4], row_scale=drop), (x, branch, weight, bias, gamma)
        )


@pytest.mark.parametrize("dresidual", [False, True])
def test_opcheck(dresidual, backend, device):
    x, dy, extra = (inputs("normal", 6, 24, dtype=torch.float32, device=device, seed=s) for s in range(3))
    weight, bias = (p.detach() for p in parameters(24, torch.float32, device))
    extra = extra if dresidual else None
    gamma, drop = (weight, torch.ones(3, device=device)) if dresidual else (None, None)
    _, mean, rstd = registered.layer_norm_fwd(x, weight, bias, 1e-6, None)
    opcheck = torch.library.opcheck
    opcheck(torch.ops.fastvit.layer_norm_fwd, (x, weight, bias, 1e-6, torch.bfloat16 if dresidual else None))
    opcheck(torch.ops.fastvit.layer_norm_fwd, (x.view(2, 3, 24), weight, bias, 1e-6, None))
    opcheck(torch.ops.fastvit.layer_norm_bwd, (dy, x, mean, rstd, weight, extra))
    opcheck(torch.ops.fastvit.layer_norm_bwd_recompute, (dy, x, mean, rstd, weight, bias, extra))
    opcheck(torch.ops.fastvit.add_layer_norm_fwd, (x, dy, weight, bias, gamma, drop, 1e-6))
    opcheck(torch.ops.fastvit.add_layer_norm_bwd, (dy, extra, x, mean, rstd, weight, dy, gamma, drop))


def test_recompute_returns_the_forward_output(backend, device):
    x, dy = (inputs("normal", 9, 40, dtype=torch.bfloat16, device=device, seed=s) for s in (0, 1))
    weight, bias = (p.detach() for p in parameters(40, torch.bfloat16, device))
    y, mean, rstd = registered.layer_norm_fwd(x, weight, bias, 1e-6, None)
    *_, again = registered.layer_norm_bwd_recompute(dy, x, mean, rstd, weight, bias, None)
    exact = formulas.layer_norm(x.double(), weight.double(), bias.double())
    assert_as_accurate(again, y, exact, what="recomputed y")


def test_autocast_follows_eager(backend, device):
    weight, bias = parameters(24, torch.float32, device)
    for dtype in (torch.float32, torch.bfloat16):
        x = inputs("normal", 2, 5, 24, dtype=dtype, device=device).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            got, want = ops.layer_norm(x, weight, bias), formulas.layer_norm(x, weight, bias)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, atol=2e-2, rtol=1e-2)
        gradients = torch.autograd.grad(got.sum(), (x, weight))
        assert [g.dtype for g in gradients] == [dtype, torch.float32]


BAD = {
    "x must be a tensor": (TypeError, lambda x, w, b: ops.layer_norm([1.0], w, b)),
    "x must be float32": (TypeError, lambda x, w, b: ops.layer_norm(x.long(), w, b)),
    "x must have a non-empty last": (ValueError, lambda x, w, b: ops.layer_norm(x[..., :0], w, b)),
    "weight must have shape": (ValueError, lambda x, w, b: ops.layer_norm(x, w[:-1], b)),
    "bias must have x's dtype": (TypeError, lambda x, w, b: ops.layer_norm(x, w, b.half())),
    "weight must be on x's device": (ValueError, lambda x, w, b: ops.layer_norm(x, w.to("meta"), b)),
    "eps must be finite and not negative": (ValueError, lambda x, w, b: ops.layer_norm(x, w, b, -1e-6)),
    "branch must have shape": (ValueError, lambda x, w, b: ops.add_layer_norm(x, x[:, :1], w, b)),
    "layer_scale must have shape": (ValueError, lambda x, w, b: ops.add_layer_norm(x, x, w, b, layer_scale=w[:3])),
    "row_scale must have shape": (ValueError, lambda x, w, b: ops.add_layer_norm(x, x, w, b, row_scale=w)),
}


@pytest.mark.parametrize("message", BAD, ids=[m.replace(" ", "_") for m in BAD])
def test_bad_arguments(message, device):
    error, call = BAD[message]
    x, w, b = (torch.randn(*shape, device=device) for shape in ((2, 5, 24), (24,), (24,)))
    with pytest.raises(error, match=message):
        call(x, w, b)
