"""Gradients of attention where scores overflow or are NaN, by the kernel of one program a head, which runs in 16 bits,
and by those of dQ and of dK and dV, which run in float32. Needs triton."""

import pytest
import torch
from attention_inputs import draw_qkv
from oracle import assert_op_as_accurate

pytest.importorskip("triton")

from fastvit import ops
from fastvit.reference.ops import attention

pytestmark = [
    pytest.mark.usefixtures("triton_backend"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),  # numpy, in lanes that are masked
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str),
]


def test_negative_scores_beyond_the_range_of_exp(dtype, device):
    """exp(-LSE) overflows where all scores are far below 0: padding, with scores of 0, must not change the result."""
    tensors = draw_qkv(1, 100, 1, 16, dtype=dtype, device=device)
    tensors |= {
        name: (sign * tensors[name].detach().abs() * 20).requires_grad_() for name, sign in (("q", 1), ("k", -1))
    }
    assert_op_as_accurate(lambda **t: ops.attention(**t, scale=1.0), lambda **t: attention(**t, scale=1.0), tensors)


def test_a_nan_query_stays_out_of_other_queries_gradients(dtype, device):
    q, k, v = draw_qkv(1, 20, 1, 16, dtype=dtype, device=device).values()
    with torch.no_grad():
        q[0, 7] = torch.nan
    dq, dk, dv = torch.autograd.grad(ops.attention(q, k, v).sum(), (q, k, v))
    assert all(gradient.isnan().all() for gradient in (dq[0, 7], dk, dv))
    assert dq[0, [i for i in range(20) if i != 7]].isfinite().all()
