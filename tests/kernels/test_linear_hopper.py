"""linear_hopper.py in the emulator, as the ops launch it: right against float64 in any schedule, at awkward shapes."""

import functools
import importlib.util

import pytest
import torch
from compiling import needs_triton, python
from oracle import assert_as_accurate, inputs

from benchmarks.gpu import sanitize, variants
from fastvit import ops
from fastvit.kernels import _configs
from fastvit.ops.runtime import device as devices
from fastvit.reference.ops import ACTIVATIONS, linear

if importlib.util.find_spec("triton") is not None:
    import gluon_runs

    from fastvit.ops.linear import hopper
    from fastvit.ops.runtime import launch as launches

pytestmark = needs_triton
BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture
def in_turns(triton_backend, monkeypatch):
    """Within a test, matmuls with an epilogue run in the emulator, in the schedule of `seed`. Yields what ran."""
    run = gluon_runs.Emulated()
    monkeypatch.setattr(hopper, "has_gluon", lambda: True)
    monkeypatch.setattr(_configs, "takes_turns", lambda *_: True)
    with launches.launching(run):
        yield run


# K of one step; a tile in one program, K of fewer steps than slots; tiles for some programs; as many steps as slots,
# and sizes that fill no tile; two groups of row tiles; more than two tiles a program, K of no whole rounds of the slots
SHAPES = {
    "step": (1, 3, 8, 8), "tile": (1, 100, 136, 40), "few": (1, 130, 72, 128), "uneven": (2, 131, 200, 264),
    "groups": (1, 1200, 64, 24), "rounds": (3, 100, 328, 560),
}  # fmt: skip
KINDS = {
    "fc1": ((), "gelu"), "proj": (("residual",), None), "scaled": (("layer_scale", "row_scale", "residual"), "silu"),
}  # fmt: skip


def drawn(dtype, seed, **shapes):
    """Draw tensors. What has rows has NaN between them."""
    tensors = {
        name: inputs("normal", *s, dtype=dtype, device="cpu", seed=seed + len(name)) for name, s in shapes.items()
    }
    pad = functools.partial(torch.nn.functional.pad, pad=(0, 16), value=torch.nan)
    return {name: pad(t)[..., : t.shape[-1]] if t.dim() > 1 else t for name, t in tensors.items()}


def assert_right(got, formula, tensors, factor=2):
    exact = formula(**{name: t.double() for name, t in tensors.items()})
    for one, eager, true in zip(got, formula(**tensors), exact, strict=True):
        assert_as_accurate(one, eager, true, factor=factor)


def check_forward(kind, shape, dtype, seed):
    B, N, K, out = shape
    epilogue, activation = KINDS[kind]
    optional = {"layer_scale": (out,), "row_scale": (B,), "residual": (B, N, out)}
    tensors = drawn(
        dtype, seed, x=(B, N, K), weight=(out, K), bias=(out,), **{name: optional[name] for name in epilogue}
    )
    with torch.inference_mode():
        got = ops.linear(**tensors, activation=activation)
        assert_right([got], lambda **t: [linear(**t, activation=activation)], tensors)


def check_training(shape, dtype, seed, activation="gelu"):
    def formula(x, weight, bias):
        pre = torch.nn.functional.linear(x, weight, bias)
        return ACTIVATIONS[activation](pre), pre

    B, N, K, out = shape
    tensors = drawn(dtype, seed, x=(B, N, K), weight=(out, K), bias=(out,))
    assert_right(torch.ops.fastvit.linear_act_fwd(**tensors, activation=activation), formula, tensors)


def check_backward(shape, dtype, seed, activation="gelu"):
    def formula(dy, weight, pre):
        pre = pre.detach().requires_grad_()
        h = ACTIVATIONS[activation](pre)
        (dpre,) = torch.autograd.grad(h, pre, dy @ weight)
        return dpre, h.detach(), dpre.sum((0, 1))

    B, N, K, out = shape
    tensors = drawn(dtype, seed, dy=(B, N, K), weight=(K, out), pre=(B, N, out))
    assert_right(torch.ops.fastvit.linear_dact(**tensors, activation=activation), formula, tensors, 3)


CHECKS = {kind: functools.partial(check_forward, kind) for kind in KINDS}
CHECKS |= {"training": check_training, "backward": check_backward}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", CHECKS)
def test_shapes(kind, shape, in_turns):
    CHECKS[kind](SHAPES[shape], BF16, 0)
    assert in_turns.seen[0] == ("linear_dact_hopper_kernel" if kind == "backward" else "linear_fwd_hopper_kernel")
    assert in_turns.programs == {"step": 1, "tile": 1, "few": 2}.get(shape, 4)
    assert len(in_turns.stored) == {"training": 2, "backward": 3}.get(kind, 1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, in_turns):
    for check in check_training, check_backward:
        check(SHAPES["few"], F16, 0, activation)
    assert sum("hopper" in name for name in in_turns.seen) == 2


@pytest.mark.parametrize("seed", range(20))
def test_schedules(seed, in_turns, monkeypatch):
    """Two programs take seven and eight tiles."""
    monkeypatch.setattr(devices, "without_gpu", 2)
    in_turns.seed = seed
    [*CHECKS.values()][seed % len(CHECKS)](SHAPES["rounds"], BF16, seed)


# ---- faults that the emulator must find, planted in the kernel's source ----

BACK = "mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS), count=1"
FAULTS = {  # what, with what instead, and the kinds of fault that this is
    "operands before their copy": ("mbarrier.wait(full.index(slot), step // SLOTS & 1)", "pass", "race"),
    "no slot is given back": (BACK, BACK.replace("=1", "=0"), "deadlock"),
    "a slot is given back too early": (BACK + ", pred=k > 0)", "mbarrier.arrive(empty.index(slot), count=1)", "race"),
    "the other parity of a slot": ("(step // SLOTS & 1) ^ 1", "step // SLOTS & 1", "race deadlock"),
    "groups without turns": ("mbarrier.wait(turn.index(GROUP), (count & 1) ^ (1 - GROUP))", "pass", "race deadlock"),
    "a sum before its wait": ("acc = warpgroup_mma_wait(0, deps=(acc,))", "pass", "unready race"),
    "bytes of one operand": (" + b.block_type.nbytes", "", "race deadlock barrier"),
    "what is read before its copy": ("mbarrier.wait(ready.index(GROUP), count & 1)", "pass", "race"),
    "what is read is overwritten": ("mbarrier.wait(taken.index(group), (count // 2 & 1) ^ 1)", "pass", "race"),
    "no fence before a store": ("fence_async_shared()\n        store_tile(out", "store_tile(out", "fence"),
    "no fence after barriers": ("    fence_async_shared()\n    memory", "    memory", "fence"),
    "sums after the end": ("gl.sum(y, 0), mask=cols < N", "gl.sum(y, 0)", "bounds"),
    "a buffer before its store": ("tma.store_wait(1)", "tma.store_wait(2)", "race"),
    "a store in flight at the end": ("        count += 1\n    tma.store_wait(0)", "        count += 1", "leftover"),
    "too many slots": ("SLOTS = gl.constexpr(4)", "SLOTS = gl.constexpr(5)", "bounds"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, in_turns, monkeypatch, tmp_path):
    """In each of five schedules."""
    old, new, kinds = FAULTS[fault]
    module = variants.changed("linear_hopper", [(old, new)], tmp_path)
    monkeypatch.setattr(hopper, "_module", lambda: module)
    monkeypatch.setattr(devices, "without_gpu", 1)
    check = check_training if "store" in fault else check_backward
    gluon_runs.assert_found(kinds, lambda: check(SHAPES["uneven"], BF16, in_turns.seed), in_turns, 5)


def test_verify_runs_every_kernel_in_gluon():
    """On a Hopper GPU. Other tests are too small for them there."""
    code = "from benchmarks.gpu.precompile import record_checks; print(*{x.name for x in record_checks('sm_90', 132)})"
    kernels = {name for name in sanitize.kernels() if "hopper" in name}
    assert kernels
    assert kernels <= {*python("-c", code).split()}
