"""ops.layer_norm_attention: three layers, norms of q and k, positions in place, dropout."""

import pytest
import torch
from op_at_sizes import case, packed
from op_cases import ROWS, function, made, outputs_and_gradients
from oracle import assert_op_as_accurate
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.reference import ops as formulas
from fastvit.study.accuracy.cases import FIXED_TABLES, NORM, QK_WEIGHTS

B, N, H = 2, 17, 2
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PLAIN = "layer_norm_attention"


def of_three_layers(function):
    """Return the op or its formula with a layer each for q, k and v, that of k without a bias."""

    def run(qkv_weight, qkv_bias, **tensors):
        q, _, v = qkv_bias.chunk(3)
        return function(**tensors, qkv_weight=qkv_weight.chunk(3), qkv_bias=[q, None, v])

    return run


def test_three_layers(backend, device):
    op, formula = (of_three_layers(function(PLAIN, module)) for module in (ops, formulas))
    assert_op_as_accurate(op, formula, made(PLAIN, B, N, device, F16))


def test_only_the_residual_is_wanted(device):
    """No gradient of the op itself: nothing runs backward."""
    tensors = {key: t.detach() for key, t in made(PLAIN, B, N, device).items()}
    residual = torch.zeros(B, N, 16, device=device, requires_grad=True)
    out = function(PLAIN)(**tensors, residual=residual)
    (gradient,) = torch.autograd.grad(out, residual, out.detach())
    assert torch.equal(gradient, out)


def test_dropout(backend, device):
    """Outputs and gradients are those of single ops with the same seed; another seed draws another mask."""
    tensors = made(PLAIN, B, N, device)

    def one_by_one(x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, **scales):
        qkv = ops.layer_norm_linear(x, norm_weight, norm_bias, qkv_weight, qkv_bias).unflatten(-1, (3, H, -1))
        o = ops.attention_qkvpacked(qkv, dropout_p=0.4).flatten(2)
        return ops.linear(o, proj_weight, proj_bias, residual=x, **scales)

    dropped = function("layer_norm_attention dropout")
    got, want = outputs_and_gradients(dropped, tensors), outputs_and_gradients(one_by_one, tensors)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.manual_seed(5)
    assert not torch.equal(dropped(**tensors), got[0][0])


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_causal(recompute, device):
    """Causal attention equals attention with a mask that hides what lies after a query."""
    tensors = made(PLAIN, B, N, device)
    seen = torch.ones(N, N, dtype=torch.bool, device=device).tril()
    causal, masked = (
        outputs_and_gradients(ROWS[PLAIN].call(ops, num_heads=H, recompute=recompute, **options), tensors)
        for options in ({"is_causal": True}, {"attn_mask": seen})
    )
    torch.testing.assert_close(causal, masked, atol=1e-5, rtol=1e-4)


# ---- positions, and norms of q and k ----


def with_our_attention(function):
    """The formula with ops.attention in it, but for float64. The gradients of the norms are sums over all tokens, in
    which rounding of q's and k's gradients shows that attention's own tests, element by element, allow flash attention:
    the row sums of its scores' gradients are not as near zero as eager's."""

    def run(**tensors):
        with pytest.MonkeyPatch.context() as patch:
            if tensors["x"].dtype is not torch.float64:
                patch.setattr(formulas, "attention", lambda q, k, v, **_: ops.attention(q, k, v))
                patch.setattr(
                    formulas, "attention_varlen", lambda q, k, v, ends, **_: ops.attention_varlen(q, k, v, ends)
                )
            return function(**tensors)

    return run


BIASES = {"q_bias": ("d",), "k_bias": ("d",)}
HEADS = [
    # k's bias with positions only: without them, its gradient is zero but for rounding
    case("layer_norm_attention qk_norm", F32, N=23, D=32, d=24, T=18, tensors=BIASES),
    case("layer_norm_attention qk_norm", F16, N=23, D=32, d=24, options={"interleaved": True}),
    case("layer_norm_attention qk_norm", BF16, N=23, D=32, d=24, tensors=dict.fromkeys(FIXED_TABLES)),
    case(
        "layer_norm_attention lengths", F32, D=24, tensors={**QK_WEIGHTS, **NORM}, **packed((7, 0, 1, 22), norm="layer")
    ),
]


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_norms_of_q_and_k(case, backend, device):
    tensors = case.draw(device)
    assert_op_as_accurate(case.function(ops), with_our_attention(case.function(formulas)), tensors)


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "aten") for name in ("layer_norm_attention rotary", "layer_norm_attention qk_norm")]
    + [("layer_norm_attention qk_norm", "triton")],
    indirect=["backend"],
)
def test_directly_and_through_the_dispatcher(name, backend, device):
    """In place in the packed tensor, and as ops: the same bits; and a retained graph gives them twice."""
    tensors = made(name, 1, 6, device)
    leaves = [t for t in tensors.values() if t.requires_grad]

    def run():
        out = function(name)(**tensors)
        return out, *(torch.autograd.grad(out.sum(), leaves, retain_graph=retain) for retain in (True, False))

    direct, first, second = run()
    with FlopCounterMode(display=False):
        dispatched, third, _ = run()
    assert torch.equal(direct, dispatched)
    for several in zip(first, second, third, strict=True):
        assert all(torch.equal(several[0], one) for one in several[1:])
