"""Device functions that the attention kernels for Hopper share, in Gluon. The equations are those of attention.py.

A group of four warps computes ROWS queries of a head. Tensors in registers have powers of two as sizes, so keys come in
parts of 16 to 128, each with a tensor of scores. TMA fills rows after the last key with zeros, whatever the next sample
holds, and `hide` excludes them. scale2: the softmax's scale times log2 e.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastvit.kernels._hopper import accumulator, store_tile
from fastvit.kernels._softmax import ln2

ROWS = gl.constexpr(64)


@gluon.jit
def buffers(desc, n: gl.constexpr):
    """Allocate n buffers for what a copy by `desc` takes: rows [R, d] of a head."""
    rows: gl.constexpr = desc.block_type.shape[2]
    columns: gl.constexpr = desc.block_type.shape[3]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [n, rows, columns], layout)


@gluon.jit
def _multiply(q, k):
    W: gl.constexpr = k.shape[0]
    zeros = gl.zeros([ROWS, W], gl.float32, accumulator(W))
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def multiply(q, keys):
    """Issue q K^T for each part of the keys, [W, d]. q: [ROWS, d]."""
    scores = ()
    for i in gl.static_range(len(keys)):
        scores = scores + (_multiply(q, keys[i]),)
    return scores


@gluon.jit
def wait_for(scores):
    """Wait until all products are done."""
    if len(scores) == 1:
        return (warpgroup_mma_wait(0, deps=scores),)
    else:
        return warpgroup_mma_wait(0, deps=scores)


@gluon.jit
def _hide(s, first, N):
    keys = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where((keys < N)[None, :], s, float("-inf"))


@gluon.jit
def hide(scores, first, N):
    """Exclude what is after the last key, which only the last part may hold. first: index of the first key of all."""
    for i in gl.static_range(len(scores) - 1):
        first += scores[i].shape[1]
    return scores[:-1] + (_hide(scores[-1], first, N),)


@gluon.jit
def maxima(scores, HEAD_DIM: gl.constexpr):
    """Maximum of each row."""
    rows: gl.constexpr = gl.SliceLayout(1, accumulator(HEAD_DIM))
    m = gl.convert_layout(gl.max(scores[0], 1), rows)
    for i in gl.static_range(1, len(scores)):
        m = gl.maximum(m, gl.convert_layout(gl.max(scores[i], 1), rows))
    return m


@gluon.jit
def exponentials(s, top, scale2, T: gl.constexpr, HEAD_DIM: gl.constexpr):
    """exp(S - maximum) of one part: its sums over the rows, and itself as a left operand. top: maxima times scale2."""
    layout: gl.constexpr = accumulator(HEAD_DIM)
    p = gl.exp2(s * scale2 - gl.convert_layout(top, gl.SliceLayout(1, s.type.layout))[:, None])
    sums = gl.convert_layout(gl.sum(p, 1), gl.SliceLayout(1, layout))
    return sums, gl.convert_layout(p.to(T), gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def finish(acc, top, total, out, buffer, lse_ptr, head, row, N, H):
    """Store acc / total through the buffer, and LSE."""
    buffer.store((acc * (1.0 / total)[:, None]).to(out.dtype))
    fence_async_shared()
    store_tile(out, [head // H, head % H, row, 0], buffer)
    rows = row + gl.arange(0, ROWS, total.type.layout)
    gl.store(lse_ptr + head.to(gl.int64) * N + rows, (top + gl.log2(total)) * ln2(), mask=rows < N)
