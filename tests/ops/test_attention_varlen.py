"""ops.attention_varlen against float64 and eager PyTorch, on both backends."""

import importlib
import math
import random
from itertools import pairwise

import pytest
import torch
from attention_inputs import DTYPES, LAYOUTS, draw_qkv, seeded, with_identities
from op_cases import assert_layout_does_not_matter
from oracle import assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.study.accuracy.formulas import attention_varlen as eager

# One token and none; fewer than a vector; tails of a tile; several tiles. Of images of several sizes, and of windows.
PACKS = {"images": (5, 1, 0, 33, 70), "windows": (16, 16, 16, 9), "one": (37,), "short": (1, 1)}
LENGTHS = (5, 0, 19, 40)


def ends_of(lengths, dtype=torch.int32, device=None):
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pack", PACKS)
def test_as_accurate_as_eager(pack, dtype, backend, device):
    lengths = PACKS[pack]
    more = {"cu_seqlens": ends_of(lengths, device=device), "max_seqlen": max(lengths)}
    assert_op_as_accurate(
        lambda **t: ops.attention_varlen(**t, **more),
        lambda **t: eager(**t, **more),
        draw_qkv(sum(lengths), 2, 24, dtype=dtype, device=device),
    )


@pytest.mark.parametrize(("d", "dtype"), [(80, torch.bfloat16), (128, torch.float16)], ids=str)
def test_heads_that_share_keys_and_tiles_in_a_loop(d, dtype, triton_backend, device):
    """Lengths on both sides of a tile's, so that programs of one launch have a loop and have none."""
    lengths = (1, 127, 128, 129, 200)
    more = {"cu_seqlens": ends_of(lengths, torch.int64, device)}
    assert_op_as_accurate(
        lambda **t: ops.attention_varlen(**t, **more, scale=0.2),
        lambda **t: eager(**t, **more, scale=0.2),
        draw_qkv(sum(lengths), 2, d, dtype=dtype, device=device, kv_heads=1),
    )


def test_max_seqlen_changes_nothing(triton_backend, device):
    lengths = (20, 35)
    tensors, ends = draw_qkv(sum(lengths), 1, 16, device=device), ends_of(lengths, device=device)
    runs = []
    for longest in (35, 36, 60, None):
        o = ops.attention_varlen(**tensors, cu_seqlens=ends, max_seqlen=longest)
        runs.append((o, *torch.autograd.grad(o.sum(), list(tensors.values()))))
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layout", ["packed", "heads_first", "row_strided", "offset", "head_dim_strided"])
def test_layouts(layout, backend, device):
    q, k, v = (inputs("normal", 1, sum(LENGTHS), 2, 24, dtype=torch.float32, device=device, seed=i) for i in range(3))
    tensors = {name: t[0].requires_grad_() for name, t in zip("qkv", LAYOUTS[layout](q, k, v), strict=True)}
    tensors["cu_seqlens"] = ends_of(LENGTHS, device=device).repeat_interleave(2)[::2]
    arrange = lambda do: LAYOUTS[layout](*(do[None],) * 3)[1][0]  # noqa: E731
    assert_layout_does_not_matter("attention_varlen", tensors, arrange, backend == "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dropout(dtype, backend, device):
    """The backward pass applies the same mask, and no two sequences or heads have one."""
    lengths, N, p = (40, 40, 40), 40, 0.3
    tensors = with_identities(draw_qkv(sum(lengths), 2, N, dtype=dtype, device=device))
    more = {"cu_seqlens": ends_of(lengths, device=device), "max_seqlen": N}
    fused = seeded(ops.attention_varlen, **more, dropout_p=p)
    kept = (fused(**tensors).detach() != 0).unflatten(0, (3, N)).transpose(1, 2)
    assert_op_as_accurate(fused, lambda **t: eager(**t, **more, factors=kept / (1 - p)), tensors)
    planes = kept.flatten(0, 1)
    assert not any(torch.equal(a, b) for i, a in enumerate(planes) for b in planes[:i])
    share = kept.float().mean() - (1 - p)
    assert share.abs() < 5 * math.sqrt(p * (1 - p) / kept.numel())


def test_nan_stays_in_its_sequence(backend, device):
    lengths = (20, 35, 18)
    tensors, ends = draw_qkv(sum(lengths), 2, 16, device=device), ends_of(lengths, device=device)
    plain = [t.detach() for t in tensors.values()]
    clean = ops.attention_varlen(*plain, ends, 35)
    plain[1][25, 0, 3] = torch.nan
    dirty = ops.attention_varlen(*plain, ends, 35)
    assert dirty[20:55, 0].isnan().all()
    dirty[20:55, 0] = clean[20:55, 0]
    assert torch.equal(dirty, clean)


def test_packed(backend, device):
    """One tensor, read in place, has the results of three; so has its gradient."""
    qkv = inputs("normal", sum(LENGTHS), 3, 2, 24, dtype=torch.float32, device=device).requires_grad_()
    ends, do = ends_of(LENGTHS, device=device), torch.randn(sum(LENGTHS), 2, 24, device=device)
    runs = []
    for o in (ops.attention_varlen_qkvpacked(qkv, ends, 40), ops.attention_varlen(*qkv.unbind(1), ends, 40)):
        runs.append((o, *torch.autograd.grad(o, qkv, do)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    with pytest.raises(ValueError, match=r"qkv must have shape \(T, 3, H, d\), got \(1, 64, 3, 2, 24\)"):
        ops.attention_varlen_qkvpacked(qkv[None], ends)
    with pytest.raises(ValueError, match="cu_seqlens must be on qkv's device"):
        ops.attention_varlen_qkvpacked(qkv, ends.to("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="accesses are counted in the interpreter")
@pytest.mark.parametrize("ascending", [True, False])
def test_wrong_ends_and_lengths(ascending, triton_backend, device, monkeypatch):
    """Whatever the values are, no kernel leaves its arguments. NaN is what belongs to no sequence, or to one that is
    longer than max_seqlen, in the output and in every gradient."""
    traffic_counter = pytest.importorskip("benchmarks.codegen.traffic_counter")
    if not ascending:  # sequences overlap: two programs store one element
        monkeypatch.setattr(traffic_counter._Counter, "_move", lambda *_: None)
    launch = importlib.import_module("fastvit.ops.attention.launch")
    monkeypatch.setattr(launch, "empty_like", torch.zeros_like)  # unwritten elements are not NaN
    draw, T = random.Random(1), 40
    for longest in (1, 1, 5, 17, 25, 40, 60):
        tensors = draw_qkv(T, 2, 16, device=device, kv_heads=draw.choice((1, 2)))
        ends = [draw.choice((draw.randint(0, T), draw.randint(-9, 60), 1 << 40, -1 << 40)) for _ in range(4)]
        ends = [3, 10, 20, 35] if longest == 17 else sorted(ends) if ascending else ends
        inside = [min(max(end, 0), T) for end in ends]
        with traffic_counter.count():
            o = ops.attention_varlen(**tensors, cu_seqlens=torch.tensor(ends, device=device), max_seqlen=longest)
            gradients = torch.autograd.grad(o, list(tensors.values()), torch.ones_like(o))
        computed = torch.zeros(T, dtype=torch.bool, device=device)
        for first, end in pairwise(inside if ascending else ()):
            if 0 < end - first <= longest:
                computed[first:end] = True
                alone = eager(*(t[first:end] for t in tensors.values()), torch.tensor([0, end - first]))
                torch.testing.assert_close(o[first:end], alone, atol=1e-5, rtol=1e-5)
        for t in (o, *gradients) if ascending else ():
            assert t[computed].isfinite().all()
            assert t[~computed].isnan().all()
