"""ops.attention_varlen: lengths, and what wrong ones do."""

import importlib
import math
import random
from itertools import pairwise

import pytest
import torch
from attention_inputs import draw_qkv, seeded, with_identities
from oracle import assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.reference.ops import attention_varlen as eager


def ends_of(*lengths, device=None):
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=device)


def test_max_seqlen_changes_nothing(triton_backend, device):
    tensors, ends = draw_qkv(20, 1, 16, device=device), ends_of(3, 17, device=device)
    runs = []
    for longest in (17, 20, None):
        o = ops.attention_varlen(**tensors, cu_seqlens=ends.long(), max_seqlen=longest)
        runs.append((o, *torch.autograd.grad(o.sum(), list(tensors.values()))))
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], atol=1e-6, rtol=1e-6)


def test_dropout(backend, device):
    """The backward pass applies the same mask, and no two sequences or heads have one."""
    N, p = 24, 0.3
    tensors = with_identities(draw_qkv(3 * N, 2, N, device=device))
    more = {"cu_seqlens": ends_of(N, N, N, device=device), "max_seqlen": N}
    fused = seeded(ops.attention_varlen, **more, dropout_p=p)
    kept = (fused(**tensors).detach() != 0).unflatten(0, (3, N)).transpose(1, 2)
    assert_op_as_accurate(fused, lambda **t: eager(**t, **more, factors=kept / (1 - p)), tensors)
    planes = kept.flatten(0, 1)
    assert not any(torch.equal(a, b) for i, a in enumerate(planes) for b in planes[:i])
    share = kept.float().mean() - (1 - p)
    assert share.abs() < 5 * math.sqrt(p * (1 - p) / kept.numel())


def test_a_mask_of_numbers(backend, device):
    """All sequences have the first rows and columns of one mask, which has no gradient."""
    tensors, ends = draw_qkv(44, 2, 16, device=device, kv_heads=1), ends_of(1, 0, 19, 24, device=device)
    mask = inputs("normal", 2, 24, 24, dtype=torch.float32, device=device, seed=9)
    more = {"cu_seqlens": ends, "attn_mask": mask, "max_seqlen": 24}
    assert_op_as_accurate(lambda **t: ops.attention_varlen(**t, **more), lambda **t: eager(**t, **more), tensors)
    qkv = torch.stack((tensors["q"], *(tensors[name].expand(-1, 2, -1) for name in "kv")), 1)
    packed = ops.attention_varlen_qkvpacked(qkv, ends, 24, attn_mask=mask)
    torch.testing.assert_close(packed, eager(**tensors, **more), atol=1e-5, rtol=1e-5)


def test_packed(device):
    """One tensor, read in place, has the results of three; so has its gradient."""
    qkv = inputs("normal", 64, 3, 2, 24, dtype=torch.float32, device=device).requires_grad_()
    ends, do = ends_of(5, 0, 19, 40, device=device), torch.randn(64, 2, 24, device=device)
    runs = []
    for o in (ops.attention_varlen_qkvpacked(qkv, ends, 40), ops.attention_varlen(*qkv.unbind(1), ends, 40)):
        runs.append((o, *torch.autograd.grad(o, qkv, do)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    with pytest.raises(ValueError, match=r"qkv must have shape \(T, 3, H, d\), got \(1, 64, 3, 2, 24\)"):
        ops.attention_varlen_qkvpacked(qkv[None], ends)
    with pytest.raises(ValueError, match="cu_seqlens must be on qkv's device"):
        ops.attention_varlen_qkvpacked(qkv, ends.to("meta"))


@pytest.fixture
def counted(triton_backend, monkeypatch):
    """A context in which an access outside of a kernel's arguments raises. Elements that no kernel writes are not
    NaN."""
    traffic_counter = pytest.importorskip("benchmarks.codegen.traffic_counter")
    for module in ("launch", "softmax_launch"):
        launch = importlib.import_module(f"fastvit.ops.attention.{module}")
        monkeypatch.setattr(launch, "empty_like", torch.zeros_like)
    return traffic_counter


def ends_and_lengths(draw, kind):
    """Yield ends of queries and keys in 24 and 30 tokens, and the longest sequence of either; keys are None if they
    are those of queries."""
    if kind == "ascending":
        yield [3, 10, 12, 20], None, 17, None
    for longest, longest_k in ((5, 30), (24, 9), (40, 40)):
        ends, ends_k = (
            [draw.choice((draw.randint(0, most), draw.randint(-9, 60), 1 << 40, -1 << 40)) for _ in range(4)]
            for most in (24, 30)
        )
        if kind == "overlapping":
            yield ends, None, longest, None
        elif kind == "keys":
            yield sorted(ends), sorted(ends_k), longest, longest_k
        else:
            yield sorted(ends), None, longest, None


@pytest.mark.skipif(torch.cuda.is_available(), reason="accesses are counted in the interpreter")
@pytest.mark.parametrize("kind", ["ascending", "overlapping", "keys"])
def test_wrong_ends_and_lengths(kind, counted, device, monkeypatch):
    """Whatever the values are, no kernel leaves its arguments. NaN is what belongs to no sequence, or to one that is
    longer than max_seqlen, in the output and in every gradient."""
    if kind == "overlapping":  # two programs store one element
        monkeypatch.setattr(counted._Counter, "_move", lambda *_: None)
    for ends, ends_k, longest, longest_k in ends_and_lengths(random.Random(1), kind):
        T, T_k = 24, 24 if ends_k is None else 30
        tensors = draw_qkv(T_k, 2, 16, device=device, kv_heads=1)
        tensors["q"] = tensors["q"].detach()[:T].requires_grad_()
        given = {"cu_seqlens": torch.tensor(ends, device=device), "max_seqlen": longest}
        if ends_k is not None:
            given |= {"cu_seqlens_k": torch.tensor(ends_k, device=device), "max_seqlen_k": longest_k}
        with counted.count():
            o = ops.attention_varlen(**tensors, **given)
            dq, dk, dv = torch.autograd.grad(o, list(tensors.values()), torch.ones_like(o))
        if kind == "overlapping":
            continue
        computed, with_keys = (torch.zeros(n, dtype=torch.bool, device=device) for n in (T, T_k))
        inside = [[min(max(end, 0), n) for end in some] for some, n in ((ends, T), (ends_k or ends, T_k))]
        for (first, end), (first_k, end_k) in zip(*map(pairwise, inside), strict=True):
            if end - first <= longest and end_k - first_k <= (longest_k or longest):
                computed[first:end] = True
                with_keys[first_k:end_k] = True
                parts = tensors["q"][first:end], *(tensors[name][first_k:end_k] for name in "kv")
                one, one_k = torch.tensor([0, end - first]), torch.tensor([0, end_k - first_k])
                alone = eager(*parts, one, cu_seqlens_k=one_k, empty_rows=True)
                torch.testing.assert_close(o[first:end], alone, atol=1e-5, rtol=1e-5)
        for t, right in ((o, computed), (dq, computed), (dk, with_keys), (dv, with_keys)):
            assert t[right].isfinite().all()
            assert t[~right].isnan().all()
