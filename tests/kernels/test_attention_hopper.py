"""The attention kernels for Hopper in the emulator, as the ops launch them: right against float64 in any schedule."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from attention_inputs import draw_qkv
from compiling import needs_triton
from oracle import assert_as_accurate, assert_op_as_accurate, inputs

from benchmarks.gpu import variants
from fastvit import ops
from fastvit.kernels import _attention_hopper_configs as configs
from fastvit.ops.runtime import device as devices
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.reference.ops import attention as eager

if importlib.util.find_spec("triton") is not None:
    import gluon_runs

    from fastvit.ops.attention import hopper
    from fastvit.ops.runtime import described
    from fastvit.ops.runtime import launch as launches

pytestmark = needs_triton
BF16, F16 = torch.bfloat16, torch.float16
registered = torch.ops.fastvit


@pytest.fixture
def on_hopper(triton_backend, monkeypatch):
    """Within a test, these kernels run in the emulator, in the schedule of `seed`, however few heads there are, and
    other kernels as always. Yields what ran."""
    run = gluon_runs.Emulated()
    monkeypatch.setattr(hopper, "has_gluon", lambda: True)
    changed = {"LONG": [row._replace(shortest=129, least_tiles=0) for row in configs.LONG], "SHORT_HEADS": (0, 0)}
    for name, value in changed.items():
        monkeypatch.setattr(configs, name, value)
    monkeypatch.setattr(hopper, "attention_hopper", configs.attention_hopper.__wrapped__)  # remembers nothing
    with launches.launching(run):
        yield run


def check(shape, dtype, seed, kind="normal"):
    """Compare o and LSE, read from a packed tensor whose last sample is NaN, which stays there."""
    B, N, H, d = shape
    qkv = inputs(kind, B + 1, N, 3, H, d, dtype=dtype, device="cpu", seed=seed)
    qkv[B] = torch.nan
    o, lse = registered.attention_fwd(qkv, None, None, None, None, d**-0.5, 0.0)
    assert o[B].isnan().all()
    q, k, v = qkv[:B].unbind(2)
    assert_as_accurate(o[:B], eager(q, k, v), eager(q.double(), k.double(), v.double()))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * d**-0.5
    torch.testing.assert_close(lse[:B].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)


SHORT = 129, 176, 192, 197, 240, 257, 272  # parts of one to three widths, two to five tiles of queries
LONG = {64: (273, 385, 577), 128: (129, 200, 256, 417)}  # one or two parts, groups without queries
LENGTHS = [("short", n, 64) for n in SHORT] + [("long", n, d) for d in LONG for n in LONG[d]]


@pytest.mark.parametrize(("which", "n", "d"), LENGTHS)
def test_lengths(which, n, d, on_hopper):
    check((2, n, 2, d), (BF16, F16)[n % 2], 0, "large" if n % 3 else "normal")
    assert on_hopper.seen == [f"attention_fwd_{which}_hopper_kernel"]


SCHEDULED = (2, 197, 1, 64), (1, 401, 1, 64), (1, 257, 2, 64), (1, 273, 1, 128)  # short, long, short, long


@pytest.mark.parametrize("seed", range(40))
def test_schedules(seed, on_hopper, monkeypatch):
    monkeypatch.setattr(devices, "without_gpu", 2 + seed % 3)
    on_hopper.seed = seed
    check(SCHEDULED[seed % 4], BF16, seed)


@pytest.mark.parametrize("shape", [(1, 133, 2, 64), (1, 130, 1, 128)], ids=str)
def test_gradients(shape, on_hopper):
    """The backward kernels read what these store."""
    assert_op_as_accurate(ops.attention, eager, draw_qkv(*shape, dtype=BF16, device="cpu"))
    assert "hopper" in on_hopper.seen[0]


@pytest.mark.parametrize("n", [140, 300])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_infinite_values_as_in_the_other_kernel(which, value, n, on_hopper, monkeypatch):
    qkv = inputs("normal", 1, n, 3, 1, 64, dtype=BF16, device="cpu")
    qkv[0, n - 9, which, 0, 3] = value
    arguments = qkv, None, None, None, None, 0.125, 0.0
    got = registered.attention_fwd(*arguments)
    monkeypatch.setattr(hopper, "has_gluon", lambda: False)
    for one, other in zip(got, registered.attention_fwd(*arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert [name.count("hopper") for name in on_hopper.seen] == [1, 0]


def test_strides(on_hopper):
    """Gaps between rows and heads before tokens; one sample, whose stride does not matter; every other head."""
    q = inputs("normal", 2, 3, 150, 72, dtype=BF16, device="cpu")[..., :64].transpose(1, 2)
    k = inputs("normal", 1, 150, 3, 64, dtype=BF16, device="cpu")
    v = inputs("normal", 2, 150, 6, 64, dtype=BF16, device="cpu")[:, :, ::2]
    want = eager(q[:1].double(), k.double(), v[:1].double())
    assert_as_accurate(ops.attention(q[:1], k, v[:1]), eager(q[:1], k, v[:1]), want)
    assert "hopper" in on_hopper.seen[0]


OTHERS = {
    "float32": {"dtype": torch.float32}, "d": {"shape": (2, 150, 2, 80)}, "few": {"shape": (2, 128, 2, 64)},
    "groups": {"kv_heads": 1}, "causal": {"is_causal": True}, "dropout": {"dropout_p": 0.1},
    "mask": {"attn_mask": torch.ones(1, 1, 150, 150, dtype=torch.bool)},
    "address": {"q": torch.zeros(2 * 150 * 128 + 4, dtype=BF16)[4:].view(2, 150, 2, 64)},
    "expanded": {"k": torch.zeros(1, 150, 2, 64, dtype=BF16).expand(2, -1, -1, -1)},
    "stride": {"v": torch.zeros(2, 150, 2, 68, dtype=BF16)[..., :64]}, "target": {}, "heads": {},
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_calls_go_on_as_before(case, on_hopper, monkeypatch):
    options = {"shape": (2, 150, 2, 64), "dtype": BF16, "kv_heads": None} | OTHERS[case]
    drawn = draw_qkv(*options.pop("shape"), dtype=options.pop("dtype"), kv_heads=options.pop("kv_heads"), device="cpu")
    if case == "target":
        monkeypatch.setattr(devices, "arch", lambda x: "sm_100")
    elif case == "heads":
        monkeypatch.setattr(configs, "SHORT_HEADS", (2, 0))
    ops.attention(**({name: t.detach() for name, t in drawn.items()} | options))
    assert on_hopper.seen == ["attention_fwd_kernel"]


# ---- faults that the emulator must find, planted in the kernels' sources ----

WAIT_SHORT = "        scores = wait_for(scores)\n"
GIVE_SHORT = "        mbarrier.arrive(k_empty.index(slot), count=1, pred=is_last)\n"
WAIT_LONG = "    scores = warpgroup_mma_wait(len(p), deps=(scores,))\n"
GIVE_LONG = "    mbarrier.arrive(k_empty.index(slot), count=1)\n"
WAIT_VALUES = "    acc = warpgroup_mma_wait(0, deps=(acc,))\n"
GIVE_VALUES = "    mbarrier.arrive(v_empty.index(before), count=1)\n"
AT_ONCE = "    q = q_bufs.index(GROUP)\n"
FAULTS = {  # what, with what instead, and the kinds of fault that this is; "": the numbers are wrong
    "short": {
        "keys before their copy": ("        mbarrier.wait(k_full.index(slot), parity)\n", "", "race"),
        "queries before their copy": ("        mbarrier.wait(q_full.index(slot), parity)\n", "", "race"),
        "values before their copy": ("        mbarrier.wait(v_full.index(slot), parity)\n", "", "race"),
        "keys are given back early": (WAIT_SHORT + GIVE_SHORT, GIVE_SHORT + WAIT_SHORT, "race"),
        "keys are given back often": (GIVE_SHORT, GIVE_SHORT.replace(", pred=is_last", ""), "barrier race deadlock"),
        "queries before their store": ("        tma.store_wait(0)  # the results", "        # the results", "race"),
        "no turn is passed on": ("        mbarrier.arrive(turn.index(1 - GROUP), count=1)\n", "", "deadlock"),
        "the other parity": ("(step // SLOTS & 1) ^ 1", "step // SLOTS & 1", "deadlock race"),
        "a store in flight at the end": ("H)\n    tma.store_wait(0)", "H)", "leftover"),
        "keys after the last": ("        scores = hide(scores, 0, N)\n", "", ""),
    },
    "long": {
        "keys are not given back": (WAIT_LONG + GIVE_LONG, WAIT_LONG, "deadlock"),
        "values are given back early": (WAIT_VALUES + GIVE_VALUES, GIVE_VALUES + WAIT_VALUES, "race"),
        "values before their copy": ("    mbarrier.wait(v_full.index(before), (count - 1) // SLOTS & 1)\n", "", "race"),
        "scores at the wrong wait": ("_wait(len(p), deps=(scores,))", "_wait(len(p) + 1, deps=(scores,))", "unready"),
        "queries are given back early": (
            AT_ONCE, AT_ONCE + "    mbarrier.arrive(q_empty.index(0), count=1)\n", "race barrier deadlock",
        ),
        "no turn is passed on": (
            "    mbarrier.arrive(turn.index((GROUP + 1) % GROUPS), count=1)\n" + WAIT_LONG, WAIT_LONG, "deadlock",
        ),
        "no fence after barriers": ("    fence_async_shared()\n    mbarrier", "    mbarrier", "fence"),
        "results are overwritten": ("    tma.store_wait(0)  # the group's", "    # the group's", "race"),
        "a group without queries keeps values": (
            "        mbarrier.arrive(v_empty.index(slot), count=1)\n", "", "deadlock",
        ),
        "no rescaling": ("acc * rescale[:, None]", "acc", ""),
    },
}  # fmt: skip


@pytest.mark.parametrize(("which", "fault"), [(which, fault) for which in FAULTS for fault in FAULTS[which]])
def test_planted_faults_are_found(which, fault, on_hopper, monkeypatch, tmp_path):
    """In each of five schedules; a wrong number in one."""
    old, new, kinds = FAULTS[which][fault]
    module = variants.changed(f"attention_hopper_{which}", [(old, new)], tmp_path)
    monkeypatch.setattr(hopper, "_module_kernel", lambda _: getattr(module, f"attention_fwd_{which}_hopper_kernel"))
    monkeypatch.setattr(devices, "without_gpu", 1)
    hopper._kernel.cache_clear()
    shape = (2, 197, 2, 64) if which == "short" else (2, 400, 1, 64)
    gluon_runs.assert_found(kinds, lambda: check(shape, BF16, on_hopper.seed), on_hopper, 5 if kinds else 1)
    hopper._kernel.cache_clear()


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_what_a_gpu_is_to_time_is_right(name, on_hopper, monkeypatch, tmp_path):
    module = variants.changed(*variants.VARIANTS[name], tmp_path)
    monkeypatch.setattr(hopper, "_module_kernel", lambda _: module.attention_fwd_short_hopper_kernel)
    monkeypatch.setattr(devices, "without_gpu", 1)
    hopper._kernel.cache_clear()
    for on_hopper.seed in range(4):
        check((2, 197, 2, 64), BF16, on_hopper.seed)
    hopper._kernel.cache_clear()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under pytest.warns, which loses the module
def test_the_other_kernel_runs_where_one_does_not_compile(on_hopper):
    def refusing(kernel, *rest):
        if hasattr(kernel, "boxes"):
            raise KernelUnsupported(kernel.__name__)
        on_hopper(kernel, *rest)

    with launches.launching(refusing):
        with pytest.raises(KernelUnsupported):
            check((2, 150, 2, 64), BF16, 0)
        with ops.use_backend("triton", strict=False), pytest.warns(UserWarning, match="another kernel runs"):
            check((2, 150, 2, 64), BF16, 0)
    assert on_hopper.seen == ["attention_fwd_kernel"]


def test_a_step_of_triton_that_is_not_known_stays():
    run = SimpleNamespace(launch=(lambda other: lambda *call: other)(None))
    assert described._makers(run, {})[1] is run
