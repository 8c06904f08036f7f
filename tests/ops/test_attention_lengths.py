"""Attention with more or fewer keys than queries, and causal attention, against float64 and eager PyTorch."""

import importlib
import random
from itertools import cycle, pairwise

import pytest
import torch
from attention_inputs import DTYPES, seeded
from op_cases import tensors_of
from oracle import assert_op_as_accurate, inputs
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.study.accuracy import formulas
from fastvit.study.accuracy.formulas import attention as eager
from fastvit.study.accuracy.formulas import attention_varlen as eager_varlen

# Queries and keys: one of either; fewer than a vector; the two on both sides of a tile's width, with loops and without
PAIRS = [(1, 70), (70, 1), (7, 3), (17, 130), (130, 17), (96, 64)]


def draw(M, N, H=2, d=24, kv_heads=None, B=2, dtype=torch.float32, *, device):
    return tensors_of({"q": (B, M, H, d), **dict.fromkeys("kv", (B, N, kv_heads or H, d))}, dtype, device)


@pytest.mark.parametrize(
    ("pair", "causal", "kv_heads"),
    [
        (pair, causal, kv_heads)
        for pair, heads in zip(PAIRS, cycle([(2, 1), (1, 2)]))
        for causal, kv_heads in zip([False, True], heads, strict=True)
        if not (causal and pair[0] == 1)
    ],
    ids=str,
)
def test_keys_of_another_length(pair, causal, kv_heads, backend, device):
    """Heads that share keys, too. A query that sees one key alone has gradients of rounding errors."""
    assert_op_as_accurate(
        lambda **t: ops.attention(**t, is_causal=causal),
        lambda **t: eager(**t, is_causal=causal),
        draw(*pair, kv_heads=kv_heads, device=device),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [40, 150])
def test_causal(N, dtype, backend, device):
    """One tile, and several on the diagonal; in 16 bits with the widest tiles."""
    tensors = draw(N, N, d=32, dtype=dtype, B=1, device=device)
    run = {"is_causal": True, "scale": 0.5}
    assert_op_as_accurate(lambda **t: ops.attention(**t, **run), lambda **t: eager(**t, **run), tensors)


@pytest.mark.parametrize(
    ("shape", "kind", "causal"),
    [
        ((2, 1, 1, 30), "bool", False),
        ((2, 1, 1, 30), "float", True),
        ((2, 40, 30), "bool", True),
        ((2, 40, 30), "float", False),
        ((40, 1), "bool", True),
        ((40, 1), "float", True),
    ],
    ids=str,
)
def test_masks(shape, kind, causal, backend, device):
    """A mask next to causal attention: both must let a query see a key. Queries that see none are zero."""
    tensors = draw(40, 30, device=device)
    mask = inputs("normal", *shape, dtype=torch.float32, device=device, seed=5)
    if kind == "float":
        tensors["attn_mask"] = mask.requires_grad_()
        more = {}
    else:
        more = {"attn_mask": mask > -0.3}
    assert_op_as_accurate(
        lambda **t: ops.attention(**t, **more, is_causal=causal),
        lambda **t: eager(**t, **more, is_causal=causal, empty_rows=True),
        tensors,
    )


@pytest.mark.parametrize("N", [50, 30])
def test_dropout(N, backend, device):
    """The backward pass applies the forward's mask: v is an identity matrix in the first call, which shows it."""
    M, p = 40, 0.3
    tensors = draw(M, N, d=64, B=1, device=device)
    eye = torch.eye(N, 64, device=device)[None, :, None].expand(1, N, 2, 64).detach().requires_grad_()
    fused = seeded(ops.attention, dropout_p=p, is_causal=True)
    seen = torch.ones(M, N, device=device).tril()
    kept = (fused(**(tensors | {"v": eye})).detach()[..., :N] != 0).transpose(1, 2) | (seen == 0)
    share = (kept & (seen > 0)).sum() / (2 * seen.sum())
    assert abs(share - (1 - p)) < 0.05
    assert_op_as_accurate(fused, lambda **t: eager(**t, is_causal=True, factors=kept / (1 - p)), tensors)


def test_what_lies_after_a_query_has_no_influence(backend, device):
    """Not even NaN, and its gradient is zero."""
    tensors = draw(70, 70, B=1, device=device)
    q, k, v = (t.detach().clone() for t in tensors.values())
    clean = ops.attention(q, k, v, is_causal=True)
    k[:, 40:] = torch.nan
    v[:, 40:] = torch.nan
    q.requires_grad_()
    k.requires_grad_()
    dirty = ops.attention(q, k, v, is_causal=True)
    if backend == "aten":  # PyTorch's kernel multiplies hidden NaN of the same tile by zero
        k, v = (torch.where(t.isnan(), 1e3, t) for t in (k, v))
        dirty = ops.attention(q, k, v, is_causal=True)
    torch.testing.assert_close(dirty[:, :32], clean[:, :32], atol=1e-6, rtol=1e-6)


def test_layout_of_sdpa(backend, device):
    """Heads before tokens give the same numbers, bit by bit, in that layout."""
    q, k, v = draw(20, 33, device=device).values()
    for mask in (None, torch.rand(20, 33, device=device) > 0.2):
        want = ops.attention(q, k, v, attn_mask=mask)
        got = ops.attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, layout="bhnd")
        assert torch.equal(got.transpose(1, 2), want)
        reference = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask)
        torch.testing.assert_close(got, reference, atol=1e-5, rtol=1e-5)


def test_no_queries_or_no_batch(backend, device):
    for M, B in ((0, 2), (5, 0)):
        tensors = draw(M, 7, B=B, device=device)
        gradients = torch.autograd.grad(ops.attention(**tensors).sum(), list(tensors.values()))
        assert all(not g.any() for g in gradients)


def test_flops(device):
    """Each matmul has M x N x d products; causal attention counts in full, as PyTorch's."""
    tensors = draw(20, 33, device=device)
    with FlopCounterMode(display=False) as counter:
        ops.attention(**tensors, is_causal=True).sum().backward()
    assert counter.get_total_flops() == (4 + 10) * 2 * 2 * 20 * 33 * 24


# ---- several lengths ----


def ends_of(lengths, device):
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [((1, 1, 1, 1), (70, 5, 0, 40)), ((33, 0, 7), (20, 9, 130))], ids=str)
def test_several_lengths(lengths, dtype, backend, device):
    """Pooling of several images, one of them without tokens; and any numbers of queries and keys, with shared keys."""
    of_q, of_k = lengths
    shapes = {"q": (sum(of_q), 2, 24), **dict.fromkeys("kv", (sum(of_k), 1, 24))}
    ends, ends_k = (ends_of(lengths, device) for lengths in (of_q, of_k))
    more = {"cu_seqlens": ends, "cu_seqlens_k": ends_k}
    assert_op_as_accurate(
        lambda **t: ops.attention_varlen(**t, **more, max_seqlen=max(of_q), max_seqlen_k=max(of_k)),
        lambda **t: eager_varlen(**t, **more, empty_rows=True),
        tensors_of(shapes, dtype, device),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="accesses are counted in the interpreter")
def test_wrong_ends_and_lengths(triton_backend, device, monkeypatch):
    """Whatever the values are, no kernel leaves its arguments. NaN is what belongs to no sequence, or to one that is
    longer than max_seqlen or max_seqlen_k, in the output and in every gradient."""
    traffic_counter = pytest.importorskip("benchmarks.codegen.traffic_counter")
    launch = importlib.import_module("fastvit.ops.attention.launch")
    monkeypatch.setattr(launch, "empty_like", torch.zeros_like)  # unwritten elements are not NaN
    drawn = random.Random(2)
    T, T_k = 30, 45
    for longest, longest_k in ((30, 45), (5, 45), (30, 9), (12, 20), (7, 7)):
        tensors = tensors_of({"q": (T, 2, 16), **dict.fromkeys("kv", (T_k, 1, 16))}, torch.float32, device)
        ends, ends_k = (
            sorted(drawn.choice((drawn.randint(0, most), drawn.randint(-9, 60), 1 << 40)) for _ in range(4))
            for most in (T, T_k)
        )
        with traffic_counter.count():
            o = ops.attention_varlen(
                **tensors, cu_seqlens=torch.tensor(ends, device=device), max_seqlen=longest,
                cu_seqlens_k=torch.tensor(ends_k, device=device), max_seqlen_k=longest_k,
            )  # fmt: skip
            dq, dk, dv = torch.autograd.grad(o, list(tensors.values()), torch.ones_like(o))
        computed, of_keys = (torch.zeros(n, dtype=torch.bool, device=device) for n in (T, T_k))
        inside = [[min(max(end, 0), most) for end in given] for given, most in ((ends, T), (ends_k, T_k))]
        for (first, end), (first_k, end_k) in zip(*map(pairwise, inside), strict=True):
            if end - first <= longest and end_k - first_k <= longest_k:
                computed[first:end] = True
                of_keys[first_k:end_k] = True
                one = torch.tensor([0, end - first]), torch.tensor([0, end_k - first_k])
                parts = tensors["q"][first:end], *(tensors[name][first_k:end_k] for name in "kv")
                alone = formulas.attention_varlen(*parts, one[0], cu_seqlens_k=one[1], empty_rows=True)
                torch.testing.assert_close(o[first:end], alone, atol=1e-5, rtol=1e-5)
        for t, right in ((o, computed), (dq, computed), (dk, of_keys), (dv, of_keys)):
            assert t[right].isfinite().all()
            assert t[~right].isnan().all()
