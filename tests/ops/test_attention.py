"""ops.attention and ops.attention_qkvpacked against float64 and eager PyTorch, on both backends."""

import itertools
import math

import pytest
import torch
from attention_inputs import DTYPES, LAYOUTS, draw_qkv, seeded, with_identities
from op_cases import assert_layout_does_not_matter, tensors_of
from oracle import assert_op_as_accurate, inputs
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.kernels import _attention_configs, _tuned
from fastvit.ops.runtime import backend as backends
from fastvit.study.accuracy.formulas import attention as eager
from fastvit.study.accuracy.formulas import attention_qkvpacked

registered = torch.ops.fastvit

# One key; fewer than a SIMD vector; keys of one tile and of several, with one and two tail tiles. A head of one part,
# of two that fit exactly, of two with masked columns.
SHAPES = [(2, 1, 1, 16), (1, 7, 2, 80), (1, 17, 2, 72), (2, 50, 2, 64)]
LONG = [
    ((1, 70, 1, 96), torch.float32),
    ((1, 197, 1, 64), torch.bfloat16),
    ((1, 257, 1, 16), torch.float16),
    ((1, 346, 1, 64), torch.bfloat16),
    ((1, 337, 1, 88), torch.float16),
    ((1, 256, 1, 128), torch.bfloat16),
]


def packed(B, N, H, d, dtype=torch.float32, *, device):
    return inputs("normal", B, N, 3, H, d, dtype=dtype, device=device).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed(shape, dtype, backend, device):
    qkv = packed(*shape, dtype=dtype, device=device)
    assert_op_as_accurate(ops.attention_qkvpacked, attention_qkvpacked, {"qkv": qkv})


@pytest.mark.parametrize(("shape", "dtype"), LONG, ids=str)
def test_separate_and_long(shape, dtype, backend, device):
    assert_op_as_accurate(ops.attention, eager, draw_qkv(*shape, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["integer", "large"])
def test_inputs(kind, dtype, backend, device):
    """Integer scores are exact at scale 0.5; large ones lie hundreds apart."""
    tensors = draw_qkv(1, 69, 2, 32, dtype=dtype, device=device, kind=kind)
    assert_op_as_accurate(
        lambda **t: ops.attention(**t, scale=0.5), lambda **t: eager(**t, scale=0.5), tensors, what=kind
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("d", "scale"), [(32, 0.6), (128, 0.3), (256, 0.3)])
def test_scores_of_a_deviation_of_several(d, scale, masked, backend, device):
    """Scales that are no power of two round the scores: forward and backward pass must round them alike."""
    tensors = draw_qkv(2, 64 if backend == "aten" else 17, 2, d, device=device)
    if masked:
        tensors |= tensors_of({"attn_mask": (tensors["q"].shape[1],) * 2}, torch.float32, device)
    assert_op_as_accurate(lambda **t: ops.attention(**t, scale=scale), lambda **t: eager(**t, scale=scale), tensors)


@pytest.mark.parametrize("N", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_many_tokens_as_a_tile_has(dtype, N, triton_backend, device):
    assert_op_as_accurate(ops.attention, eager, draw_qkv(1, N, 1, 128, dtype=dtype, device=device))


def test_more_scores_than_are_held_at_once(device):
    """Where ATen materialises them, as for a strided head dimension: one sample after the other."""
    tensors = draw_qkv(2, 2049, 4, 16, device=device)
    results = []
    for layout in ("packed", "head_dim_strided"):
        leaves = [t.detach().requires_grad_() for t in LAYOUTS[layout](*tensors.values())]
        o = ops.attention(*leaves)
        results.append((o, *torch.autograd.grad(o, leaves, leaves[0].detach())))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


def test_lse_and_output_of_the_registered_op(backend, device):
    """Layout and meaning are equal on both paths: (B, H, N) float32, natural logarithm."""
    for N in (9, 50):
        q, k, v = (t.detach() for t in draw_qkv(2, N, 3, 16, device=device).values())
        o, lse = registered.attention_fwd(q, k, v, None, None, 0.3, 0.0)
        exact = (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) * 0.3).logsumexp(-1)
        torch.testing.assert_close(lse, exact.float())
        assert o.is_contiguous()
        assert lse.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS, ids=list(LAYOUTS))
def test_layouts(layout, backend, device):
    """Strided q, k, v and output gradients give what contiguous ones give; on Triton bitwise. Over several tiles."""
    q, k, v = draw_qkv(2, 40, 2, 24, device=device).values()
    strided = dict(zip("qkv", LAYOUTS[layout](q, k, v), strict=True))
    assert_layout_does_not_matter("attention", strided, lambda do: LAYOUTS[layout](do, do, do)[1], backend == "triton")


def test_token_slice_of_a_packed_tensor(backend, device):
    """Views with a storage offset; what is around them is NaN. dqkv is one contiguous tensor."""
    qkv = inputs("normal", 2, 19, 3, 2, 16, dtype=torch.float32, device=device)
    frame = torch.full((2, 21, 3, 2, 16), torch.nan, device=device)
    frame[:, 1:-1] = qkv
    view, plain = (t.detach().requires_grad_() for t in (frame[:, 1:-1], qkv))
    o, want = ops.attention_qkvpacked(view), ops.attention_qkvpacked(plain)
    torch.testing.assert_close(o, want)
    (dqkv,) = torch.autograd.grad(o.sum(), view)
    torch.testing.assert_close(dqkv, torch.autograd.grad(want.sum(), plain)[0])
    assert dqkv.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dropout(dtype, backend, device):
    """The backward pass applies the same mask; those of heads, samples and seeds are independent."""
    N, p = 40, 0.3
    tensors = with_identities(draw_qkv(2, N, 3, N, dtype=dtype, device=device))
    fused = seeded(ops.attention, dropout_p=p)
    keep = fused(**tensors).detach().transpose(1, 2) != 0
    assert_op_as_accurate(fused, lambda **t: eager(**t, factors=keep / (1 - p)), tensors)
    for dims in ((0, 1, 2, 3), (3,), (2,), (2, 3)):
        count = math.prod(keep.shape[dim] for dim in dims)
        assert (keep.float().mean(dims) - (1 - p)).abs().max() < 5 * math.sqrt(p * (1 - p) / count)
    torch.manual_seed(8)
    other = ops.attention(**tensors, dropout_p=p).transpose(1, 2) != 0
    for a, b in itertools.combinations([*keep.flatten(0, 1), *other.flatten(0, 1)], 2):
        agreement = (a == b).float().mean() - (p * p + (1 - p) ** 2)
        assert agreement.abs() < 5 * 0.5 / N


@pytest.mark.parametrize("N", [190, 300])
def test_dropout_mask_does_not_depend_on_tiles(N, triton_backend, device, monkeypatch):
    """Over several tiles: every tiling draws the mask of its elements."""
    qkv = packed(1, N, 1, 16, dtype=torch.float16, device=device).detach()
    outputs = []
    for config in (
        _attention_configs.attention_fwd(N, 16, 2, True, "sm_90"),
        _attention_configs.AttentionForwardConfig(
            64, 64, True, _attention_configs.key_tails((N - 1) % 64 + 1), (16, 0), 4, 2
        ),
    ):
        monkeypatch.setattr(_attention_configs, "attention_fwd", lambda *_, config=config: config)
        _tuned.clear_caches()
        torch.manual_seed(3)
        outputs.append(ops.attention_qkvpacked(qkv, dropout_p=0.5))
    torch.testing.assert_close(*outputs, atol=2e-3, rtol=2e-3)


def test_nan_stays_in_its_row(backend, device):
    for N in (5, 16, 34, 130):
        qkv = packed(1, N, 2, 16, device=device).detach()
        clean = ops.attention_qkvpacked(qkv)
        qkv[0, 2, 0, 1, 3] = torch.nan
        dirty = ops.attention_qkvpacked(qkv)
        assert dirty[0, 2, 1].isnan().all()
        dirty[0, 2, 1] = clean[0, 2, 1]
        assert torch.equal(dirty, clean)
        qkv[0, 1, 1, 0, 0] = torch.nan  # in a key: all rows of that head
        assert ops.attention_qkvpacked(qkv)[0, :, 0].isnan().all()


@pytest.mark.parametrize("largest", ["first", "last"])
@pytest.mark.parametrize(("N", "dtype"), [(70, torch.float32), (197, torch.bfloat16), (346, torch.bfloat16)], ids=str)
def test_one_key_far_above_the_others(N, dtype, largest, backend, device):
    """800 above: exp of the difference overflows, unless the maximum is that of all tiles, in whichever order."""
    v = inputs("normal", 1, N, 1, 64, dtype=dtype, device=device)
    q, k = torch.ones_like(v), torch.full_like(v, -6.25)
    key = 0 if largest == "first" else N - 1
    k[:, key] = 6.25
    assert torch.equal(ops.attention(q, k, v, scale=1.0), v[:, key : key + 1].expand_as(v))


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scale_that_is_not_positive(scale, backend, device):
    """The forward kernels refuse it; ATen takes it."""
    tensors = draw_qkv(1, 20, 2, 16, device=device)
    with ops.use_backend(backend, strict=False):
        assert_op_as_accurate(lambda **t: ops.attention(**t, scale=scale), lambda **t: eager(**t, scale=scale), tensors)
    if backend == "triton":
        with pytest.raises(backends.KernelUnsupported, match="positive scale"):
            ops.attention(**tensors, scale=scale)


class Module(torch.nn.Module):
    def forward(self, qkv):
        return ops.attention_qkvpacked(qkv, dropout_p=0.1 if self.training else 0.0).flatten(2)


def test_export(backend, device):
    tokens = torch.export.Dim("tokens", min=2, max=100)
    qkv = packed(2, 18, 2, 16, device=device).detach()
    program = torch.export.export(Module().eval(), (qkv,), dynamic_shapes={"qkv": {1: tokens}})
    longer = packed(2, 31, 2, 16, device=device).detach()
    assert torch.equal(program.module()(longer), Module().eval()(longer))


def test_flops(device):
    qkv = packed(2, 18, 3, 16, device=device)
    with FlopCounterMode(display=False) as counter:
        (ops.attention_qkvpacked(qkv).sum() + ops.attention(*qkv.unbind(2)).sum()).backward()
    assert counter.get_total_flops() == 2 * 3.5 * 4 * 2 * 3 * 18 * 18 * 16
