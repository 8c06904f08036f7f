"""Attention's backward pass for Hopper, where a head fits in shared memory, in Gluon. Equations and conventions:
attention_bwd_dq.py.

A program computes all gradients of a head, every product once, and then takes another head. Keys come in rounds of 128,
queries in tiles of 64, after which there may be a narrow one (tail). The warps have different work:

    a warp copies       by TMA: keys and values of a round, q and dO of a head, as soon as there is room
    two groups          of four warps own 64 keys of a round each, and go over the tiles of queries (keys_tile)
    a group             of four warps keeps dQ of all queries in registers (queries_tile); meanwhile it computes delta
                        of the next head

The groups with keys compute the transposes of S, P, dP and dS: as left operands P and dS need not leave the registers.
dS also goes to the group with dQ, by one of two slots of shared memory; the tail's has its own. Results leave by TMA.
The order of every sum is fixed. Barriers:

    q_full, q_empty      a tile of q and dO has arrived; both groups with keys are done with it
    kv_full, kv_empty    keys and values of a round have arrived; all three groups are done with them
    stats                LSE and delta of a head are in their slot, which is free again when all dS have come
    ds_full, ds_empty    both groups have stored dS of a tile; its product is done. The last ones are the tail's.
"""

from collections import namedtuple

import triton.language as tl
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
from fastvit.kernels._hopper import accumulator, barriers, load_tile, reinterpret, store_tile
from fastvit.kernels._softmax import NOT_SPECIALIZED, log2e
from fastvit.kernels._softmax_hopper import ROWS, buffers

UNIT = gl.constexpr(8)  # elements of 16 bytes
KEYS = gl.constexpr(128)  # of a round
SLOTS = gl.constexpr(2)
MOST_TILES = gl.constexpr(4)
# Shared memory. q, do, dq: [FULL, ROWS, d], of the tail [1, WIDTH, d]; k, v: [SLOTS, KEYS, d]; dkdv: [4, ROWS, d], dV
# and dK of each group; ds: the transpose, [SLOTS, KEYS, ROWS], of the tail [1, KEYS, WIDTH]; lse (times log2 e), delta:
# [SLOTS * MOST_TILES, ROWS] f32
Shared = namedtuple("Shared", "q q_tail do do_tail k v dq dq_tail dkdv ds ds_tail lse delta")
Barriers = namedtuple("Barriers", "q_full q_empty kv_full kv_empty stats ds_full ds_empty")


@gluon.jit
def copy_two(one, other, position, full, buffer, other_buffer):
    mbarrier.expect(full, one.block_type.nbytes + other.block_type.nbytes)
    load_tile(one, position, full, buffer)
    load_tile(other, position, full, other_buffer)


@gluon.jit
def copy(q, q_tail, do, do_tail, k, v, shared, bars, sizes, FULL: gl.constexpr, TAIL: gl.constexpr):
    """The warp that copies."""
    ROUNDS: gl.constexpr = (FULL + TAIL + 1) // 2
    _N, H, heads, _scale = sizes
    step = 0
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        b = head // H
        h = head % H
        parity = (step & 1) ^ 1
        for r in gl.static_range(ROUNDS):
            turn = step * ROUNDS + r
            slot = turn % SLOTS
            mbarrier.wait(bars.kv_empty.index(slot), (turn // SLOTS & 1) ^ 1)
            copy_two(k, v, [b, h, KEYS * r, 0], bars.kv_full.index(slot), shared.k.index(slot), shared.v.index(slot))
            if r == 0:
                for i in gl.static_range(FULL + TAIL):
                    row = [b, h, ROWS * i, 0]
                    full = bars.q_full.index(i)
                    mbarrier.wait(bars.q_empty.index(i), parity)
                    if i < FULL:
                        copy_two(q, do, row, full, shared.q.index(i), shared.do.index(i))
                    else:
                        copy_two(q_tail, do_tail, row, full, shared.q_tail.index(0), shared.do_tail.index(0))
        step += 1


@gluon.jit
def keys_tile(dk, dv, k, v, q, do, lse, delta, ds, ds_full, ds_empty, ds_parity, scale2):
    """Add a tile of queries to dK and dV of the group's keys.

    dV waits for dS, although P is there before: issued at once, it took more registers and more time. None is in flight
    at the end: ptxas serialises all products if a loop carries one whose left operand is in registers."""
    WIDTH: gl.constexpr = q.shape[0]
    layout: gl.constexpr = accumulator(WIDTH)
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator(q.shape[1]), 2)
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse = lse.load(gl.SliceLayout(0, layout))
    s = warpgroup_mma_wait(1, deps=(s,))
    # At most 0 but for rounding, and for keys after the last, which are zeros: their exp may be inf, and inf * 0 NaN
    exponent = tl.minimum(s * scale2 - lse[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
    p = gl.exp2(exponent)
    delta = delta.load(gl.SliceLayout(0, layout))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    grad = (p * (dp - delta[None, :])).to(q.dtype)
    dv = warpgroup_mma(gl.convert_layout(p.to(q.dtype), operand), do, dv, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(grad, operand), q, dk, is_async=True)
    mbarrier.wait(ds_empty, ds_parity)
    ds.store(grad)
    fence_async_shared()
    mbarrier.arrive(ds_full, count=1)
    return warpgroup_mma_wait(0, deps=(dk, dv))


@gluon.jit
def keys_group(GROUP: gl.constexpr, dk_desc, dv_desc, shared, bars, sizes, FULL: gl.constexpr, TAIL: gl.constexpr):
    """Four warps with ROWS keys of each round."""
    ROUNDS: gl.constexpr = (FULL + TAIL + 1) // 2
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    WIDTH: gl.constexpr = shared.q_tail.shape[1]
    FIRST: gl.constexpr = ROWS * GROUP
    _N, H, heads, scale = sizes
    scale2 = scale * log2e()
    dk_buf = shared.dkdv.index(2 * GROUP + 1)
    dv_buf = shared.dkdv.index(2 * GROUP)
    step = 0
    count = 0  # of whole tiles
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        parity = step & 1
        row = MOST_TILES * parity
        mbarrier.wait(bars.stats.index(parity), step // SLOTS & 1)
        for r in range(ROUNDS):
            is_last = r == ROUNDS - 1
            turn = step * ROUNDS + r
            slot = turn % SLOTS
            first = KEYS * r + FIRST
            k = shared.k.index(slot).slice(FIRST, ROWS)
            v = shared.v.index(slot).slice(FIRST, ROWS)
            mbarrier.wait(bars.kv_full.index(slot), turn // SLOTS & 1)
            dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))
            dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))
            for i in range(FULL):
                ds_slot = count % SLOTS
                mbarrier.wait(bars.q_full.index(i), parity)
                dk, dv = keys_tile(
                    dk, dv, k, v, shared.q.index(i), shared.do.index(i), shared.lse.index(row + i),
                    shared.delta.index(row + i), shared.ds.index(ds_slot).slice(FIRST, ROWS),
                    bars.ds_full.index(ds_slot), bars.ds_empty.index(ds_slot), (count // SLOTS & 1) ^ 1, scale2,
                )  # fmt: skip
                mbarrier.arrive(bars.q_empty.index(i), count=1, pred=is_last)
                count += 1
            if TAIL:
                mbarrier.wait(bars.q_full.index(FULL), parity)
                dk, dv = keys_tile(
                    dk, dv, k, v, shared.q_tail.index(0), shared.do_tail.index(0),
                    shared.lse.index(row + FULL).slice(0, WIDTH), shared.delta.index(row + FULL).slice(0, WIDTH),
                    shared.ds_tail.index(0).slice(FIRST, ROWS), bars.ds_full.index(SLOTS), bars.ds_empty.index(SLOTS),
                    (turn & 1) ^ 1, scale2,
                )  # fmt: skip
                mbarrier.arrive(bars.q_empty.index(FULL), count=1, pred=is_last)
            mbarrier.arrive(bars.kv_empty.index(slot), count=1)
            tma.store_wait(0)  # the results of the round before
            dv_buf.store(dv.to(dv_buf.dtype))
            dk_buf.store((dk * scale).to(dk_buf.dtype))
            fence_async_shared()
            store_tile(dv_desc, [head // H, head % H, first, 0], dv_buf)
            store_tile(dk_desc, [head // H, head % H, first, 0], dk_buf)
        step += 1
    tma.store_wait(0)


@gluon.jit
def load_rows(x, head, first, n: gl.constexpr, HEAD_DIM: gl.constexpr, sizes):
    """Load n rows of O and dO, and their LSE: inf for queries that do not exist, so that their P is 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, UNIT], [4, 8], [4, 1], [1, 0])
    o_ptr, stride_ob, stride_on, stride_oh, do_ptr, stride_dob, stride_don, stride_doh, lse_ptr = x
    N, H, _heads, _scale = sizes
    b = (head // H).to(gl.int64)
    h = head % H
    rows = first + gl.arange(0, n, gl.SliceLayout(1, layout))
    columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))[None, :]
    exist = rows < N
    o_at = (b * stride_ob + h * stride_oh) * UNIT + (rows * stride_on)[:, None] * UNIT + columns
    do_at = (b * stride_dob + h * stride_doh) * UNIT + (rows * stride_don)[:, None] * UNIT + columns
    o = gl.load(o_ptr + o_at, mask=exist[:, None], other=0.0)
    do = gl.load(do_ptr + do_at, mask=exist[:, None], other=0.0)
    return o, do, gl.load(lse_ptr + head.to(gl.int64) * N + rows, mask=exist, other=float("inf"))


@gluon.jit
def load_part(x, head, part, PARTS: gl.constexpr, n: gl.constexpr, HEAD_DIM: gl.constexpr, sizes):
    """Load rows of the next head; part PARTS is the first of the one after. After the last head nothing needs them."""
    head = gl.minimum(head + (1 + part // PARTS) * gl.num_programs(0), sizes[2] - 1)
    return load_rows(x, head, part % PARTS * n, n, HEAD_DIM, sizes)


@gluon.jit
def store_stats(loaded, lse, delta):
    o, do, natural = loaded
    delta.store(gl.sum(o.to(gl.float32) * do.to(gl.float32), 1))
    lse.store(natural * log2e())


@gluon.jit
def queries_tile(dq, ds, k, ds_full, ds_empty, parity, loaded, lse, delta, x, head, part, PARTS: gl.constexpr, sizes):
    """Add the keys of a round to dQ of a tile, or to its transpose if it is the tail: wgmma takes 64 rows. Meanwhile
    store LSE and delta of those rows of the next head that have been loaded, and load others."""
    mbarrier.wait(ds_full, parity)
    if ds.shape[1] == ROWS:
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, is_async=True)
    else:
        dq = warpgroup_mma(k.permute((1, 0)), ds, dq, is_async=True)
    store_stats(loaded, lse, delta)
    loaded = load_part(x, head, part + 1, PARTS, lse.shape[0], k.shape[1], sizes)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(ds_empty, count=1)
    return dq, loaded


@gluon.jit
def in_rows(buffer, n: gl.constexpr):
    return reinterpret(buffer, gl.float32, [SLOTS * MOST_TILES * ROWS // n, n], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def queries_group(dq_desc, tail_desc, x, shared, bars, sizes, FULL: gl.constexpr, TAIL: gl.constexpr):
    """Four warps with dQ of all queries."""
    TILES: gl.constexpr = FULL + TAIL
    ROUNDS: gl.constexpr = (TILES + 1) // 2
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    WIDTH: gl.constexpr = shared.q_tail.shape[1]
    PARTS: gl.constexpr = ROUNDS * TILES  # of the next head: one for each product
    PART: gl.constexpr = ROWS // ROUNDS
    WHOLE: gl.constexpr = KEYS * ROUNDS
    _N, H, heads, scale = sizes
    lse = in_rows(shared.lse, PART)
    delta = in_rows(shared.delta, PART)
    start = gl.program_id(0)
    loaded = load_rows(x, start, 0, WHOLE, HEAD_DIM, sizes)  # of the first head, all at once
    store_stats(loaded, in_rows(shared.lse, WHOLE).index(0), in_rows(shared.delta, WHOLE).index(0))
    loaded = load_part(x, start, 0, PARTS, PART, HEAD_DIM, sizes)
    mbarrier.arrive(bars.stats.index(0), count=1)
    step = 0
    count = 0  # of whole tiles
    for head in range(start, heads, gl.num_programs(0)):
        next_slot = (step + 1) & 1
        dq = ()
        for _i in gl.static_range(FULL):
            dq = dq + (gl.zeros([ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM)),)
        if TAIL:
            dq = dq + (gl.zeros([HEAD_DIM, WIDTH], gl.float32, accumulator(WIDTH)),)
        for r in range(ROUNDS):
            turn = step * ROUNDS + r
            slot = turn % SLOTS
            mbarrier.wait(bars.kv_full.index(slot), turn // SLOTS & 1)
            k = shared.k.index(slot)
            sums = ()
            for i in gl.static_range(TILES):
                part = r * TILES + i
                row = next_slot * MOST_TILES * ROUNDS + part
                if i < FULL:
                    ds_slot = (count + i) % SLOTS
                    ds = shared.ds.index(ds_slot)
                    parity = (count + i) // SLOTS & 1
                else:
                    ds_slot = SLOTS
                    ds = shared.ds_tail.index(0)
                    parity = turn & 1
                total, loaded = queries_tile(
                    dq[i], ds, k, bars.ds_full.index(ds_slot), bars.ds_empty.index(ds_slot), parity, loaded,
                    lse.index(row), delta.index(row), x, head, part, PARTS, sizes,
                )  # fmt: skip
                sums = sums + (total,)
            dq = sums
            count += FULL
            mbarrier.arrive(bars.kv_empty.index(slot), count=1)
        mbarrier.arrive(bars.stats.index(next_slot), count=1)
        tma.store_wait(0)  # the results of the head before
        for i in gl.static_range(FULL):
            shared.dq.index(i).store((dq[i] * scale).to(shared.dq.dtype))
        if TAIL:
            shared.dq_tail.index(0).permute((1, 0)).store((dq[FULL] * scale).to(shared.dq.dtype))
        fence_async_shared()
        for i in gl.static_range(FULL):
            store_tile(dq_desc, [head // H, head % H, ROWS * i, 0], shared.dq.index(i))
        if TAIL:
            store_tile(tail_desc, [head // H, head % H, ROWS * FULL, 0], shared.dq_tail.index(0))
        step += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "heads"], launch_metadata=_profiling.attention(5, "q"))
def attention_bwd_hopper_kernel(
    # Names without _ptr are TMA descriptors; _tail: of the tail. inputs
    q, q_tail, k, v,  # [B, N, H, d] T by stride
    o_ptr, do, do_tail, do_ptr,  # [B, N, H, d] T by stride
    lse_ptr,  # [B, H, N] f32
    seed_ptr,  # None: the tensors are those of attention_bwd_short_kernel
    # outputs
    dq, dq_tail, dk, dv,  # [B, N, H, d] T by stride
    # sizes. heads: B H; strides in UNITs of elements, most of which are in the descriptors
    N, H, heads,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ob, stride_on, stride_oh, stride_dob, stride_don, stride_doh,
    stride_dqb, stride_dqn, stride_dqh, stride_dkb, stride_dkn, stride_dkh, stride_dvb, stride_dvn, stride_dvh,
    scale: gl.float32,  # > 0
    FULL: gl.constexpr,  # whole tiles of queries
    TAIL: gl.constexpr,  # whether there is a narrow one
    REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr,  # of a thread with keys, and with dQ
):  # fmt: skip
    """A persistent grid of a program an SM."""
    T: gl.constexpr = q.dtype
    WIDTH: gl.constexpr = q_tail.block_type.shape[2]
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = Shared(
        buffers(q, FULL), buffers(q_tail, 1), buffers(do, FULL), buffers(do_tail, 1), buffers(k, SLOTS),
        buffers(v, SLOTS), buffers(dq, FULL), buffers(dq_tail, 1), buffers(dk, 4),
        gl.allocate_shared_memory(T, [SLOTS, KEYS, ROWS], gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], T)),
        gl.allocate_shared_memory(T, [1, KEYS, WIDTH], gl.NVMMASharedLayout.get_default_for([KEYS, WIDTH], T)),
        gl.allocate_shared_memory(gl.float32, [SLOTS * MOST_TILES, ROWS], vector),
        gl.allocate_shared_memory(gl.float32, [SLOTS * MOST_TILES, ROWS], vector),
    )  # fmt: skip
    bars = Barriers(
        barriers(FULL + TAIL, 1), barriers(FULL + TAIL, 2), barriers(SLOTS, 1), barriers(SLOTS, 3), barriers(SLOTS, 1),
        barriers(SLOTS + 1, 2), barriers(SLOTS + 1, 1),
    )  # fmt: skip
    fence_async_shared()
    sizes = N, H, heads, scale
    x = o_ptr, stride_ob, stride_on, stride_oh, do_ptr, stride_dob, stride_don, stride_doh, lse_ptr
    gl.warp_specialize([
        (keys_group, (0, dk, dv, shared, bars, sizes, FULL, TAIL)),
        (keys_group, (1, dk, dv, shared, bars, sizes, FULL, TAIL)),
        (queries_group, (dq, dq_tail, x, shared, bars, sizes, FULL, TAIL)),
        (copy, (q, q_tail, do, do_tail, k, v, shared, bars, sizes, FULL, TAIL)),
    ], [4, 4, 1], [REGISTERS, DQ_REGISTERS, 24])  # fmt: skip
