"""The matmuls of linear.py for Hopper, in Gluon: the same equations, by programs whose warps have different work.

    a warp copies        tiles of the operands into a ring of SLOTS slots, and tiles of `read` for the epilogue, by TMA
    two groups           of four warps take the program's output tiles in turn: the tensor cores work for one group,
                         while the other one finishes its tile

Partitions wait for each other at barriers in shared memory. A wait names the parity of a barrier's phase:

    full, empty  [slot]   the operands are there; the products that read them are done
    ready, taken [group]  the tile of `read` is there; its buffers may be written again
    turn         [group]  the other group's last product is issued and done, so this one's may begin

`turn` keeps the groups out of step. It is also what makes `full` safe: a parity does not tell the next use of a slot
from the one after that, which a group that ran ahead would take for its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastvit.kernels import _profiling
from fastvit.kernels._hopper import accumulator, load_tile, store_tile
from fastvit.kernels._hopper import barriers as new_barriers
from fastvit.kernels._math import activate, activate_with_grad, columns_part
from fastvit.kernels.linear import tile_of

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)
GROUP_M = gl.constexpr(8)  # row tiles that programs of about the same number share
SLOTS = gl.constexpr(4)
PART = gl.constexpr(32)  # columns per step of the epilogue
PARTS = gl.constexpr(4)
OPTIONS = {"num_warps": 4, "maxnreg": 168}  # of 12 warps together; 240 are left to each thread of a group

OPERAND = 128, 64  # boxes of the descriptors
TILE = 128, 32
FORWARD_BOXES = OPERAND, OPERAND, None, None, None, TILE, TILE, TILE  # None: a pointer
BACKWARD_BOXES = OPERAND, (64, 128), TILE, TILE, TILE, None


@gluon.jit
def tile_at(number, M, N):
    """Return the row tile, the first row and the first column of a tile."""
    tile_m, tile_n = tile_of(number, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    tile_m = tile_m.to(gl.int32)
    return tile_m, tile_m * BLOCK_M, tile_n * BLOCK_N


@gluon.jit
def copy(a, b, read, memory, barriers, M, N, K, TRANSPOSED: gl.constexpr):
    """The warp that copies. TRANSPOSED: b is [N, K]."""
    a_slots, b_slots, parts, _spare = memory
    full, empty, ready, taken, _turn = barriers
    step = 0
    count = 0
    for number in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        _tile_m, row, col = tile_at(number, M, N)
        for k in range(0, K, BLOCK_K):
            slot = step % SLOTS
            mbarrier.wait(empty.index(slot), (step // SLOTS & 1) ^ 1)
            mbarrier.expect(full.index(slot), a.block_type.nbytes + b.block_type.nbytes)
            load_tile(a, [row, k], full.index(slot), a_slots.index(slot))
            if TRANSPOSED:
                load_tile(b, [col, k], full.index(slot), b_slots.index(slot))
            else:
                load_tile(b, [k, col], full.index(slot), b_slots.index(slot))
            step += 1
        if read is not None:
            group = count % 2
            mbarrier.wait(taken.index(group), (count // 2 & 1) ^ 1)
            mbarrier.expect(ready.index(group), PARTS * read.block_type.nbytes)
            for i in gl.static_range(PARTS):
                load_tile(read, [row, col + i * PART], ready.index(group), parts.index(group * PARTS + i))
        count += 1


@gluon.jit
def load_columns(ptr, cols, N):
    return gl.load(ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def finish_part(
    y, i: gl.constexpr, GROUP: gl.constexpr,  # [BLOCK_M, PART] f32
    tile_m, row, col, M, N, rows_per_sample, parts, spare, tensors, vectors, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Store part i of a tile's results from its sums. What TMA has read from the part's buffer is overwritten there."""
    layout: gl.constexpr = y.type.layout
    read, out, second = tensors
    bias_ptr, layer_scale_ptr, row_scale_ptr, partial_ptr = vectors
    buffer = parts.index(GROUP * PARTS + i)
    cols = col + i * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
    if partial_ptr is not None:
        other, grad = activate_with_grad(buffer.load(layout).to(gl.float32), ACTIVATION, False)
        y *= grad
        gl.store(partial_ptr + tile_m.to(gl.int64) * N + cols, gl.sum(y, 0), mask=cols < N)
    else:
        if bias_ptr is not None:
            y += load_columns(bias_ptr, cols, N)
        other = y
        y = activate(y, ACTIVATION, False)
        if layer_scale_ptr is not None:
            y *= load_columns(layer_scale_ptr, cols, N)
        if row_scale_ptr is not None:
            rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
            y *= gl.load(row_scale_ptr + rows // rows_per_sample, mask=rows < M, other=0.0).to(gl.float32)[:, None]
        if read is not None:
            y += buffer.load(layout).to(gl.float32)
    if second is not None:
        tma.store_wait(1)  # stores end in their order: the last one from `spare` has
        spare.index(GROUP).store(y.to(out.dtype))
        buffer.store(other.to(out.dtype))
        fence_async_shared()
        store_tile(out, [row, col + i * PART], spare.index(GROUP))
        store_tile(second, [row, col + i * PART], buffer)
    else:
        if read is None:
            tma.store_wait(PARTS - 1)  # the store of the last tile's part i
        buffer.store(y.to(out.dtype))
        fence_async_shared()
        store_tile(out, [row, col + i * PART], buffer)


@gluon.jit
def compute(
    GROUP: gl.constexpr, tensors, vectors, memory, barriers, M, N, K, rows_per_sample,
    TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """A group of four warps: every other tile of the program."""
    a_slots, b_slots, parts, spare = memory
    full, empty, ready, taken, turn = barriers
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    count = 0
    for number in range(gl.program_id(0) + GROUP * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        tile_m, row, col = tile_at(number, M, N)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, accumulator(BLOCK_N))
        step = (2 * count + GROUP) * steps
        mbarrier.wait(turn.index(GROUP), (count & 1) ^ (1 - GROUP))
        for k in range(steps):
            slot = step % SLOTS
            mbarrier.wait(full.index(slot), step // SLOTS & 1)
            b = b_slots.index(slot)
            if TRANSPOSED:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a_slots.index(slot), b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS), count=1)
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
        if tensors[0] is not None:
            mbarrier.wait(ready.index(GROUP), count & 1)
        for i in gl.static_range(PARTS):
            y = columns_part(acc, i, PARTS)
            finish_part(
                y, i, GROUP, tile_m, row, col, M, N, rows_per_sample, parts, spare, tensors, vectors, ACTIVATION
            )
        if tensors[0] is not None:
            tma.store_wait(0)
            mbarrier.arrive(taken.index(GROUP), count=1)
        count += 1
    tma.store_wait(0)


@gluon.jit
def take_turns(
    a, b, tensors, vectors, M, N, K, rows_per_sample, TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """Start the partitions. tensors: what the epilogue reads by TMA, or None; its first result; its second, or None."""
    read, out, second = tensors
    a_slots = gl.allocate_shared_memory(a.dtype, [SLOTS, BLOCK_M, BLOCK_K], a.layout)
    b_slots = gl.allocate_shared_memory(b.dtype, [SLOTS, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    parts = gl.allocate_shared_memory(out.dtype, [2 * PARTS, BLOCK_M, PART], out.layout)
    spare = parts
    if second is not None:
        spare = gl.allocate_shared_memory(out.dtype, [2, BLOCK_M, PART], out.layout)
    turns = new_barriers(2, 1)
    barriers = new_barriers(SLOTS, 1), new_barriers(SLOTS, 1), new_barriers(2, 1), new_barriers(2, 1), turns
    fence_async_shared()
    memory = a_slots, b_slots, parts, spare
    gl.warp_specialize([
        (compute, (0, tensors, vectors, memory, barriers, M, N, K, rows_per_sample, TRANSPOSED, ACTIVATION)),
        (compute, (1, tensors, vectors, memory, barriers, M, N, K, rows_per_sample, TRANSPOSED, ACTIVATION)),
        (copy, (a, b, read, memory, barriers, M, N, K, TRANSPOSED)),
    ], [4, 1], [240, 24])  # fmt: skip


NUMBERS = ["M", "K", "rows_per_sample", "stride_xm", "stride_wn", "stride_rm"]  # of whose values nothing is gained


@gluon.jit(do_not_specialize=NUMBERS, launch_metadata=_profiling.matmul("x"))
def linear_fwd_hopper_kernel(
    # inputs; without _ptr: descriptors
    x, w,  # [M, K] and [N, K] T
    bias_ptr, layer_scale_ptr,  # [N] or None
    row_scale_ptr,  # [M / rows_per_sample] or None
    residual,  # [M, N] T or None
    # outputs
    out,  # [M, N] T
    pre,  # [M, N] T or None, as is the residual: the activation's input
    # sizes; the strides are in the descriptors
    M, N, K, rows_per_sample, stride_xm, stride_wn, stride_rm,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """A persistent grid of a program an SM."""
    vectors = bias_ptr, layer_scale_ptr, row_scale_ptr, None
    take_turns(x, w, (residual, out, pre), vectors, M, N, K, rows_per_sample, True, ACTIVATION)


@gluon.jit(do_not_specialize=NUMBERS, launch_metadata=_profiling.matmul("dy"))
def linear_dact_hopper_kernel(
    dy, w, pre,  # descriptors of [M, K], [K, N] and [M, N] T
    dpre, h,  # descriptors of [M, N] T
    partial_ptr,  # [row tiles, N] f32: dbias
    M, N, K, stride_xm, stride_wn, stride_rm,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Grid as in linear_fwd_hopper_kernel."""
    take_turns(dy, w, (pre, dpre, h), (None, None, None, partial_ptr), M, N, K, 1, False, ACTIVATION)
