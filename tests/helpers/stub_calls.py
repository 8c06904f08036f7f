"""Checks of `runtime/call.py` and of measured choices, in a process and with a driver as in stub_launches.py."""

import random
from unittest import mock

import torch
from op_cases import function, made
from remembered import NODES, counted
from stub_checks import DTYPES, hooked, one_kernel, run_checks

from benchmarks.codegen.launches import recording
from benchmarks.codegen.stub_driver import stub_gpu
from benchmarks.gpu.tables import works
from benchmarks.gpu.tuner import using
from fastvit.kernels import _tuned
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import launch as runtime_launch


def _wide(name, tokens, dtype=torch.bfloat16):
    """Draw tensors for which MLPs run our kernels: hidden sizes are multiples of 16."""
    return made(name, 2, tokens, torch.device("cpu"), dtype, hidden=64, gated=32)


def _shifted(draw, tensors):
    """Return contiguous copies at addresses of several alignments."""
    found = {}
    for name, t in tensors.items():
        shift = draw.choice((0, 0, 0, 1, 2, 4, 8))
        flat = torch.zeros(t.numel() + shift, dtype=t.dtype)
        found[name] = flat[shift:].view(t.shape).requires_grad_(t.requires_grad)
    return found


def _launched(gpu, op, tensors):
    """Return binaries, grids and numbers of a training step."""
    gpu.launches.clear()
    out = op(**tensors)
    torch.autograd.backward(out, torch.ones_like(out))
    found = []
    for step in gpu.launches:
        passed = [a for i, a in enumerate(step.arguments) if i not in step.kernel.src.fn.constexprs]
        numbers = [a for a in passed if isinstance(a, int | float) and abs(a) < 1 << 24 and a != 0]  # no addresses
        found.append((step.kernel, step.grid, numbers))
    return found


def remembered_calls_launch_what_others_do():
    """Whether the first one had aligned tensors or others."""
    draw = random.Random(0)
    seen = direct = 0
    with stub_gpu() as gpu:
        for _ in range(150):
            name, dtype, tokens = draw.choice(NODES), draw.choice(DTYPES), draw.choice((2, 16, 17, 197))
            op, tensors = function(name), _wide(name, tokens, dtype)
            _launched(gpu, op, tensors if draw.random() < 0.5 else _shifted(draw, tensors))
            tensors = _shifted(draw, tensors)
            with mock.patch.object(runtime_call, "_kept", {}):
                want = _launched(gpu, op, tensors)
            with (
                counted() as again,
                mock.patch.object(runtime_launch, "launch", side_effect=runtime_launch.launch) as launch,
            ):
                got = _launched(gpu, op, tensors)
            assert got == want, f"{name} of {tokens} tokens in {dtype}: {got}, wanted {want}"
            seen, direct = seen + len(again), direct + len(got) - launch.call_count
    assert seen > 200, seen
    assert direct > 300, direct


def remembered_calls_differ_by_which_tensors_are_there():
    """A scale instead of a bias, with the same signature."""
    with stub_gpu() as gpu:
        op, tensors = function("layer_norm_mlp gelu"), _wide("layer_norm_mlp gelu", 16)
        without = [{**tensors, name: None} for name in ("fc2_bias", "layer_scale")]
        with mock.patch.object(runtime_call, "_kept", {}):
            want = _launched(gpu, op, without[1])
        for given in (without[0], without[0], without[1]):
            got = _launched(gpu, op, given)
        assert got == want, f"{got}, wanted {want}"


def the_tuner_reaches_every_choice_of_a_gemm():
    """For few rows and many, with every epilogue, forward and backward."""
    asked = set()
    with recording("sm_90"):
        for work in works():
            if work.table == "use_triton_gemm":
                with using({}):
                    run = work.build(torch.device("meta"))
                with using({}) as keys:
                    run()
                asked |= {key for _, table, key in keys if table == work.table}
    rows = {(197 * B).bit_length() for B in (1, 32, 256)}
    for D in (384, 768, 1024, 1280):
        for m in rows:
            assert {(m, 4 * D, D, 2, 0), (m, D, 4 * D, 2, 0), (m, D, D, 2, 0), (m, 4 * D, D, 2, 1)} <= asked, (D, m)


def a_measured_choice_replaces_a_plan():
    choice = {"block_rows": 1, "num_warps": 1, "programs_per_sm": 2, "num_stages": 1}
    with stub_gpu() as gpu, torch.no_grad():
        call = one_kernel()
        call()
        with using({("layer_norm", (64, 0)): tuple(choice[name] for name in _tuned.FIELDS["layer_norm"])}):
            call()
        call()
    shipped, measured, again = (launched.kernel for launched in gpu.launches)
    assert measured.metadata.num_warps == 1
    assert shipped.metadata.num_warps != 1
    assert again is shipped


def hooks_see_every_launch_of_a_remembered_call():
    seen = []
    with stub_gpu() as gpu, torch.no_grad():
        op, tensors = function("layer_norm_mlp gelu"), _wide("layer_norm_mlp gelu", 16)
        for _ in range(2):  # the second one is remembered
            op(**tensors)
        gpu.launches.clear()
        with hooked(lambda metadata: seen.append(metadata.get())):
            op(**tensors)
        assert len(seen) == len(gpu.launches) > 0


if __name__ == "__main__":
    run_checks(globals())
