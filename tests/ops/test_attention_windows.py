"""ops.attention_windows and relative positions: dropout, what windows hide, what is refused, blocks of scores on ATen,
and the memory of a step."""

import importlib

import pytest
import torch
from attention_inputs import seeded
from op_cases import function, made, results, tensors_of
from oracle import assert_op_as_accurate
from torch._subclasses.fake_tensor import FakeTensorMode

from fastvit import ops
from fastvit.ops.attention import aten_samples
from fastvit.ops.runtime import backend as backends
from fastvit.reference.ops import attention_windows as eager
from fastvit.study.memory.allocations import Allocations, as_on


def draw(grid, window, *, H=2, d=16, mask=None, device, B=2):
    """mask: of attn_mask's shape, the part before (n, n), or None without a mask."""
    n = window[0] * window[1]
    shapes = {"qkv": (B, *grid, 3, H, d)} | ({} if mask is None else {"attn_mask": (*mask, n, n)})
    return tensors_of(shapes, torch.float32, device)


def test_dropout(backend, device):
    """The backward pass applies the forward's mask, and no two windows or heads have one. v is an identity matrix in
    the first call, which shows it. A bias of each window has a gradient."""
    p, window, shift = 0.3, (4, 4), (0, 2)
    tensors = draw((8, 8), window, mask=(4, 2), device=device, B=1)
    fused = seeded(ops.attention_windows, window=window, shift=shift, dropout_p=p)
    identity = torch.eye(16, device=device).view(4, 4, 1, 16).repeat(2, 2, 1, 1).roll((0, 2), (0, 1))
    shown = tensors["qkv"].detach().clone()
    shown[:, :, :, 2] = identity
    weights = eager(shown, window, shift=shift)
    kept = (fused(qkv=shown) != 0) | (weights == 0)
    kept = kept.roll((0, -2), (1, 2)).unflatten(2, (2, 4)).unflatten(1, (2, 4)).transpose(2, 3)
    kept = kept.flatten(3, 4).flatten(0, 2).transpose(1, 2)  # (B * windows, H, n, n)
    planes = kept.flatten(0, 1)
    assert not any(torch.equal(a, b) for i, a in enumerate(planes) for b in planes[:i])
    more = {"window": window, "shift": shift, "factors": kept / (1 - p)}
    assert_op_as_accurate(fused, lambda **t: eager(**t, **more), tensors)


def test_what_a_query_does_not_see_has_no_influence(backend, device):
    """A NaN reaches the tokens of its window that were its neighbours before the roll, and no others."""
    window, shift = (4, 4), (2, 2)
    qkv = draw((8, 8), window, device=device)["qkv"].detach()
    clean = ops.attention_windows(qkv, window, shift=shift)
    qkv[:, 0, 7] = torch.nan  # rolled to the bottom, and not to the right: with rows 0 and 1, columns 6 and 7
    dirty = ops.attention_windows(qkv, window, shift=shift)
    assert dirty[:, :2, 6:].isnan().all()
    if backend == "triton":  # PyTorch's kernel multiplies hidden NaN by zero
        dirty[:, :2, 6:] = clean[:, :2, 6:]
    others = torch.ones(8, 8, dtype=torch.bool, device=device)
    others[[0, 1, 6, 7]] = False
    assert torch.equal(dirty[:, others], clean[:, others])


def test_windows_wider_than_32_bits_are_refused(triton_backend):
    """Offsets within a window are 32-bit in the kernels: here two rows of the grid are 2^31 elements."""
    launch = importlib.import_module("fastvit.ops.attention.launch")
    qkv = torch.empty_strided((1, 2, 1 << 10, 3, 1, 16), (1 << 31, 1 << 30, 1 << 20, 16, 16, 1), device="meta")
    rows, columns = (torch.zeros(1, 2, 1 << 10, 1, 2, device="meta") for _ in range(2))
    with pytest.raises(backends.KernelUnsupported, match=r"within 2\^31 elements, got 2147483648"):
        launch.attention_fwd(qkv, None, None, None, None, 1.0, 0.0, False, rows, columns)


@pytest.mark.parametrize("relative", [False, True])
def test_separate_tensors(relative, backend, device):
    """The registered op takes q, k and v of a grid by themselves."""
    q, k, v, rows, columns = (torch.randn(2, 6, 8, 2, 16, device=device) for _ in range(5))
    rest = (rows[..., :3], columns[..., :4]) if relative else (None, None, None, None, 0, 0, (3, 4), (1, 2), -1.5)
    mask = None if relative else torch.randn(2, 12, 12, device=device)[None]
    runs = []
    for given in ((torch.stack((q, k, v), 3), None, None), (q, k, v)):
        o, lse = torch.ops.fastvit.attention_fwd(*given, mask, None, 0.3, 0.0, False, *rest)
        numbers = o, lse, None, 0.3, 0.0, False, not relative
        dq, dk, dv, *more = torch.ops.fastvit.attention_bwd(o, *given, mask, *numbers, *rest)
        runs.append((o, lse, *(dq.unbind(3) if given[1] is None else (dq, dk, dv)), *more))
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not backends.HAVE_TRITON, reason="triton is not installed")
def test_planned_memory():
    """A step of Swin-T's first stage, 32 images in bfloat16, as on a GPU. 55 MiB are qkv, and as much its gradient."""
    peaks = []
    for module in (eager, ops.attention_windows):
        fakes, seen = FakeTensorMode(allow_non_fake_inputs=True), Allocations(gpu=True)
        with fakes, as_on(True), seen:
            qkv = torch.empty(32, 56, 56, 3, 3, 32, dtype=torch.bfloat16, requires_grad=True)
            bias = torch.empty(3, 49, 49, dtype=torch.bfloat16, requires_grad=True)
            o = module(qkv, (7, 7), shift=(3, 3), attn_mask=bias)
            torch.autograd.grad(o, (qkv, bias), torch.empty_like(o))
        peaks.append(seen.bytes_of(seen.held(0)) / 2**20)
    dense, ours = peaks  # 287 and 154 MiB
    assert ours < 160 < 280 < dense


# ---- relative positions ----


@pytest.mark.parametrize("flash", [True, False])
def test_blocks_of_scores(flash, device, monkeypatch):
    """On ATen: several samples or queries at a time change no value, by PyTorch's kernel and by the formula."""
    tensors = made("attention relative", 3, 20, device)
    monkeypatch.setattr(aten_samples, "_FLASH", flash)
    runs = []
    for scores in (3 * 2 * 20 * 20, 2 * 20 * 20, 2 * 7 * 20, 20):
        monkeypatch.setattr(aten_samples, "_RELATIVE_BYTES", scores * 4)
        monkeypatch.setattr(aten_samples, "_BYTES", scores * 4)
        with ops.use_backend("aten"):
            runs.append(results(function("attention relative"), tensors))
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], atol=1e-5, rtol=1e-5)
