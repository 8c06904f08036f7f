"""Checks of `runtime/launch.py` in a process that is not Triton's interpreter, with a driver that launches nothing.

    python tests/helpers/stub_launches.py        # prints {"checks": how many, check: what went wrong}, as JSON

tests/runtime/test_launches.py runs it. A function without an underscore is a check.
"""

import contextlib
import contextvars
import gc
import json
import random
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from op_cases import ROWS, function, made, outputs_of
from stub_driver import stub_gpu
from triton.backends.compiler import GPUTarget
from triton.runtime import _allocation
from triton.runtime.errors import OutOfResources

from fastvit import ops
from fastvit.kernels.layer_norm import layer_norm_fwd_kernel
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import launch as runtime_launch
from fastvit.ops.runtime.launch import launching

OPS = torch.ops.fastvit
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _functions():
    """Return the functions of the kernels' modules that Triton compiles. `stub_gpu` imports all of these modules."""
    modules = [module for name, module in sys.modules.items() if name.startswith("fastvit.kernels.")]
    return {f for module in modules for f in vars(module).values() if isinstance(f, triton.JITFunction)}


def _kernels():
    return {f.__name__ for f in _functions() if f.__name__.endswith("_kernel")}


def _one_kernel(rows=4):
    """Return a call of one kernel."""
    x, w = torch.zeros(rows, 64), torch.zeros(64)
    return lambda: ops.layer_norm(x, w, w)


def _train(name, tensors):
    outputs = outputs_of(function(name)(**tensors))
    torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])


@contextlib.contextmanager
def _hooked(hook):
    """Call the hook at every launch."""
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)


# ---- random calls: every op of the table, with and without its optional tensors, of all alignments and strides ----

_alignments = random.Random(0)  # drawn apart, so that one call is made with tensors of several
_OPTIONAL = {"bias", "fc1_bias", "fc2_bias", "proj_bias", "layer_scale", "row_scale", "pos_embed", "prefix"}


def _placed(draw, t):
    """Return t at an address that is a multiple of 2 bytes to 64, its rows contiguous or slices of wider ones."""
    shift, wide = _alignments.choice((0, 0, 0, 1, 2, 4, 8)), draw.choice((0, 0, 0, 1, 4, 8))
    if not t.is_floating_point():
        return t
    rows = torch.zeros(t[..., 0].numel() * (t.shape[-1] + wide) + shift, dtype=t.dtype)[shift:]
    return rows.view(*t.shape[:-1], -1)[..., : t.shape[-1]].requires_grad_(t.requires_grad)


def _step(draw, name, dtype):
    """Run a training step of an op at random sizes."""
    d, patch = draw.choice((16, 40, 64)), draw.choice((4, 14, 16))
    widths = {"D": draw.choice((16, 24, 64, 100, 128, 200)), "hidden": draw.choice((16, 64, 128, 200))}
    grid = {"patch": patch, "height": patch * draw.randint(1, 3), "width": patch * draw.randint(1, 3)}
    tokens = draw.choice((2, 15, 16, 17, 33, 197, 300)) if "attention" in name else draw.choice((2, 5, 16, 17, 150))
    gated = draw.choice((16, 64, 100, 128))
    tensors = made(name, draw.randint(1, 3), tokens, torch.device("cpu"), dtype, d=d, gated=gated, **widths, **grid)
    for key in [key for key in tensors if key in _OPTIONAL and draw.random() < 0.5]:
        tensors[key] = None
    for key in tensors.keys() & {"sin", "cos", "fixed_sin", "fixed_cos", "attn_mask"}:
        tensors[key] = tensors[key].detach().to(draw.choice(DTYPES)).requires_grad_(tensors[key].requires_grad)
    _train(name, {key: None if t is None else _placed(draw, t) for key, t in tensors.items()})


def the_same_binary_as_triton_and_the_same_arguments():
    """Each launch three times: by Triton, and twice by `launch`, of which the second has been seen before."""
    direct = total = 0
    names = [*ROWS] * 2 + ["mlp swiglu"] * 20  # the only row of gated_dact_kernel, which a ninth of its draws launch
    with stub_gpu() as gpu:
        original = runtime_launch.launch

        def thrice(kernel, programs, tensors, numbers, constants):
            nonlocal direct, total
            gpu.launches.clear()
            kernel[(programs,)](*tensors, *numbers, **constants, **runtime_launch.OPTIONS)
            by_triton = mock.patch.object(runtime_launch, "_by_triton", side_effect=runtime_launch._by_triton)
            with mock.patch.object(runtime_launch, "_instead", None), by_triton as by_triton:
                original(kernel, programs, tensors, numbers, constants)
                first = by_triton.call_count
                original(kernel, programs, tensors, numbers, constants)
                assert by_triton.call_count == first, f"{kernel.__name__} was not kept"
            total, direct = total + 1, direct + (first == 0)
            by_triton, *ours = gpu.launches
            assert by_triton.kernel.metadata.enable_fp_fusion, "products and sums in one instruction"
            assert len(ours) == 2
            addresses = [0 if t is None else t.data_ptr() for t in tensors]
            for launched in ours:
                assert launched.kernel is by_triton.kernel, f"{kernel.__name__}{numbers} {addresses}: another binary"
                assert launched.grid == by_triton.grid == (programs, 1, 1)
                assert len(launched.arguments) == len(by_triton.arguments) == len(kernel.arg_names)
            assert list(by_triton.arguments[: len(tensors)]) == list(tensors)
            count = len(tensors) + len(numbers)
            assert list(ours[1].arguments[:count]) == [*addresses, *numbers]
            assert list(by_triton.arguments[len(tensors) : count]) == list(numbers)
            assert {*range(count, len(kernel.arg_names))} <= {*kernel.constexprs}  # places that the launcher skips

        with launching(thrice):
            for i, name in enumerate(names):
                gpu.device = i % 2  # a binary is loaded on one device
                draw = random.Random(f"{name} {names[:i].count(name)}")  # a new row changes no other row's numbers
                torch.set_float32_matmul_precision(draw.choice(("highest", "high")))
                dtype, seed = draw.choice(DTYPES), draw.random()
                for _ in range(2):
                    _step(random.Random(seed), name, dtype)
        launched = {kernel.name for kernel in gpu.compiled}
    assert launched == _kernels(), launched ^ _kernels()
    assert total > 600, total
    assert 0.02 * total < direct < 0.98 * total, (direct, total)


def a_profiler_reads_names_flops_and_bytes():
    """Every kernel has them, where Proton looks."""
    read = {}

    def hook(metadata):
        read[metadata.get()["name"]] = metadata.get()

    with _hooked(hook), stub_gpu() as gpu:
        for dtype, names in ((torch.bfloat16, ROWS), (torch.float32, ["patch_embed"])):
            for name in names:
                tensors = made(name, 2, 18, torch.device("cpu"), dtype, D=64, hidden=64, gated=64)
                _train(name, tensors)
        names = {kernel.name for kernel in gpu.compiled}
    assert {name.split()[0] for name in read} == names == _kernels()
    norm = read["layer_norm_fwd_kernel M36 D32 bfloat16"]  # a LayerNorm before proj
    assert norm["bytes"] == 2 * (2 * 36 * 32 + 2 * 32) + 4 * 2 * 36
    assert norm["flops16"] == 0
    attention = read["attention_fwd_kernel B2 N18 H2 d16 bfloat16"]
    assert attention["flops16"] == 4 * 2 * 2 * 18 * 18 * 16
    assert attention["bytes"] == 4 * 2 * 18 * 2 * 16 * 2 + 2 * 2 * 18 * 4 + 8, "the last one with a seed"
    assert read["linear_fwd_kernel M36 N64 K64 bfloat16"]["flops16"] == 2 * 36 * 64 * 64
    assert read["gated_fwd_kernel M36 N64 K64 bfloat16"]["flops16"] == 4 * 36 * 64 * 64
    assert read["patch_embed_fwd_kernel patches36 D64 K48 float32"]["flops32"] == 2 * 36 * 64 * 48


def a_kernel_that_does_not_fit_runs_on_aten_and_is_not_tried_again():
    attempts = []

    class Refusing:
        metadata = SimpleNamespace(target=GPUTarget("cuda", 90, 32))

        def launch_metadata(self, *_):
            return None

        @property
        def run(self):
            attempts.append(1)
            raise OutOfResources(300_000, 232_448, "shared memory")

    x, w = torch.randn(4, 64), torch.randn(64)
    expected = torch.nn.functional.layer_norm(x, (64,), w, w, 1e-6)
    with stub_gpu() as gpu, torch.no_grad():
        gpu.compile = lambda *_, **__: Refusing()
        with mock.patch.object(triton.compiler, "compile", gpu.compile):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                for _ in range(3):
                    torch.testing.assert_close(ops.layer_norm(x, w, w), expected)
            assert len(attempts) == 1, attempts
            assert len(warned) == 1, [str(w.message) for w in warned]
            assert "shared memory" in str(warned[0].message)
            refused = pytest.raises(backends.KernelUnsupported, match="layer_norm_fwd_kernel")
            with ops.use_backend("auto", strict=True), refused:
                ops.layer_norm(x, w, w)


def an_error_that_is_not_the_compiler_s_is_raised():
    def broken(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access")

    raised = pytest.raises(RuntimeError, match="illegal memory access")
    with stub_gpu(), mock.patch.object(triton.compiler, "compile", broken), torch.no_grad(), raised:
        _one_kernel()()


def unknown_versions_and_amd_stay_with_triton():
    for target, known in ((GPUTarget("cuda", 90, 32), False), (GPUTarget("hip", "gfx942", 64), True)):
        with stub_gpu(target) as gpu, mock.patch.object(runtime_launch, "_DIRECT", known), torch.no_grad():
            with mock.patch.object(runtime_launch, "_by_triton", side_effect=runtime_launch._by_triton) as by_triton:
                call = _one_kernel()
                for _ in range(3):
                    call()
            assert by_triton.call_count == len(gpu.launches) == 3
            assert len(gpu.compiled) == 1


def a_kernel_has_memory_for_its_descriptors_in_every_context():
    """However it is launched. An allocator of the caller's is left in place."""
    x, w = (torch.zeros(rows, 16, dtype=torch.bfloat16) for rows in (4096, 4224))
    current = _allocation._allocator

    def launched_twice():
        before = current.get()
        for _ in range(2):
            OPS.linear_fwd(x, w, None, "relu")
        return before, current.get()

    def launched_with(allocator):
        triton.set_allocator(allocator)
        return launched_twice()

    with stub_gpu() as gpu, torch.no_grad():
        for _ in range(2):  # at first nothing is compiled
            before, after = contextvars.Context().run(launched_twice)
            assert isinstance(before, _allocation.NullAllocator)
            assert after is runtime_launch._scratch
        assert contextvars.Context().run(launched_with, print)[1] is print
        assert len(gpu.compiled) == 1
        assert [launched.grid for launched in gpu.launches] == [(264, 1, 1)] * 6, "two programs on each of 132 SMs"
        contextvars.Context().run(_one_kernel())
        assert isinstance(contextvars.Context().run(current.get), _allocation.NullAllocator)


_CONFIG = {"TMA", "BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_D", "GROUP_M", "partial_ptr"}


def _by_rows(kernel):
    """Whether the launch configuration of a matmul follows the number of rows: smaller tiles where there are few, TMA
    where there are many, a single split without float32 partials. That makes up to three of them, not one for each
    batch size."""
    return "BLOCK_K" in kernel.arg_names


def _or_vendor(kernel):
    """Whether the kernel runs for few rows only, or for many only: otherwise the vendor's matmul does."""
    return kernel.module.endswith("linear")


def _launched(gpu, name, B):
    """Return for each kernel of a training step its binaries, and what tells them apart besides a configuration."""
    gpu.launches.clear()
    sizes = {"D": 128 if "attention" in name else 192, "d": 64, "patch": 14, "height": 98, "width": 98}
    sizes |= {"hidden": 4096 if name == "linear gelu" else 512, "gated": 170}  # 4096: from some batch size on by TMA
    tensors = made(name, B, 196, torch.device("cpu"), torch.bfloat16, **sizes)
    tensors.pop("attn_mask", None)  # its gradient is summed over samples if there are several
    _train(name, tensors)
    binaries = defaultdict(set)
    for kernel in {launched.kernel for launched in gpu.launches}:
        source, names = kernel.src, kernel.src.fn.arg_names
        facts = [*source.signature.items()]
        facts += [(names[place], fact) for kind in (source.constants, source.attrs) for (place,), fact in kind.items()]
        rest = sorted(str(fact) for fact in facts if fact[0] not in _CONFIG)
        binaries[kernel.src.fn].add((id(kernel), str(rest)))
    return binaries


def a_new_batch_size_compiles_nothing():
    """Which would take seconds in the middle of an epoch. Kernels of sequences follow the longest one."""
    names = [name for name in ROWS if not any(kind in name for kind in ("varlen", "lengths"))]
    for name in names:
        with stub_gpu() as gpu:
            by_batch = {B: _launched(gpu, name, B) for B in (1, 2, 3, 5, 8, 16, 17)}
        for kernel in {kernel for binaries in by_batch.values() for kernel in binaries}:
            rests = {B: {rest for _, rest in binaries[kernel]} for B, binaries in by_batch.items()}
            most = max(rests.values(), key=len) if _or_vendor(kernel) else rests[1]
            for B, some in rests.items():
                same = some <= most if _or_vendor(kernel) else some == most
                assert same, f"{name}: {kernel} at B = {B}: {some ^ most}"
            every = set().union(*(binaries[kernel] for binaries in by_batch.values()))
            assert len(every) <= (3 if _by_rows(kernel) else 1) * len(most), f"{name}: {kernel} {every}"


def a_kernel_has_one_key_whichever_is_the_first():
    """The key in Triton's cache on disk: what one process compiles, another one finds."""
    ordered = sorted(_functions(), key=lambda f: f"{f.module}.{f.__name__}")
    keys = []
    for order in (ordered, ordered[::-1]):
        for f in ordered:
            f.hash, f.used_global_vals = None, {}
        keys.append({f"{f.module}.{f.__name__}": f.cache_key for f in order})
    assert keys[0] == keys[1]
    assert len(keys[0]) > len(_kernels()) > 20


def threads_compile_once():
    with stub_gpu() as gpu:

        def compile(*arguments, **options):
            time.sleep(0.01)  # other threads run
            return gpu.compile(*arguments, **options)

        slowly = mock.patch.object(triton.compiler, "compile", compile)
        with slowly, ThreadPoolExecutor(8, initializer=threading.Barrier(8).wait) as pool:
            for done in [pool.submit(_one_kernel()) for _ in range(8)]:
                done.result()
        assert len(gpu.launches) == 8
        assert len(gpu.compiled) == 1


def a_kernel_that_is_called_is_held():
    """Also after Triton has forgotten it: a binary is unloaded with its last reference."""
    with stub_gpu() as gpu, torch.no_grad():
        _one_kernel()()
        gpu.launches.clear()
        kernel = weakref.ref(gpu.compiled.pop())
        layer_norm_fwd_kernel.device_caches.clear()
        gc.collect()
        assert kernel() is not None
        runtime_launch._compiled.clear()
        runtime_call._kept.clear()
        gc.collect()
        assert kernel() is None


def many_shapes_do_not_pile_up():
    with stub_gpu(), mock.patch.object(runtime_launch, "_MOST", 8), torch.no_grad():
        for rows in range(1, 40):
            _one_kernel(rows)()
            assert len(runtime_launch._compiled) <= 8


def _main():
    problems = {}
    checks = [f for name, f in globals().items() if name[0] != "_" and getattr(f, "__module__", "") == "__main__"]
    for check in checks:
        try:
            check()
        except Exception:
            problems[check.__name__] = traceback.format_exc()
    print(json.dumps({"checks": len(checks), **problems}))


if __name__ == "__main__":
    _main()
