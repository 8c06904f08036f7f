"""Attention in one short Triton kernel, to read before kernels/attention.py. On a CPU, in Triton's interpreter:

    TRITON_INTERPRET=1 python benchmarks/examples/attention_kernel.py

    S = scale * Q K^T,   P = softmax(S),   O = P V      for each head; Q, K, V, O: [N, d]

A program owns a tile of queries and loops over tiles of keys, so the N x N matrix S is never in memory. The softmax is
online: next to the output it keeps the maximum m of the scores so far and the sum of exp(S - m). A tile that raises m
multiplies both by exp(old m - new m); dividing by the sum comes last. exp(x) is exp2(x * log2 e), because a GPU has an
instruction for exp2; log2 e goes into the scale. Only the last tile of keys has a mask: its missing keys get a score of
minus infinity. Matmuls accumulate in float32. Prints the largest difference from PyTorch; exit status 1 if over 1e-5.
"""

# mypy: disable-error-code="no-untyped-def"

import signal
import sys

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention


@triton.jit
def _add_keys(out, m, total, q, k_ptr, v_ptr, start, N, scale, d: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr):
    keys = start + tl.arange(0, KEYS)  # [KEYS]
    at = keys[:, None] * d + tl.arange(0, d)[None, :]  # [KEYS, d]
    if TAIL:
        mask = (keys < N)[:, None]
        k, v = tl.load(k_ptr + at, mask=mask, other=0.0), tl.load(v_ptr + at, mask=mask, other=0.0)
    else:
        k, v = tl.load(k_ptr + at), tl.load(v_ptr + at)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)  # [QUERIES, KEYS], in base 2
    if TAIL:
        s = tl.where((keys < N)[None, :], s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))  # [QUERIES]; finite, since every tile has a key
    p = tl.exp2(s - new[:, None])
    old = tl.exp2(m - new)  # 0 for the first tile, where m is minus infinity
    out = tl.dot(p.to(v.dtype), v, out * old[:, None], input_precision="ieee")
    return out, new, total * old + tl.sum(p, 1)


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, o_ptr, N, scale, d: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """q_ptr, k_ptr, v_ptr, o_ptr: [heads, N, d], contiguous. Grid: (tiles of queries, heads)."""
    first = tl.program_id(1).to(tl.int64) * N * d  # element at which the head begins
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    at, exist = first + rows[:, None] * d + tl.arange(0, d)[None, :], (rows < N)[:, None]
    q = tl.load(q_ptr + at, mask=exist, other=0.0)
    m, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, d], tl.float32)
    full = N // KEYS * KEYS
    for start in range(0, full, KEYS):
        out, m, total = _add_keys(out, m, total, q, k_ptr + first, v_ptr + first, start, N, scale, d, KEYS, False)
    if full < N:
        out, m, total = _add_keys(out, m, total, q, k_ptr + first, v_ptr + first, full, N, scale, d, KEYS, True)
    tl.store(o_ptr + at, (out / total[:, None]).to(o_ptr.dtype.element_ty), mask=exist)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: int = 64, keys: int = 32) -> torch.Tensor:
    """Compute attention of contiguous (B, H, N, d); d is a power of two, at least 16."""
    B, H, N, d = q.shape
    out = torch.empty_like(q)
    attention_kernel[triton.cdiv(N, queries), B * H](q, k, v, out, N, d**-0.5, d, queries, keys)
    return out


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not triton.knobs.runtime.interpret:
        sys.exit("without a GPU, Triton's interpreter is needed: set TRITON_INTERPRET=1")
    errors = []
    for N in (1, 32, 50, 197):  # 197: the tokens of a ViT of 224 px and patches of 16
        q, k, v = torch.randn(3, 2, 3, N, 64, device=device)
        errors.append((attention(q, k, v) - scaled_dot_product_attention(q, k, v)).abs().max().item())
        print(f"B2 H3 N{N} d64, float32: largest difference {errors[-1]:.1e}")
    return int(not all(error <= 1e-5 for error in errors))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly where `| head` has read enough
    sys.exit(main())
