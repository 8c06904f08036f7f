"""The backward kernels of attention without autograd, against float64 gradients of the formula. Needs triton."""

import pytest
import torch
from oracle import GRADIENT, assert_as_accurate, inputs

pytest.importorskip("triton")

from fastvit.kernels import _attention_configs, _configs
from fastvit.ops.attention.softmax_launch import launch_backward, launch_forward
from fastvit.study.accuracy.formulas import attention

MARGIN = 8  # elements of NaN around every gradient

pytestmark = pytest.mark.usefixtures("triton_backend")


@pytest.fixture(params=["short", "split"])
def kernels(request, monkeypatch):
    """Run the test with one program per head, and with separate kernels for dQ and dK/dV, whatever the dtype."""

    def short(n, head_dim, itemsize, *_):
        rows = max(_configs.next_power_of_2(n), 64)
        parts = _attention_configs.split_head_dim(head_dim)
        return _attention_configs.AttentionBackwardConfig(rows, 64 if itemsize == 2 else 16, True, 0, parts, 8, 2)

    forced = short if request.param == "short" else lambda *_: None
    monkeypatch.setattr(_attention_configs, "attention_bwd_short", forced)
    return request.param


def autograd(q, k, v, do, scale, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(attention(*leaves, scale=scale), leaves, do.to(dtype))


def fused(q, k, v, do, scale):
    """Run the forward kernel and return dq, dk, dv of the backward kernels."""
    o, lse = launch_forward(q, k, v, None, None, scale, 0.0, False, None)
    B, N, H, d = q.shape
    frame = torch.full((B * N * 3 * H * d + 2 * MARGIN,), torch.nan, dtype=q.dtype, device=q.device)
    packed = frame[MARGIN:-MARGIN].view(B, N, 3, H, d)
    launch_backward(do, q, k, v, None, o, lse, None, scale, 0.0, False, packed.unbind(2), None)
    assert frame[:MARGIN].isnan().all(), "written before the gradients"
    assert frame[-MARGIN:].isnan().all(), "written after the gradients"
    return packed.unbind(2)


def check(q, k, v, do, *, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    got = fused(q, k, v, do, scale)
    eager, exact = (autograd(q, k, v, do, scale, dtype) for dtype in (q.dtype, torch.float64))
    for name, *triple in zip(("dq", "dk", "dv"), got, eager, exact, strict=True):
        assert_as_accurate(*triple, factor=GRADIENT, what=name)


def packed_inputs(kind, B, N, H, d, dtype, device):
    """Return q, k, v as views of one packed tensor, and the gradient of the output."""
    qkv = inputs(kind, B, N, 3, H, d, dtype=dtype, device=device)
    return *qkv.unbind(2), inputs("normal", B, N, H, d, dtype=dtype, device=device, seed=1)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 17, 3, 88), torch.float32), ((2, 50, 2, 64), torch.bfloat16)],
    ids=str,
)
def test_gradients(shape, dtype, kernels, device):
    check(*packed_inputs("normal", *shape, dtype, device))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # numpy, in lanes that are masked
def test_negative_scores_beyond_the_range_of_exp(kernels, device):
    """exp(-LSE) overflows where all scores are far below 0: padding, with scores of 0, must not change the result."""
    q = inputs("normal", 1, 70, 1, 16, dtype=torch.float32, device=device).abs() * 20
    k = -inputs("normal", 1, 70, 1, 16, dtype=torch.float32, device=device, seed=1).abs() * 20
    v, do = (inputs("normal", 1, 70, 1, 16, dtype=torch.float32, device=device, seed=s) for s in (2, 3))
    check(q, k, v, do, scale=1.0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_nan_query_stays_out_of_other_queries_gradients(kernels, device):
    q, k, v, do = packed_inputs("normal", 1, 20, 1, 16, torch.float32, device)
    q = q.clone()
    q[0, 7] = torch.nan
    dq, dk, dv = fused(q, k, v, do, 0.25)
    assert all(gradient.isnan().all() for gradient in (dq[0, 7], dk, dv))
    assert dq[0, [i for i in range(20) if i != 7]].isfinite().all()
