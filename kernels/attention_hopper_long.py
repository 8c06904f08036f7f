"""attention.py's forward pass for Hopper, in Gluon, with the schedule of FlashAttention-3 (Shah et al. 2024).

Programs stay, and take one tile of queries after another. Their warps have different work:

    a warp copies        the tile's queries, and tiles of keys and values into a ring of slots, by TMA
    GROUPS groups        of four warps have 64 of the queries each. Each issues its scores and the product with the last
                         values, lets the next group do so, and computes its exponentials meanwhile

The last tile of keys comes first, in one part or two of little padding, so the loop has no mask. Barriers:

    q_full, q_empty                    the tile of queries is there; all groups are done with it
    k_full, k_empty, v_full, v_empty   for each slot: the same
    turn                               for each group: the one before has issued its products
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


@gluon.jit
def copy(q, k, v, memory, bars, N, H, work, tiles):
    """The warp that copies."""
    q_bufs, k_bufs, v_bufs, _out_bufs = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _turn = bars
    GROUPS: gl.constexpr = q_bufs.shape[0]
    SLOTS: gl.constexpr = k_bufs.shape[0]
    BLOCK_N: gl.constexpr = k_bufs.shape[1]
    others = (N - 1) // BLOCK_N
    count = 0
    round = 0
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        b = item // tiles // H
        h = item // tiles % H
        mbarrier.wait(q_empty.index(0), (round & 1) ^ 1)
        mbarrier.expect(q_full.index(0), GROUPS * q.block_type.nbytes)
        for i in gl.static_range(GROUPS):
            load_tile(q, [b, h, (item % tiles * GROUPS + i) * ROWS, 0], q_full.index(0), q_bufs.index(i))
        for j in range(others + 1):
            row = (j + others) % (others + 1) * BLOCK_N
            slot = count % SLOTS
            parity = (count // SLOTS & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), parity)
            mbarrier.expect(k_full.index(slot), k.block_type.nbytes)
            load_tile(k, [b, h, row, 0], k_full.index(slot), k_bufs.index(slot))
            mbarrier.wait(v_empty.index(slot), parity)
            mbarrier.expect(v_full.index(slot), v.block_type.nbytes)
            load_tile(v, [b, h, row, 0], v_full.index(slot), v_bufs.index(slot))
            count += 1
        round += 1


@gluon.jit
def parts_of(buffer, TAIL_0: gl.constexpr, TAIL_1: gl.constexpr):
    """The rows that the last tile of keys fills, in one part or two."""
    if TAIL_1 > 0:
        return buffer.slice(0, TAIL_0), buffer.slice(TAIL_0, TAIL_1)
    else:
        return (buffer.slice(0, TAIL_0),)


@gluon.jit
def step(
    q, p, values, acc, top, total, memory, bars, count, turns, scale2, GROUP: gl.constexpr, FIRST: gl.constexpr
):  # fmt: skip
    """Scores of a tile of keys, and the product of P and the values of the tile before, in parts, which runs while the
    exponentials are computed. FIRST: there is no sum of products yet."""
    _q_bufs, k_bufs, _v_bufs, out_bufs = memory
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    GROUPS: gl.constexpr = out_bufs.shape[0]
    SLOTS: gl.constexpr = k_bufs.shape[0]
    HEAD_DIM: gl.constexpr = k_bufs.shape[2]
    slot = count % SLOTS
    before = (count - 1) % SLOTS
    mbarrier.wait(k_full.index(slot), count // SLOTS & 1)
    mbarrier.wait(turn.index(GROUP), turns & 1)
    scores = multiply(q, (k_bufs.index(slot),))[0]
    mbarrier.wait(v_full.index(before), (count - 1) // SLOTS & 1)
    if FIRST:
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))
    for i in gl.static_range(len(p)):
        acc = warpgroup_mma(p[i], values[i], acc, use_acc=not FIRST or i > 0, is_async=True)
    mbarrier.arrive(turn.index((GROUP + 1) % GROUPS), count=1)
    scores = warpgroup_mma_wait(len(p), deps=(scores,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    larger = gl.maximum(top, maxima((scores,), HEAD_DIM) * scale2)
    sums, p_next = exponentials(scores, larger, scale2, k_bufs.dtype, HEAD_DIM)
    rescale = gl.exp2(top - larger)
    total = total * rescale + sums
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(before), count=1)
    return p_next, acc * rescale[:, None], larger, total


@gluon.jit
def attend(
    out, lse_ptr, memory, bars, count, turns, head, row, N, H, scale2,
    GROUP: gl.constexpr, TAIL_0: gl.constexpr, TAIL_1: gl.constexpr,
):  # fmt: skip
    """Compute 64 queries of one head over all keys."""
    q_bufs, k_bufs, v_bufs, out_bufs = memory
    _q_full, q_empty, k_full, k_empty, v_full, v_empty, _turn = bars
    SLOTS: gl.constexpr = k_bufs.shape[0]
    BLOCK_N: gl.constexpr = k_bufs.shape[1]
    HEAD_DIM: gl.constexpr = k_bufs.shape[2]
    T: gl.constexpr = k_bufs.dtype
    q = q_bufs.index(GROUP)
    others = (N - 1) // BLOCK_N
    slot = count % SLOTS
    mbarrier.wait(k_full.index(slot), count // SLOTS & 1)
    scores = wait_for(multiply(q, parts_of(k_bufs.index(slot), TAIL_0, TAIL_1)))
    mbarrier.arrive(k_empty.index(slot), count=1)
    scores = hide(scores, others * BLOCK_N, N)
    top = maxima(scores, HEAD_DIM) * scale2
    total, p = exponentials(scores[0], top, scale2, T, HEAD_DIM)
    operands = (p,)
    if TAIL_1 > 0:
        sums, p = exponentials(scores[1], top, scale2, T, HEAD_DIM)
        total += sums
        operands = operands + (p,)
    values = parts_of(v_bufs.index(slot), TAIL_0, TAIL_1)
    count += 1
    p, acc, top, total = step(q, operands, values, 0, top, total, memory, bars, count, turns, scale2, GROUP, True)
    for j in range(1, others):
        before = (v_bufs.index(count % SLOTS),)
        count += 1
        p, acc, top, total = step(
            q, (p,), before, acc, top, total, memory, bars, count, turns + j, scale2, GROUP, False
        )  # fmt: skip
    mbarrier.arrive(q_empty.index(0), count=1)
    slot = count % SLOTS
    mbarrier.wait(v_full.index(slot), count // SLOTS & 1)
    acc = warpgroup_mma(p, v_bufs.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(slot), count=1)
    tma.store_wait(0)  # the group's last results have left the buffer
    finish(acc, top, total, out, out_bufs.index(GROUP), lse_ptr, head, row, N, H)


@gluon.jit
def stand_by(memory, bars, count, turns, others, GROUP: gl.constexpr):
    """Take part in a tile's protocol without queries."""
    _q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    GROUPS: gl.constexpr = memory[0].shape[0]
    SLOTS: gl.constexpr = memory[1].shape[0]
    mbarrier.arrive(q_empty.index(0), count=1)
    for j in range(others + 1):
        slot = (count + j) % SLOTS
        parity = (count + j) // SLOTS & 1
        mbarrier.wait(turn.index(GROUP), (turns + j - 1) & 1, pred=j > 0)
        mbarrier.arrive(turn.index((GROUP + 1) % GROUPS), count=1, pred=j > 0)
        mbarrier.wait(k_full.index(slot), parity)
        mbarrier.arrive(k_empty.index(slot), count=1)
        mbarrier.wait(v_full.index(slot), parity)
        mbarrier.arrive(v_empty.index(slot), count=1)


@gluon.jit
def compute(
    GROUP: gl.constexpr, out, lse_ptr, memory, bars, N, H, work, tiles, scale2, TAIL_0: gl.constexpr,
    TAIL_1: gl.constexpr,
):  # fmt: skip
    """A group of four warps: 64 queries of each of the program's tiles, if there are so many."""
    q_full = bars[0]
    GROUPS: gl.constexpr = memory[0].shape[0]
    others = (N - 1) // memory[1].shape[1]
    count = 0
    turns = 0
    round = 0
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        mbarrier.wait(q_full.index(0), round & 1)
        row = (item % tiles * GROUPS + GROUP) * ROWS
        if row < N:
            attend(out, lse_ptr, memory, bars, count, turns, item // tiles, row, N, H, scale2, GROUP, TAIL_0, TAIL_1)
        else:
            stand_by(memory, bars, count, turns, others, GROUP)
        count += others + 1
        turns += others
        round += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "work", "tiles"], launch_metadata=_profiling.attention(2, "q"))
def attention_fwd_long_hopper_kernel(
    # Names without _ptr are TMA descriptors. inputs
    q, k, v,  # [B, H, N, d] T by stride
    mask_ptr, cu_seqlens_ptr, cu_seqlens_k_ptr, seed_ptr,  # None: the tensors are those of attention_fwd_kernel
    # outputs
    out,  # [B, H, N, d] T by stride
    lse_ptr,  # [B, H, N] f32
    # sizes; N is larger than a tile of keys. work: tiles of queries of all heads; tiles: of one head
    N, H, work, tiles,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    scale: gl.float32,  # > 0
    HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, TAIL_0: gl.constexpr, TAIL_1: gl.constexpr,
):  # fmt: skip
    """A persistent grid of a program an SM. TAIL_0, TAIL_1: parts of the last tile of keys; 0 for none."""
    gl.static_assert(q.block_type.shape[3] == HEAD_DIM)
    memory = buffers(q, GROUPS), buffers(k, SLOTS), buffers(v, SLOTS), buffers(out, GROUPS)
    turn = barriers(GROUPS, 1)
    bars = (
        barriers(1, 1), barriers(1, GROUPS), barriers(SLOTS, 1), barriers(SLOTS, GROUPS),
        barriers(SLOTS, 1), barriers(SLOTS, GROUPS), turn,
    )  # fmt: skip
    fence_async_shared()
    mbarrier.arrive(turn.index(0), count=1)
    scale2 = scale * log2e()
    if GROUPS == 2:  # written out: constexprs of a list in a variable would become tensors
        gl.warp_specialize([
            (compute, (0, out, lse_ptr, memory, bars, N, H, work, tiles, scale2, TAIL_0, TAIL_1)),
            (compute, (1, out, lse_ptr, memory, bars, N, H, work, tiles, scale2, TAIL_0, TAIL_1)),
            (copy, (q, k, v, memory, bars, N, H, work, tiles)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute, (0, out, lse_ptr, memory, bars, N, H, work, tiles, scale2, TAIL_0, TAIL_1)),
            (compute, (1, out, lse_ptr, memory, bars, N, H, work, tiles, scale2, TAIL_0, TAIL_1)),
            (compute, (2, out, lse_ptr, memory, bars, N, H, work, tiles, scale2, TAIL_0, TAIL_1)),
            (copy, (q, k, v, memory, bars, N, H, work, tiles)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
