"""ops.layer_norm, ops.rms_norm and ops.add_layer_norm against float64 and eager PyTorch, on both backends."""

from functools import partial

import pytest
import torch
from op_cases import tensors_of
from oracle import GRADIENT, assert_as_accurate, assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.ops.layer_norm import aten as aten_layer_norm
from fastvit.study.accuracy import formulas

registered = torch.ops.fastvit

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# one row; rows that fill no tile; D below, at and above a power of two; more row tiles than programs; D of two elements
SHAPES = [
    ((1, 1, 192), F16),
    ((2, 197, 48), F32),
    ((2, 197, 48), BF16),
    ((3, 7, 1000), F32),
    ((3, 7, 1000), F16),
    ((2, 17, 768), BF16),
    ((37, 130, 16), F32),
    ((4, 3, 2), BF16),
]


@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [("layer_norm", *case) for case in SHAPES] + [("rms_norm", *case) for case in SHAPES[::2]],
    ids=str,
)
def test_norms(op, shape, dtype, backend, device):
    check_norm(op, tensors_of({"x": shape, "weight": shape[-1:], "bias": shape[-1:]}, dtype, device))


def check_norm(op, tensors):
    if op == "rms_norm":
        del tensors["bias"]
    assert_op_as_accurate(getattr(ops, op), getattr(formulas, op), tensors)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_eps_and_no_bias(norm, backend, device):
    """Rows as small as eps, where it counts."""
    tensors = tensors_of({"x": (3, 7, 40), "weight": (40,)}, torch.float32, device)
    tensors["x"] = (tensors["x"].detach() * 0.1).requires_grad_()
    options = {"eps": 0.02, "norm": norm}
    assert_op_as_accurate(partial(ops.layer_norm, **options), partial(formulas.layer_norm, **options), tensors)


@pytest.mark.parametrize("kind", ["integer", "large", "offset"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_inputs(op, kind, backend, device):
    """Rows with mean 1000 expose one-pass variance and masked lanes that enter it (D = 769)."""
    tensors = tensors_of({"x": (2, 5, 769), "weight": (769,), "bias": (769,)}, torch.float32, device)
    tensors["x"] = inputs(kind, 2, 5, 769, dtype=torch.float32, device=device).requires_grad_()
    check_norm(op, tensors)


SCALES = {"layer_scale": (72,), "row_scale": (5,)}


def summed(*shape):
    return {"residual": shape, "branch": shape, "weight": shape[-1:], "bias": shape[-1:]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scales", [(), ("layer_scale",), ("row_scale",), ("layer_scale", "row_scale")], ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_add_layer_norm(norm, scales, dtype, backend, device):
    tensors = tensors_of(summed(5, 13, 72) | {name: SCALES[name] for name in scales}, dtype, device)
    if norm == "rms":
        tensors["bias"] = None
    assert_op_as_accurate(*(partial(module.add_layer_norm, norm=norm) for module in (ops, formulas)), tensors)


@pytest.mark.parametrize(
    "dtypes",
    [
        (F32, BF16, F32, F32),
        (F32, BF16, BF16, BF16),
        (BF16, F32, BF16, BF16),
        (F16, BF16, F32, F32),
        (BF16, BF16, F32, F32),
    ],
    ids=lambda dtypes: "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
)
@pytest.mark.parametrize("row_scale", [False, True], ids=["", "row_scale"])
def test_add_layer_norm_of_several_dtypes(row_scale, dtypes, backend, device):
    """dtypes: of residual, branch, layer_scale and row_scale. Products are not rounded to a dtype narrower than the
    sum's."""
    sum_dtype = torch.promote_types(*dtypes[:2])
    tensors = tensors_of(summed(5, 13, 72) | SCALES, sum_dtype, device)
    for name, dtype in zip(("residual", "branch", "layer_scale", "row_scale"), dtypes, strict=True):
        tensors[name] = tensors[name].detach().to(dtype).requires_grad_(name != "row_scale")
    tensors["row_scale"] = tensors["row_scale"] * 1.1 if row_scale else None
    assert_op_as_accurate(ops.add_layer_norm, formulas.add_layer_norm, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row_scale", [False, True], ids=["", "row_scale"])
def test_gradient_of_layer_scale_in_chunks(row_scale, dtype, device, monkeypatch):
    """Chunks of 7 rows, which divide neither the 13 rows of a sample nor all 65."""
    monkeypatch.setattr(aten_layer_norm, "_CHUNK", 7 * 72)
    shapes = summed(5, 13, 72) | {"layer_scale": (72,), "row_scale": (5,) if row_scale else None}
    with ops.use_backend("aten"):
        assert_op_as_accurate(ops.add_layer_norm, formulas.add_layer_norm, tensors_of(shapes, dtype, device))


def test_add_layer_norm_uses_one_output(backend, device):
    """Only one of the two outputs has a gradient."""
    residual, branch, weight, bias = tensors_of(summed(2, 3, 8), torch.float32, device).values()
    total, y = ops.add_layer_norm(residual, branch, weight, bias)
    (grad,) = torch.autograd.grad(total.sum(), residual, retain_graph=True)
    torch.testing.assert_close(grad, torch.ones_like(grad))
    (got,) = torch.autograd.grad(y.square().sum(), branch)
    (want,) = torch.autograd.grad(formulas.layer_norm(residual + branch, weight, bias).square().sum(), branch)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_those_of_the_sum_that_is_returned(dtype, backend, device):
    """The backward pass reads the rounded sum: statistics of the exact one would not be its own."""
    residual, branch, weight, bias = (t.detach() for t in tensors_of(summed(6, 40), dtype, device).values())
    residual += 1000
    s, _, mean, rstd = registered.add_layer_norm_fwd(residual, branch, weight, bias, None, None, 1e-6)
    exact = s.double()
    torch.testing.assert_close(mean, exact.mean(1, keepdim=True).float())
    torch.testing.assert_close(rstd, exact.var(1, correction=0, keepdim=True).rsqrt().float())


def test_recompute_returns_the_forward_output(backend, device):
    x, dy = (inputs("normal", 9, 40, dtype=torch.bfloat16, device=device, seed=s) for s in (0, 1))
    weight, bias = (inputs("normal", 40, dtype=torch.bfloat16, device=device, seed=s) for s in (1, 2))
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
        ("layer", False, (2, 197, 48), F32),
        ("rms", True, (2, 197, 48), BF16),
        ("layer", True, (3, 7, 1000), BF16),
        ("rms", False, (3, 7, 1000), F32),
        ("layer", True, (37, 30, 16), F32),
        ("rms", False, (37, 30, 16), BF16),
    ],
    ids=str,
)
def test_total_of_the_residual_s_gradient(norm, scaled, shape, dtype, backend, device):
    """The total of bfloat16, in either dtype. It changes no gradient, also of a norm that recomputes y."""
    dy, x, dresidual = (inputs("normal", *shape, dtype=torch.bfloat16, device=device, seed=s) for s in (0, 1, 2))
    weight = inputs("normal", shape[-1], dtype=torch.bfloat16, device=device, seed=3)
    row_scale = inputs("normal", shape[0], dtype=torch.float32, device=device, seed=4) if scaled else None
    _, mean, rstd = registered.layer_norm_fwd(x, weight, None, 1e-6, None, norm == "rms")
    saved = x, mean if norm == "layer" else None, rstd, weight
    *gradients, none = registered.layer_norm_bwd(dy, *saved, dresidual)
    *others, total = registered.layer_norm_bwd(dy, *saved, dresidual, row_scale, dtype)
    *recomputed, _, again = registered.layer_norm_bwd_recompute(dy, *saved, None, dresidual, row_scale, dtype)
    assert (none.shape, total.shape, total.dtype) == ((0,), shape[-1:], dtype)
    for a, b in zip((*gradients, *gradients, total), (*others, *recomputed, again), strict=True):
        assert torch.equal(a, b)
    scale = torch.ones(shape[0], device=device) if row_scale is None else row_scale
    eager, exact = ((dresidual.to(t) * scale.to(t)[:, None, None]).sum((0, 1)) for t in (torch.float32, torch.float64))
    assert_as_accurate(total, eager.to(dtype), exact, factor=GRADIENT, what="total")
