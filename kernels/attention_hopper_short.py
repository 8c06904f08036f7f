"""attention.py's forward pass for Hopper and short sequences, in Gluon: all keys of a head at once, no running maximum.

At these lengths nothing is full: a program would wait for its loads, then for its products, then for its exponentials.
So programs stay, take one head after another, and their warps have different work:

    a warp copies        q, k and v of the next head into the other of two slots, by TMA, while this one is computed
    two groups           of four warps take tiles of 64 queries in turn, across heads: one has its exponentials computed
                         while the tensor cores work for the other

A tile's results go through the tile's own queries, which are not needed any more. Barriers, each for a slot:

    k_full, v_full, q_full     the copies have arrived
    k_empty, v_empty           both groups are done with the head's keys, or values
    q_empty                    both groups' results have left the slot

and `turn`, one for each group: the other group has issued its scores.
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
from fastvit.kernels._hopper import accumulator, barriers, load_tile
from fastvit.kernels._softmax import NOT_SPECIALIZED, log2e
from fastvit.kernels._softmax_hopper import (
    ROWS,
    buffers,
    exponentials,
    finish,
    hide,
    maxima,
    multiply,
    wait_for,
)

SLOTS = gl.constexpr(2)


@gluon.jit
def slots_of(descs, PARTS: gl.constexpr):
    """Allocate the slots of each part of the keys or values."""
    found = ()
    for i in gl.static_range(PARTS):
        found = found + (buffers(descs[i], SLOTS),)
    return found


@gluon.jit
def in_slot(parts, slot):
    found = ()
    for i in gl.static_range(len(parts)):
        found = found + (parts[i].index(slot),)
    return found


@gluon.jit
def copy_parts(descs, parts, full, b, h):
    """Copy all keys, or values, of a head into a slot. full: a barrier that expects as many arrivals as parts."""
    row = 0
    for i in gl.static_range(len(parts)):
        mbarrier.expect(full, descs[i].block_type.nbytes)
        load_tile(descs[i], [b, h, row, 0], full, parts[i])
        row += parts[i].shape[0]


@gluon.jit
def copy(q, k, v, tiles, keys, values, bars, H, heads, TILES: gl.constexpr):
    """The warp that copies."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _turn = bars
    step = 0
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        slot = step % SLOTS
        parity = (step // SLOTS & 1) ^ 1
        b = head // H
        h = head % H
        mbarrier.wait(k_empty.index(slot), parity)
        copy_parts(k, in_slot(keys, slot), k_full.index(slot), b, h)
        mbarrier.wait(q_empty.index(slot), parity)
        mbarrier.expect(q_full.index(slot), TILES * q.block_type.nbytes)
        for i in gl.static_range(TILES):
            load_tile(q, [b, h, i * ROWS, 0], q_full.index(slot), tiles.index(slot * TILES + i))
        mbarrier.wait(v_empty.index(slot), parity)
        copy_parts(v, in_slot(values, slot), v_full.index(slot), b, h)
        step += 1


@gluon.jit
def attend(scores, values, top, scale2, T: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue P V, up to the rows' sums, part by part: one is multiplied while the exponentials of the next are computed.
    Return it and the sums."""
    total, p = exponentials(scores[0], top, scale2, T, HEAD_DIM)
    zeros = gl.zeros([ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))
    acc = warpgroup_mma(p, values[0], zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(scores)):
        sums, p = exponentials(scores[i], top, scale2, T, HEAD_DIM)
        acc = warpgroup_mma(p, values[i], acc, is_async=True)
        total += sums
    return acc, total


@gluon.jit
def compute(GROUP: gl.constexpr, out, lse_ptr, tiles, keys, values, bars, N, H, heads, scale2, TILES: gl.constexpr):
    """A group of four warps: every other tile of the program."""
    HEAD_DIM: gl.constexpr = tiles.shape[2]
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    for item in range(GROUP, gl.cdiv(heads - gl.program_id(0), gl.num_programs(0)) * TILES, 2):
        step = item // TILES
        slot = step % SLOTS
        parity = step // SLOTS & 1
        tile = item % TILES
        is_last = tile + 2 >= TILES  # of this group, with this head
        q = tiles.index(slot * TILES + tile)
        mbarrier.wait(k_full.index(slot), parity)
        mbarrier.wait(q_full.index(slot), parity)
        mbarrier.wait(turn.index(GROUP), (item // 2 & 1) ^ (1 - GROUP))
        scores = multiply(q, in_slot(keys, slot))
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
        scores = wait_for(scores)
        mbarrier.arrive(k_empty.index(slot), count=1, pred=is_last)
        tma.store_wait(0)  # the results of the group's last tile
        mbarrier.arrive(q_empty.index(1 - slot), count=1, pred=(tile < 2) & (step > 0))
        mbarrier.wait(v_full.index(slot), parity)
        scores = hide(scores, 0, N)
        top = maxima(scores, HEAD_DIM) * scale2
        acc, total = attend(scores, in_slot(values, slot), top, scale2, tiles.dtype, HEAD_DIM)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(slot), count=1, pred=is_last)
        head = gl.program_id(0) + step * gl.num_programs(0)
        finish(acc, top, total, out, q, lse_ptr, head, tile * ROWS, N, H)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "heads"], launch_metadata=_profiling.attention(2, "q"))
def attention_fwd_short_hopper_kernel(
    # Names without _ptr are TMA descriptors. inputs
    q,  # [B, H, N, d] T by stride
    k0, k1, k2, v0, v1, v2,  # [B, H, N, d] T by stride, for each part of the keys, or None
    mask_ptr, cu_seqlens_ptr, cu_seqlens_k_ptr, seed_ptr,  # None: the tensors are those of attention_fwd_kernel
    # outputs
    out,  # [B, H, N, d] T by stride
    lse_ptr,  # [B, H, N] f32
    # sizes. heads: B H; the strides are in the descriptors
    N, H, heads,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    scale: gl.float32,  # > 0
    HEAD_DIM: gl.constexpr,
    PARTS: gl.constexpr,  # of the keys
    TILES: gl.constexpr,  # of queries, at least 2
):  # fmt: skip
    """A persistent grid of a program an SM."""
    gl.static_assert(q.block_type.shape[3] == HEAD_DIM)
    tiles = buffers(q, SLOTS * TILES)
    k = k0, k1, k2
    v = v0, v1, v2
    keys = slots_of(k, PARTS)
    values = slots_of(v, PARTS)
    bars = (
        barriers(SLOTS, 1), barriers(SLOTS, 2), barriers(SLOTS, PARTS), barriers(SLOTS, 2),
        barriers(SLOTS, PARTS), barriers(SLOTS, 2), barriers(2, 1),
    )  # fmt: skip
    fence_async_shared()
    scale2 = scale * log2e()
    gl.warp_specialize([
        (compute, (0, out, lse_ptr, tiles, keys, values, bars, N, H, heads, scale2, TILES)),
        (compute, (1, out, lse_ptr, tiles, keys, values, bars, N, H, heads, scale2, TILES)),
        (copy, (q, k, v, tiles, keys, values, bars, H, heads, TILES)),
    ], [4, 1], [240, 24])  # fmt: skip
