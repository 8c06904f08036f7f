"""ops.attention_windows against float64 and eager PyTorch, which rolls, cuts and masks as Swin, on both backends."""

import importlib

import pytest
import torch
from attention_inputs import DTYPES, seeded
from op_cases import assert_layout_does_not_matter, gathered, tensors_of
from oracle import assert_op_as_accurate, inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.call import UNKEPT
from fastvit.study.accuracy.formulas import attention_windows as eager
from fastvit.study.memory.allocations import Allocations, as_on

# (grid, window, shift): whole windows, with and without a shift; windows that the border cuts, also where the roll has
# made neighbours in the last but one; one row; a window larger than the grid; one window
CUTS = {
    "whole": ((6, 8), (3, 4), (0, 0)),
    "shifted": ((6, 8), (3, 4), (1, 2)),
    "shifted one way": ((4, 8), (4, 4), (0, 2)),
    "cut": ((7, 9), (3, 4), (0, 0)),
    "cut and shifted": ((7, 9), (3, 4), (2, 3)),
    "a row": ((1, 10), (1, 4), (0, 3)),
    "larger": ((3, 5), (4, 7), (2, 6)),
    "one": ((4, 5), (4, 5), (0, 0)),
}


def draw(grid, window, *, H=2, d=24, mask=(), dtype=torch.float32, device, B=2):
    """mask: of attn_mask's shape, the part before (n, n), or None without a mask."""
    n = window[0] * window[1]
    shapes = {"qkv": (B, *grid, 3, H, d)} | ({} if mask is None else {"attn_mask": (*mask, n, n)})
    return tensors_of(shapes, dtype, device)


MASKS = {"bias": (2,), "bias of each window": (9, 2), "mask of each window": (9, 1), "none": None}
CHOICES = [("whole", "none"), *(("cut and shifted", mask) for mask in MASKS if mask != "bias")]


@pytest.mark.parametrize(("cut", "mask"), [*((cut, "bias") for cut in CUTS), *CHOICES])
def test_as_accurate_as_eager(cut, mask, backend, device):
    """A bias, with a gradient: of each head, of each window and head, or of each window; or none."""
    grid, window, shift = CUTS[cut]
    assert_op_as_accurate(
        lambda **t: ops.attention_windows(**t, window=window, shift=shift),
        lambda **t: eager(**t, window=window, shift=shift),
        draw(grid, window, mask=MASKS[mask], device=device, B=2 if mask == "bias of each window" else 1),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_several_tiles(dtype, backend, device):
    """Windows of 72 tokens, which the border cuts. The heads share the bias, whose gradient sums over all."""
    run = {"window": (6, 12), "shift": (3, 6), "shift_bias": -2.5, "scale": 0.3}
    assert_op_as_accurate(
        lambda **t: ops.attention_windows(**t, **run),
        lambda **t: eager(**t, **run),
        draw((6, 18), (6, 12), d=16, mask=(), dtype=dtype, device=device, B=1),
    )


@pytest.mark.parametrize("kind", ["bool", "bool of each window", "a row of numbers", "none"])
def test_masks(kind, backend, device):
    """Next to the shift's, which is added to them or hides. Queries that see no key are zero."""
    grid, window, shift = CUTS["cut and shifted"]
    tensors = draw(grid, window, mask=None, device=device, B=1)
    more = {} if kind == "bool" else {"shift_bias": -1.5}
    if kind.startswith("bool"):
        shape = (9, 1, 12, 12) if kind == "bool of each window" else (2, 12, 12)
        more["attn_mask"] = inputs("normal", *shape, dtype=torch.float32, device=device, seed=3) > 0.5
    elif kind != "none":
        tensors["attn_mask"] = inputs("normal", 1, 12, dtype=torch.float32, device=device, seed=3).requires_grad_()
    assert_op_as_accurate(
        lambda **t: ops.attention_windows(**t, **more, window=window, shift=shift),
        lambda **t: eager(**t, **more, window=window, shift=shift, empty_rows=True),
        tensors,
    )


def test_dropout(backend, device):
    """The backward pass applies the forward's mask, and no two windows or heads have one. v is an identity matrix in
    the first call, which shows it. A bias of each window has a gradient."""
    p, window, shift = 0.3, (4, 4), (0, 2)
    tensors = draw((8, 8), window, d=16, mask=(4, 2), device=device)
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


LAYOUTS = {
    "gaps between rows": lambda t: torch.cat([t, torch.full_like(t[:, :, :2], torch.nan)], 2)[:, :, : t.shape[2]],
    "gaps between tokens": lambda t: torch.cat([t, torch.full_like(t[..., :4], torch.nan)], -1)[..., : t.shape[-1]],
    "columns first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, backend, device):
    arrange = LAYOUTS[layout]
    tensors = {"qkv": arrange(draw((5, 6), (4, 4), mask=None, device=device)["qkv"].detach()).requires_grad_()}
    tensors["attn_mask"] = inputs("normal", 2, 16, 16, dtype=torch.float32, device=device, seed=3).requires_grad_()
    assert_layout_does_not_matter("attention_windows", tensors, arrange, backend == "triton")


def test_what_a_query_does_not_see_has_no_influence(backend, device):
    """A NaN reaches the tokens of its window that were its neighbours before the roll, and no others."""
    window, shift = (4, 4), (2, 2)
    qkv = draw((8, 8), window, mask=None, device=device)["qkv"].detach()
    clean = ops.attention_windows(qkv, window, shift=shift)
    qkv[:, 0, 7] = torch.nan  # rolled to the bottom, and not to the right: with rows 0 and 1, columns 6 and 7
    dirty = ops.attention_windows(qkv, window, shift=shift)
    assert dirty[:, :2, 6:].isnan().all()
    if backend == "triton":  # PyTorch's kernel multiplies hidden NaN by zero
        dirty[:, :2, 6:] = clean[:, :2, 6:]
    others = torch.ones(8, 8, dtype=torch.bool, device=device)
    others[[0, 1, 6, 7]] = False
    assert torch.equal(dirty[:, others], clean[:, others])


# (grid, window): windows of one tile, some that pad it, several tiles of queries and of rows, a row a tile, the grid
RELATIVE = {
    "one tile": ((6, 8), (3, 4)),
    "padded": ((10, 14), (5, 7)),
    "several tiles": ((18, 10), (9, 10)),
    "a row a tile": ((4, 64), (2, 32)),
    "several tiles of columns": ((2, 34), (2, 17)),
    "the whole grid": ((5, 7), (5, 7)),
}


def draw_relative(grid, window, dtype=torch.float32, *, device, B=2, H=2, d=24):
    shapes = {"rows": (B, *grid, H, window[0]), "columns": (B, *grid, H, window[1])}
    return tensors_of({"qkv": (B, *grid, 3, H, d), **shapes}, dtype, device)


@pytest.mark.parametrize("cut", RELATIVE)
def test_relative_positions(cut, backend, device):
    grid, window = RELATIVE[cut]
    assert_op_as_accurate(
        lambda **t: gathered(ops.attention_windows)(**t, window=window),
        lambda **t: gathered(eager)(**t, window=window),
        draw_relative(grid, window, device=device, B=1 if cut == "several tiles" else 2),
    )


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_dtypes_of_relative_positions(dtype, backend, device):
    """Heads of two parts, and a scale."""
    run = {"window": (5, 7), "scale": 0.3}
    assert_op_as_accurate(
        lambda **t: gathered(ops.attention_windows)(**t, **run),
        lambda **t: gathered(eager)(**t, **run),
        draw_relative((5, 14), (5, 7), dtype, device=device, B=1, d=72),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_relative_positions(layout, backend, device):
    arrange = LAYOUTS[layout]
    tensors = draw_relative((4, 12), (4, 6), device=device)
    tensors = {name: arrange(t.detach()).requires_grad_() for name, t in tensors.items()}
    assert_layout_does_not_matter("attention_windows relative", tensors, arrange, backend == "triton")


def test_windows_wider_than_32_bits_are_refused(triton_backend):
    """Offsets within a window are 32-bit in the kernels: here two rows of the grid are 2^31 elements."""
    launch = importlib.import_module("fastvit.ops.attention.relative_launch")
    qkv = torch.empty_strided((1, 2, 1 << 10, 3, 1, 16), (1 << 31, 1 << 30, 1 << 20, 16, 16, 1), device="meta")
    rows, columns = (torch.zeros(1, 2, 1 << 10, 1, 2, device="meta") for _ in range(2))
    with pytest.raises(backends.KernelUnsupported, match=r"within 2\^31 elements, got 2147483648"):
        launch.attention_windows_relative_fwd(qkv, rows, columns, 1.0, call=UNKEPT[Path.TRITON])


def test_flops(device):
    """Windows count in full."""
    tensors = draw((7, 9), (3, 4), mask=(2,), device=device)
    with FlopCounterMode(display=False) as counter:
        ops.attention_windows(**tensors, window=(3, 4), shift=(1, 2)).sum().backward()
    assert counter.get_total_flops() == (4 + 10) * 2 * 9 * 2 * 12 * 12 * 24
    with FlopCounterMode(display=False) as counter:
        gathered(ops.attention_windows)(**draw_relative((6, 8), (3, 4), device=device), window=(3, 4)).sum().backward()
    assert counter.get_total_flops() == (4 + 10) * 2 * 4 * 2 * 12 * 12 * 24


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
    dense, ours = peaks  # 342 and 154 MiB
    assert ours < 160 < 300 < dense
