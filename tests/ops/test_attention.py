"""Softmax attention: what its kernels and ATen functions have beyond the promises of every op. LSE, dropout, scores
that are large, keys that are hidden."""

import functools
import itertools
import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from attention_inputs import draw_qkv, seeded, with_identities
from op_cases import tensors_of
from oracle import assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.ops.attention import aten_samples, functions
from fastvit.ops.runtime import backend as backends
from fastvit.reference.ops import attention as eager

registered = torch.ops.fastvit


def random_mask(*shape, kind, device, seed=9):
    """A mask: "bool", True at nine of ten; or small numbers to be added, of that dtype, with a gradient."""
    m = inputs("normal", *shape, dtype=torch.float64, device=device, seed=seed)
    return m > -1.28 if kind == "bool" else (m / 2).to(kind).requires_grad_()


def test_lse_of_the_registered_op(backend, device):
    """Layout and meaning are equal on both paths: (B, H, N) float32, natural logarithm of scores and mask. If a query
    sees no key, exp(S - LSE) = 0 for any S."""
    for N in (9, 45):
        q, k, v = (t.detach() for t in draw_qkv(2, N, 3, 16, device=device).values())
        mask = random_mask(2, 3, N, N, kind="bool", device=device)
        mask[1, :, 4] = False
        scores = q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) * 0.3
        for given, seen in ((None, scores), (mask, scores.masked_fill(~mask, -torch.inf))):
            o, lse = registered.attention_fwd(q, k, v, given, None, 0.3, 0.0)
            exact = seen.logsumexp(-1)
            assert (lse > -torch.inf).all()
            exact = torch.where(exact == -torch.inf, lse.double(), exact)
            torch.testing.assert_close(lse, exact.float())
            assert o.is_contiguous()
            assert lse.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dropout(dtype, backend, device):
    """The backward pass applies the same mask; those of heads, samples and seeds are independent. With and without an
    attn_mask, the same weights are dropped."""
    N, p = 24, 0.3
    tensors = with_identities(draw_qkv(2, N, 2, N, dtype=dtype, device=device))
    fused = seeded(ops.attention, dropout_p=p)
    keep = fused(**tensors).detach().transpose(1, 2) != 0
    given = tensors
    if dtype is torch.float32:
        mask = random_mask(1, 2, N, N, kind=torch.float32, device=device)
        with torch.no_grad():
            mask[:, :, 5] = torch.finfo(torch.float32).min  # all keys weigh the same
        given = {**tensors, "attn_mask": mask}
    assert_op_as_accurate(fused, lambda **t: eager(**t, factors=keep / (1 - p)), given)
    for dims in ((0, 1, 2, 3), (3,), (2,), (2, 3)):
        count = math.prod(keep.shape[dim] for dim in dims)
        assert (keep.float().mean(dims) - (1 - p)).abs().max() < 5 * math.sqrt(p * (1 - p) / count)
    torch.manual_seed(8)
    other = ops.attention(**tensors, dropout_p=p).transpose(1, 2) != 0
    for a, b in itertools.combinations([*keep.flatten(0, 1), *other.flatten(0, 1)], 2):
        agreement = (a == b).float().mean() - (p * p + (1 - p) ** 2)
        assert agreement.abs() < 5 * 0.5 / N


def test_causal_dropout(backend, device):
    """Fewer keys than queries, and shared ones, over several tiles, which differ between the kernels. v is an identity
    matrix in the first call, which shows the mask."""
    M, N, kv_heads, p = 40, 30, 1, 0.3
    keys = dict.fromkeys("kv", (1, N, kv_heads, 64))
    tensors = tensors_of({"q": (1, M, 2, 64), **keys}, torch.float32, device)
    eye = torch.eye(N, 64, device=device)[None, :, None].expand(keys["v"]).detach()
    fused = seeded(ops.attention, dropout_p=p, is_causal=True)
    seen = torch.ones(M, N, device=device).tril()
    kept = (fused(**(tensors | {"v": eye})).detach()[..., :N] != 0).transpose(1, 2) | (seen == 0)
    share = (kept & (seen > 0)).sum() / (2 * seen.sum())
    assert abs(share - (1 - p)) < 0.05
    assert_op_as_accurate(fused, lambda **t: eager(**t, is_causal=True, factors=kept / (1 - p)), tensors)


@pytest.mark.parametrize(
    ("N", "dtype", "largest"), [(70, torch.float32, "first"), (150, torch.bfloat16, "last")], ids=str
)
def test_one_key_far_above_the_others(N, dtype, largest, backend, device):
    """800 above: exp of the difference overflows, unless the maximum is that of all tiles, in whichever order."""
    v = inputs("normal", 1, N, 1, 64, dtype=dtype, device=device)
    q, k = torch.ones_like(v), torch.full_like(v, -6.25)
    key = 0 if largest == "first" else N - 1
    k[:, key] = 6.25
    assert torch.equal(ops.attention(q, k, v, scale=1.0), v[:, key : key + 1].expand_as(v))


def test_scale_that_is_not_positive(backend, device):
    """The forward kernels refuse it; ATen takes it."""
    tensors = draw_qkv(1, 20, 2, 16, device=device)
    for scale in (-0.5, 0.0):
        fused, formula = (functools.partial(function, scale=scale) for function in (ops.attention, eager))
        warns = pytest.warns(UserWarning, match=f"positive scale, got {scale}")
        with ops.use_backend(backend, strict=False), warns if backend == "triton" else nullcontext():
            assert_op_as_accurate(fused, formula, tensors)
        if backend == "triton":
            with pytest.raises(backends.KernelUnsupported, match="positive scale"):
                fused(**tensors)


def test_layout_of_sdpa(backend, device):
    """Heads before tokens give the same numbers, bit by bit, in that layout; without its name they warn once."""
    q, k, v = (inputs("normal", 2, n, 2, 24, dtype=torch.float32, device=device, seed=n) for n in (20, 33, 33))
    mask = torch.rand(20, 33, device=device) > 0.2
    want = ops.attention(q, k, v, attn_mask=mask)
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    got = ops.attention(*heads_first, attn_mask=mask, layout="bhnd")
    assert torch.equal(got.transpose(1, 2), want)
    reference = torch.nn.functional.scaled_dot_product_attention(*heads_first, mask)
    torch.testing.assert_close(got, reference, atol=1e-5, rtol=1e-5)
    functions._warn_of_layout.cache_clear()
    same = heads_first[1:2] * 3
    with pytest.warns(UserWarning, match='pass layout="bhnd"') as warned:
        ops.attention(*same)
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.attention(*same)
        functions._warn_of_layout.cache_clear()
        ops.attention(*same, layout="bnhd")
        ops.attention(q[:, :1], k, v)  # as of a pooling


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("causal", "did you mean is_causal"),
        ("softmax_scale", "did you mean scale"),
        ("bias", "did you mean attn_mask"),
        ("window_size", "use attn_mask, or attention_windows"),
    ],
)
def test_names_of_other_libraries(given, advice):
    with pytest.raises(TypeError, match=f"^{given} is not an argument of attention_qkvpacked: {advice}"):
        ops.attention_qkvpacked(torch.ones(1, 5, 3, 2, 16), **{given: True})


# ---- hidden keys ----


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [
        ("bool", "first"),
        ("bool", "all"),
        ("minus infinity", "all"),
        ("lowest", "all"),
    ],
)
def test_hidden_keys(kind, hidden, backend, device):
    """Across tiles; where a query sees none, it and what it would have changed get zeros, unless the lowest number
    hides them: that is finite, and all keys weigh the same."""
    N = 40
    visible = torch.ones(1, 1, N, N, dtype=torch.bool, device=device)
    which = {"first": slice(0, 33), "all": slice(0, N)}[hidden]
    visible[..., which] = False
    visible[..., 3, :] = True  # but a query
    lowest = -torch.inf if kind == "minus infinity" else torch.finfo(torch.float32).min
    mask = visible if kind == "bool" else torch.zeros(visible.shape, device=device).masked_fill(~visible, lowest)
    tensors = draw_qkv(1, N, 1, 16, device=device)
    assert_op_as_accurate(
        lambda **t: ops.attention(**t, attn_mask=mask), lambda **t: eager(**t, attn_mask=mask, empty_rows=True), tensors
    )
    if hidden == "all" and kind != "lowest":
        assert not ops.attention(**tensors, attn_mask=mask)[:, 4:].any()


@pytest.mark.parametrize(("fill", "N"), [(-1e9, 5), (torch.finfo(torch.float32).min, 40), (1e9, 17)])
def test_rows_whose_keys_all_have_a_huge_number(fill, N, backend, device):
    """A padded sample and a padded query: the weights sum to one, and gradients are those of these weights.
    Integers, so that scores and mask have the same sum in any order."""
    generator = {"dtype": torch.float64, "device": device}
    tensors = {
        name: inputs("integer", 2, N, 1, 16, **generator, seed=i).float().requires_grad_()
        for i, name in enumerate("qkv")
    }
    mask = torch.zeros(2, 1, N, N, device=device)
    mask[1] = mask[0, :, 3] = fill
    tensors["attn_mask"] = mask.requires_grad_()
    runs = []
    for function in (ops.attention, eager):
        o = function(**tensors, scale=0.125)
        do = inputs("normal", *o.shape, dtype=o.dtype, device=device, seed=5)
        fixed = function(**tensors | {"attn_mask": mask.detach()}, scale=0.125)
        gradients_of_fixed = torch.autograd.grad(fixed, [tensors[name] for name in "qkv"], do)
        runs.append((o, *torch.autograd.grad(o, list(tensors.values()), do), *gradients_of_fixed))
    torch.testing.assert_close(*runs, atol=1e-5, rtol=1e-4)
    ones = ops.attention(tensors["q"], tensors["k"], torch.ones_like(o), attn_mask=mask[:, :, :1])
    torch.testing.assert_close(ones, torch.ones_like(o))


def test_rows_of_the_lowest_number_in_16_bits(backend, device):
    dtype = torch.float16
    mask = torch.zeros(2, 1, 33, 33, dtype=dtype, device=device)
    mask[1] = mask[0, :, 3] = torch.finfo(dtype).min
    tensors = {**draw_qkv(2, 33, 1, 16, dtype=dtype, device=device), "attn_mask": mask.requires_grad_()}
    assert_op_as_accurate(ops.attention, eager, tensors)


def test_what_is_hidden_changes_nothing(backend, device):
    """Padded tokens hold anything. What lies after a query has no influence, not even NaN."""
    tensors = {name: t.detach() for name, t in draw_qkv(2, 48, 1, 16, device=device).items()}
    mask = torch.ones(2, 1, 1, 48, dtype=torch.bool, device=device)
    mask[1, ..., 25:] = False
    clean, causal = ops.attention(**tensors, attn_mask=mask), ops.attention(**tensors, is_causal=True)
    alone = ops.attention(*(t[1:, :25] for t in tensors.values()))
    torch.testing.assert_close(clean[1:, :25], alone, atol=2e-6, rtol=2e-6)
    tensors["k"][1, 25:] = 1e4
    assert torch.equal(ops.attention(**tensors, attn_mask=mask), clean)
    # PyTorch's kernel on the CPU multiplies hidden NaN of the same tile by zero
    hidden = torch.nan if backend == "triton" else 1e3
    tensors["k"][:, 40:] = tensors["v"][:, 40:] = hidden
    tensors["k"][1, 25:40] = 1e4
    dirty = ops.attention(**tensors, is_causal=True)
    torch.testing.assert_close(dirty[0, :32], causal[0, :32], atol=1e-6, rtol=1e-6)


def test_one_key(backend, device):
    """Softmax over one key is constant, and no gradient reaches q and k but rounding; unless that key is hidden."""
    q, k, v = draw_qkv(2, 1, 2, 16, device=device).values()
    mask = torch.tensor([True, False], device=device).view(2, 1, 1, 1)
    o = ops.attention(q, k, v, attn_mask=mask, layout="bnhd")
    assert torch.equal(o, torch.stack([v[0], torch.zeros_like(v[0])]))
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    assert torch.equal(dv, torch.stack([torch.ones_like(v[0]), torch.zeros_like(v[0])]))
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5
    assert not dq[1].any()
    assert not dk[1].any()


# ---- on ATen: scores of the formula, in blocks ----


def test_a_row_below_the_least_float32(device):
    """It hides all keys from float32 queries, also in a backward pass that computes weights again."""
    mask = torch.zeros(20, 20, dtype=torch.float64, device=device)
    mask[0] = -1e300
    for p in (0.0, 0.3):
        tensors = {**draw_qkv(1, 20, 2, 16, device=device), "attn_mask": mask.clone().requires_grad_()}
        with ops.use_backend("aten"):
            o = ops.attention(**tensors, dropout_p=p)
            gradients = torch.autograd.grad(o.sum(), list(tensors.values()))
        assert not o[:, 0].any()
        assert all(t.isfinite().all() for t in gradients)


@pytest.mark.parametrize(("kv_heads", "dtype"), [(2, torch.bfloat16), (4, torch.float32)], ids=str)
def test_blocks_of_scores(kv_heads, dtype, device, monkeypatch):
    """Several samples, heads or queries at a time change neither a value, nor what is dropped, nor a gradient, the
    mask's among them, which samples share."""
    tensors = draw_qkv(3, 20, 4, 16, kv_heads=kv_heads, dtype=dtype, device=device)
    tensors["attn_mask"] = random_mask(4, 20, 20, kind=torch.float32, device=device)
    runs = []
    for scores in (3 * 4 * 400, 2 * 4 * 400, 2 * 400, 7 * 20, 1):
        monkeypatch.setattr(aten_samples, "_BYTES", scores * 4)
        with ops.use_backend("aten"):
            torch.manual_seed(3)
            o = ops.attention(**tensors, dropout_p=0.3)
            runs.append((o, *torch.autograd.grad(o, list(tensors.values()), tensors["q"].detach())))
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], atol=tolerance, rtol=tolerance)
