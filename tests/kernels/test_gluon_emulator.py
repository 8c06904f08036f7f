"""The emulator that checks Gluon kernels: a product is right in every schedule, and planted faults are caught."""

import importlib.util
from pathlib import Path

import pytest
import torch
from compiling import needs_triton

if importlib.util.find_spec("triton") is not None:
    from gluon_emulator import Fault, launch
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    @gluon.jit
    def produce(a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles, steps):
        step = 0
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            for k in range(steps):
                slot = step % 3
                mbarrier.wait(empty.index(slot), (step // 3 & 1) ^ 1)
                mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(a_desc, [tile * 64, k * 64], full.index(slot), a_bufs.index(slot))
                tma.async_copy_global_to_shared(b_desc, [k * 64, 0], full.index(slot), b_bufs.index(slot))
                step += 1

    @gluon.jit
    def consume(out_desc, sum_ptr, a_bufs, b_bufs, out_buf, full, empty, tiles, steps, M):
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        step = 0
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            acc = gl.zeros([64, 64], gl.float32, layout)
            for k in range(steps):
                slot = step % 3
                mbarrier.wait(full.index(slot), step // 3 & 1)
                acc = warpgroup_mma(a_bufs.index(slot), b_bufs.index(slot), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index((step + 2) % 3), count=1, pred=k > 0)
                step += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((step + 2) % 3), count=1)
            tma.store_wait(0)
            out_buf.store(acc.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [tile * 64, 0], out_buf)
            rows = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
            gl.store(sum_ptr + rows, gl.sum(acc, 1), mask=rows < M)
        tma.store_wait(0)

    @gluon.jit
    def product(a_desc, b_desc, out_desc, sum_ptr, M, K):
        a_bufs = gl.allocate_shared_memory(a_desc.dtype, [3, 64, 64], a_desc.layout)
        b_bufs = gl.allocate_shared_memory(b_desc.dtype, [3, 64, 64], b_desc.layout)
        out_buf = gl.allocate_shared_memory(out_desc.dtype, [64, 64], out_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(3):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        fence_async_shared()
        tiles = gl.cdiv(M, 64)
        steps = gl.cdiv(K, 64)
        gl.warp_specialize([
            (consume, (out_desc, sum_ptr, a_bufs, b_bufs, out_buf, full, empty, tiles, steps, M)),
            (produce, (a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles, steps)),
        ], [1], [24])  # fmt: skip


def check(kernel, seed, M=200, K=300):
    """The product of a [M, K] and b, and its sums of rows. What lies after K is NaN, as is what lies after the output's
    rows, and stays so."""
    torch.manual_seed(0)
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, 64).bfloat16()
    a = torch.nn.functional.pad(a, (0, -K % 8), value=float("nan"))[:, :K]
    out, sums = torch.full((M + 8, 64), float("nan")).bfloat16(), torch.full((M,), float("nan"))
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    described = [TensorDescriptor.from_tensor(x, [64, 64], layout) for x in (a, b, out[:M])]
    stored = launch(kernel, (2,), *described, sums, M, K, seed=seed)
    exact = a.float() @ b.float()
    torch.testing.assert_close(out[:M].float(), exact.bfloat16().float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(sums, exact.sum(1), rtol=1e-3, atol=1e-3)
    assert out[M:].isnan().all()
    assert (stored[out.data_ptr()][: M * 64] == 1).all()
    assert (stored[sums.data_ptr()] == 1).all()


@needs_triton
@pytest.mark.parametrize("seed", range(20))
def test_right(seed):
    check(product, seed)


FAULTS = {
    "a read before its copy": ("mbarrier.wait(full.index(slot), step // 3 & 1)", "pass", "race"),
    "no slot is given back": ("count=1, pred=k > 0)", "count=0)", "deadlock"),
    "the other parity of a full slot": ("step // 3 & 1)\n", "(step // 3 & 1) ^ 1)\n", "race deadlock"),
    "the other parity of an empty slot": ("& 1) ^ 1)", "& 1))", "race deadlock"),
    "a slot is given back too early": ("empty.index((step + 2) % 3), count=1, pred=k > 0", "empty.index(slot)", "race"),
    "a sum before its wait": ("            acc = warpgroup_mma_wait(0, deps=(acc,))\n", "", "unready"),
    "bytes of one operand": (" + b_desc.block_type.nbytes", "", "race deadlock barrier"),
    "no fence before a store": ("            fence_async_shared()\n", "", "fence"),
    "a store after the end": ("mask=rows < M", "mask=rows < M + 64", "bounds"),
    "a store in flight at the end": ("\n        tma.store_wait(0)\n", "\n", "leftover"),
}


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_caught(fault, tmp_path):
    """A fault in the source of this file is one of its kinds in every schedule."""
    old, new, kinds = FAULTS[fault]
    text = Path(__file__).read_text().partition("def check(")[0]
    assert old in text
    (tmp_path / "planted.py").write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("planted", tmp_path / "planted.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for seed in range(5):
        with pytest.raises(Fault) as caught:
            check(module.product, seed)
        assert caught.value.kind in kinds.split()
