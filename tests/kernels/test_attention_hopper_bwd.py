"""Attention's backward kernel for Hopper in the emulator, as the op launches it: right in any schedule."""

import importlib.util

import pytest
import torch
from attention_inputs import draw_qkv
from compiling import needs_triton
from oracle import GRADIENT, assert_as_accurate, inputs

from benchmarks.gpu import variants
from fastvit import ops
from fastvit.kernels import _attention_hopper_configs as configs
from fastvit.ops.runtime import device as devices
from fastvit.reference.ops import attention as eager

if importlib.util.find_spec("triton") is not None:
    import gluon_runs

    from fastvit.kernels import attention_hopper_bwd as kernels
    from fastvit.ops.attention import hopper
    from fastvit.ops.attention import launch as attention
    from fastvit.ops.runtime import launch as launches

pytestmark = needs_triton
BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture
def on_hopper(triton_backend, monkeypatch):
    """Within a test this kernel runs in the emulator, in the schedule of `seed`, however few heads there are. Yields
    what ran, and how often the kernel stored to each element."""
    run = gluon_runs.Emulated(stores_all=False)
    monkeypatch.setattr(hopper, "has_gluon", lambda: True)
    monkeypatch.setattr(hopper, "attention_bwd_hopper", lambda n, d, _: configs.attention_bwd_hopper(n, d, 1e6))
    hopper._backward_kernel.cache_clear()
    with launches.launching(run):
        yield run
    hopper._backward_kernel.cache_clear()


def gradients(q, k, v, do):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    return torch.autograd.grad(eager(q, k, v), (q, k, v), do)


def compare(found, *tensors):
    for got, same, exact in zip(found, gradients(*tensors), gradients(*(t.double() for t in tensors)), strict=True):
        assert_as_accurate(got, same, exact, factor=GRADIENT)


def check(shape, dtype, on_hopper, kind="normal"):
    """Compare gradients written into a larger packed tensor. dO has heads before tokens. The last sample is NaN, which
    stays there."""
    B, N, H, d = shape
    qkv = inputs(kind if kind != "low" else "normal", B + 1, N, 3, H, d, dtype=dtype, device="cpu", seed=on_hopper.seed)
    do = inputs("normal", B + 1, H, N, d, dtype=dtype, device="cpu", seed=on_hopper.seed + 1).transpose(1, 2)
    if kind == "low":  # scores near -200: the exp of a key that does not exist is inf
        qkv[:, :, 0], qkv[:, :, 1] = qkv[:, :, 0] / 4 + 5, qkv[:, :, 1] / 4 - 5
    qkv[B] = do[B] = torch.nan
    q, k, v = qkv.unbind(2)
    o = eager(q.double(), k.double(), v.double()).to(dtype)
    lse = (torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * d**-0.5).logsumexp(-1).float()
    room = torch.full((B + 3, N + 1, 3, H, d), 7, dtype=dtype)
    out = room[1:-1, :N]
    attention.attention_bwd(do, q, k, v, None, o, lse, None, d**-0.5, 0.0, out=out.unbind(2))
    assert on_hopper.seen == ["attention_bwd_hopper_kernel"]
    counts = on_hopper.stored[room.data_ptr()].view_as(room)
    assert (counts[1:-1, :N] == 1).all(), "each element is stored once"
    assert counts.sum() == out.numel()
    assert out[B].isnan().all()
    compare(out[:B].unbind(2), q[:B], k[:B], v[:B], do[:B])


LENGTHS = 97, 112, 113, 128, 129, 144, 145, 160, 161, 192, 193, 197, 208, 209, 224


@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(n, on_hopper):
    check((2, n, 2, 64), (BF16, F16)[n % 2], on_hopper, ("large", "normal", "integer")[n % 3])


@pytest.mark.parametrize("seed", range(20))
def test_schedules(seed, on_hopper, monkeypatch):
    monkeypatch.setattr(devices, "without_gpu", 2 + seed % 3)
    on_hopper.seed = seed
    check((2, (100, 128, 150, 197)[seed % 4], 3, 64), BF16, on_hopper, "low" if seed % 3 == 2 else "normal")


def elsewhere(o):
    """Return o at an address that is not a multiple of 16."""
    return torch.cat([o.new_zeros(4), o.reshape(-1)])[4:].view_as(o)


OTHERS = {
    "float32": {"dtype": torch.float32}, "d": {"shape": (1, 150, 2, 80)}, "short": {"shape": (1, 64, 2, 64)},
    "long": {"shape": (1, 225, 1, 64)}, "groups": {"kv_heads": 1}, "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.1}, "mask": {"attn_mask": torch.ones(1, 1, 150, 150, dtype=torch.bool)},
    "expanded": {"do": lambda o: o[:, :1].expand_as(o)}, "address": {"do": elsewhere}, "few heads": {"few": True},
    "address of a whole head": {"shape": (1, 100, 2, 64), "do": elsewhere}, "target": {"arch": "sm_100"},
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_calls_go_on_as_before(case, on_hopper, monkeypatch):
    options = {"shape": (1, 150, 2, 64), "dtype": BF16, "kv_heads": None, "do": lambda o: o} | OTHERS[case]
    if options.pop("few", False):
        monkeypatch.setattr(hopper, "attention_bwd_hopper", configs.attention_bwd_hopper)
    do, shape, arch = options.pop("do"), options.pop("shape"), options.pop("arch", "sm_90")
    monkeypatch.setattr(devices, "arch", lambda x: arch)
    drawn = draw_qkv(*shape, dtype=options.pop("dtype"), kv_heads=options.pop("kv_heads"), device="cpu")
    o = ops.attention(**drawn, **options)
    torch.autograd.grad(o, [*drawn.values()], do(o.detach()))
    parts = ("short",) if shape[1] in (64, 100) else ("dq", "dkdv")
    assert on_hopper.seen[1:] == [f"attention_bwd_{part}_kernel" for part in parts]


KEYS_WAIT = "mbarrier.wait(bars.kv_full.index(slot), turn // SLOTS & 1)\n            dk"
DQ_WAIT, DS_EMPTY = "    dq = warpgroup_mma_wait(0, deps=(dq,))\n", "    mbarrier.arrive(ds_empty, count=1)\n"
FAULTS = {  # what, with what instead, and the kinds of fault that this is; "": the numbers are wrong
    "keys before their copy": (KEYS_WAIT, "dk", "race"),
    "queries are given back often": ("(i), count=1, pred=is_last", "(i), count=1", "race barrier deadlock"),
    "the other parity": ("parity = (step & 1) ^ 1", "parity = step & 1", "deadlock race"),
    "dS without a fence": ("grad)\n    fence_async_shared()", "grad)", "fence"),
    "dS over one that is in use": ("mbarrier.wait(ds_empty, ds_parity)", "pass", "race barrier deadlock"),
    "dS is given back early": (DQ_WAIT + DS_EMPTY, DS_EMPTY + DQ_WAIT, "race"),
    "the tail's parity": ("parity = turn & 1", "parity = 1 - (turn & 1)", "race deadlock barrier"),
    "dP before its product": ("dp = warpgroup_mma_wait(0, deps=(dp,))", "pass", "unready"),
    "delta before it is there": ("mbarrier.wait(bars.stats.index(parity), step // SLOTS & 1)", "pass", "race"),
    "delta over one that is in use": ("next_slot = (step + 1) & 1", "next_slot = step & 1", "race deadlock barrier"),
    "delta of this head": ("head + (1 + part // PARTS)", "head + (part // PARTS)", ""),
    "LSE after the last query": ('mask=exist, other=float("inf"))', "other=0.0)", "bounds"),
    "keys after the last": ("gl.exp2(exponent)", "gl.exp2(s * scale2 - lse[None, :])", ""),
    "no scale": ("(dk * scale)", "(dk)", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, on_hopper, monkeypatch, tmp_path):
    """In each of three schedules."""
    old, new, kinds = FAULTS[fault]
    module = variants.changed("attention_hopper_bwd", [(old, new)], tmp_path)
    monkeypatch.setattr(kernels, "attention_bwd_hopper_kernel", module.attention_bwd_hopper_kernel)
    monkeypatch.setattr(devices, "without_gpu", 1)
    gluon_runs.assert_found(kinds, lambda: check((2, 197, 2, 64), BF16, on_hopper, "low"), on_hopper, 3)
