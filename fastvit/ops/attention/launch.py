"""Launches the kernels of softmax attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.kernels import _attention_configs, _tuned
from fastvit.kernels._configs import register_limit
from fastvit.kernels.attention import attention_fwd_kernel
from fastvit.kernels.attention_bwd_dkdv import attention_bwd_dkdv_kernel
from fastvit.kernels.attention_bwd_dq import attention_bwd_dq_kernel
from fastvit.kernels.attention_bwd_short import attention_bwd_short_kernel
from fastvit.ops.attention.aten import gradients_of_one_key, is_added, lse_shape
from fastvit.ops.runtime import device
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.call import Call
from fastvit.ops.runtime.device import dot_precision
from fastvit.ops.runtime.launch import Constants, Launch, cdiv
from fastvit.ops.runtime.rows import contiguous, empty_like, unexpanded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_STRIDE = 1 << 22  # elements between two tokens, so that offsets within a tile fit 32 bits


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float,
    causal: bool = False, *, call: Call,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel. q (B, M, H, d), k and v (B, N, H or a divisor of it, d), one of float32, bfloat16,
    float16, are read by stride; mask (B or 1, H or 1, M or 1, N), bool or float, by stride, or None; seed int64 [1], or
    None without dropout; causal: query i sees keys 0 to i only.

    Return o (B, M, H, d), contiguous, and LSE (B, H, M) float32, natural logarithm; with a float mask (B, H, 2, M), the
    maximum of the scores and the sum of exp(scores - maximum). Raise `KernelUnsupported` for what kernels cannot take.
    """
    o, lse, launch, tensors = _forward(q, k, v, mask, seed, scale, dropout_p, causal, None, call)
    launch(*tensors)
    return o, lse


def attention_qkvpacked_fwd(
    qkv: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float, causal: bool = False,
    *, call: Call,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `attention_fwd` on qkv (B, N, 3, H, d)."""
    q, k, v = qkv.unbind(2)
    o, lse, launch, tensors = _forward(q, k, v, mask, seed, scale, dropout_p, causal, None, call)
    launch(*tensors)
    return o, lse


class Sequences(NamedTuple):
    """Where the sequences of a batch of one begin and end, and the longest one's length; of the keys too, or None where
    they are those of the queries."""

    ends: Tensor
    longest: int
    ends_k: Tensor | None
    longest_k: int


def attention_varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, seed: Tensor | None,
    max_seqlen: int, max_seqlen_k: int, scale: float, dropout_p: float, *, call: Call,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the forward kernel on sequences of q (T, H, d) that begin and end at cu_seqlens (B + 1,), int32 or int64, and
    of k and v, at cu_seqlens_k or at the same places.

    Return o (T, H, d), and LSE (T * H,), sequence by sequence (H, N).
    """
    sequences = _sequences(cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, call)
    o, lse, launch, tensors = _forward(q[None], k[None], v[None], None, seed, scale, dropout_p, False, sequences, call)
    launch(*tensors)
    return o[0].detach(), lse.view(-1)  # no view, as in aten.linear


def attention_varlen_qkvpacked_fwd(
    qkv: Tensor, cu_seqlens: Tensor, seed: Tensor | None, max_seqlen: int, scale: float, dropout_p: float, *, call: Call
) -> tuple[Tensor, Tensor]:
    """Run `attention_varlen_fwd` on qkv (T, 3, H, d)."""
    q, k, v = qkv.unbind(1)
    lengths = max_seqlen, max_seqlen
    return attention_varlen_fwd(q, k, v, cu_seqlens, None, seed, *lengths, scale, dropout_p, call=call)


def _sequences(ends: Tensor, ends_k: Tensor | None, longest: int, longest_k: int, call: Call) -> Sequences:
    """Return the sequences as the kernels read them."""
    if ends_k is None:
        (ends,) = call.as_read(contiguous, ends)
    else:
        ends, ends_k = call.as_read(contiguous, ends, ends_k)
    return Sequences(ends, longest, ends_k, longest_k)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float,
    causal: bool, sequences: Sequences | None, call: Call,
) -> tuple[Tensor, Tensor, Launch, tuple[Tensor | None, ...]]:  # fmt: skip
    """Return o and LSE, still empty, the launch that fills them, and its tensors."""
    q, k, v = call.as_read(readable, q, k, v)
    if mask is not None:
        (mask,) = call.as_read(readable_mask, mask)
    launch, shape = call.once(
        "attention_fwd", _forward_launch, q, k, v, mask, seed, scale, dropout_p, causal, sequences
    )
    o = empty_like(q)
    lse = q.new_empty(shape, dtype=torch.float32)
    ends, ends_k = (None, None) if sequences is None else (sequences.ends, sequences.ends_k)
    return o, lse, launch, (q, k, v, mask, ends, ends_k, seed, o, lse)


class Gradients(NamedTuple):
    """Where the gradients of q, k and v are written, by stride; their last dimensions are contiguous."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None,
    scale: float, dropout_p: float, causal: bool = False, *, out: Sequence[Tensor] | None = None, call: Call,
) -> Gradients:  # fmt: skip
    """Launch the backward kernels. out: three tensors to write the gradients to, instead of new ones."""
    gradients = Gradients(*out) if out is not None else Gradients(empty_like(q), empty_like(k), empty_like(v))
    launch_backward(do, q, k, v, mask, o, lse, seed, scale, dropout_p, causal, gradients, None, call)
    return gradients


def attention_qkvpacked_bwd(
    do: Tensor, qkv: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None, scale: float,
    dropout_p: float, causal: bool = False, *, call: Call,
) -> Tensor:  # fmt: skip
    dqkv = empty_like(qkv)
    q, k, v = qkv.unbind(2)
    launch_backward(do, q, k, v, mask, o, lse, seed, scale, dropout_p, causal, Gradients(*dqkv.unbind(2)), None, call)
    return dqkv


def attention_varlen_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, o: Tensor,
    lse: Tensor, seed: Tensor | None, max_seqlen: int, max_seqlen_k: int, scale: float, dropout_p: float, *,
    out: Sequence[Tensor] | None = None, call: Call,
) -> Gradients:  # fmt: skip
    sequences = _sequences(cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, call)
    gradients = Gradients(*out) if out is not None else Gradients(empty_like(q), empty_like(k), empty_like(v))
    batch_of_one = Gradients(*[t[None] for t in gradients])
    launch_backward(
        do[None], q[None], k[None], v[None], None, o[None], lse, seed, scale, dropout_p, False, batch_of_one,
        sequences, call,
    )  # fmt: skip
    return gradients


def attention_varlen_qkvpacked_bwd(
    do: Tensor, qkv: Tensor, cu_seqlens: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None, max_seqlen: int,
    scale: float, dropout_p: float, *, call: Call,
) -> Tensor:  # fmt: skip
    dqkv = empty_like(qkv)
    q, k, v = qkv.unbind(1)
    out = dqkv.unbind(1)
    lengths = max_seqlen, max_seqlen
    attention_varlen_bwd(do, q, k, v, cu_seqlens, None, o, lse, seed, *lengths, scale, dropout_p, out=out, call=call)
    return dqkv


class BackwardTensors(NamedTuple):
    """The inputs of a mask's gradient: tensors as the kernels read them, and the statistics of
    `attention_bwd_dq_kernel`."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    statistics: Tensor


def launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None,
    scale: float, dropout_p: float, causal: bool, gradients: Gradients, sequences: Sequences | None, call: Call,
) -> BackwardTensors | None:  # fmt: skip
    """Write the gradients of attention's inputs. Return None if no statistics were computed, as is never so with a
    mask.

    do, q, o, dq: (B, M, H, d); k, v and their gradients (B, N, H or a divisor of it, d); one of float32, bfloat16,
    float16, read and written by stride; the last dimension of all but do must be contiguous. lse: (B, H, M) float32,
    contiguous, or as the forward has it. mask, seed, lse: the forward's. Raise `KernelUnsupported` for another dtype.
    """
    dq, dk, dv = gradients
    if seed is None and mask is None:
        if sequences is None and k.shape[1] == 1:
            _check(q, scale)
            for to, gradient in zip(gradients, gradients_of_one_key(do, q, k, v), strict=True):
                to.copy_(gradient)
            return None
        if sequences is not None and sequences.longest == 1 and sequences.ends_k is None and q.shape == k.shape:
            _check(q, scale)
            nothing = o - o  # NaN: not computed
            dq.copy_(nothing)
            dk.copy_(nothing)
            torch.add(do, nothing, out=dv)
            return None
    if q.shape[1] == 0:  # nothing is launched
        dk.zero_()
        dv.zero_()
    do, q, k, v = call.as_read(readable, do, q, k, v)
    if mask is not None:
        (mask,) = call.as_read(readable_mask, mask)
    strided = q, k, v, o, do, dq, dk, dv
    first, second, shape = call.once(
        "attention_bwd", _backward, strided, mask, seed, scale, dropout_p, causal, sequences
    )
    if second is None:
        first(q, k, v, o, do, lse, seed, dq, dk, dv)
        return None
    ends, ends_k = (None, None) if sequences is None else (sequences.ends, sequences.ends_k)
    statistics = q.new_empty(shape, dtype=torch.float32)
    first(q, k, v, o, do, lse, mask, ends, ends_k, seed, dq, statistics)
    second(q, k, v, do, statistics, mask, ends, ends_k, seed, dk, dv)
    return BackwardTensors(do, q, k, v, mask, statistics)


def _check(q: Tensor, scale: float) -> None:
    """Raise `KernelUnsupported` for what neither the forward nor the backward kernels take."""
    if q.dtype not in DTYPES:
        raise KernelUnsupported(f"attention has no kernel for {q.dtype}")
    if not scale > 0.0:  # the kernels scale the maximum of the unscaled scores
        raise KernelUnsupported(f"attention's kernels need a positive scale, got {scale}")


def readable(x: Tensor) -> Tensor:
    """Return x (B, N, H, d), or a copy if its head dimension is strided or its tokens are very far apart."""
    _, token, _, element = x.stride()
    return x if element == 1 and token <= MAX_STRIDE else x.contiguous()


def readable_mask(mask: Tensor) -> Tensor:
    """Return mask (B or 1, H or 1, M or 1, N) as the kernels read it, with one element where it is broadcast. Copy it,
    with padded rows, if its row stride is not a multiple of 16 elements: otherwise 2 bytes would be loaded at a
    time."""
    N = mask.shape[3]
    found = unexpanded(mask).expand(-1, -1, -1, N)
    strides = _mask_strides(found)
    if N % 16 or found.stride(3) != 1 or strides[1] > MAX_STRIDE or any(stride % 16 for stride in strides):
        room = found.new_empty((*found.shape[:3], cdiv(N, 16) * 16))
        room[..., :N] = found
        return room
    return mask if found.shape == mask.shape else found


def _mask_strides(mask: Tensor) -> list[int]:
    return [0 if mask.shape[i] == 1 else mask.stride(i) for i in (0, 2, 1)]


def _mask_in_units(mask: Tensor | None) -> tuple[bool, tuple[int, ...]]:
    """Return whether the mask of `readable_mask` has a row for each query, and its strides of batch, token and head in
    units of 16 elements; 0 where it is broadcast."""
    if mask is None:
        return False, (0, 0, 0)
    return mask.shape[2] > 1, tuple([stride // 16 for stride in _mask_strides(mask)])


@functools.lru_cache(4096)
def in_units(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the unit, and the strides of batch, token and head of each (B, N, H, d) tensor in units, for tensors of
    one shape. The unit is 8 elements if all strides are multiples of 8, so that the kernels see 16-byte alignment. The
    stride of a dimension of one element is 0."""
    elements = [tensor[i] if shape[i] > 1 else 0 for tensor in strides for i in range(3)]
    unit = 8 if all(s % 8 == 0 for s in elements) else 1
    return unit, tuple(s // unit for s in elements)


def _forward_launch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float,
    causal: bool, sequences: Sequences | None,
) -> tuple[Launch, tuple[int, ...]]:  # fmt: skip
    """Configure the kernel. Also return LSE's shape."""
    heads, strides, of_mask, workload = described((q, k, v), mask, seed, scale, causal, sequences)
    rows, constants = _forward_config(workload)
    numbers: Any = *sizes_of(q, k, workload), *strides, *of_mask, scale, dropout_p
    return Launch(attention_fwd_kernel, heads * cdiv(workload.queries, rows), numbers, constants), lse_shape(q, mask)


def sizes_of(q: Tensor, k: Tensor, workload: Workload) -> tuple[int | None, ...]:
    """Return N, N_k, H, tokens and tokens_k as the kernels take them: the second and the last None if not needed."""
    keys, tokens = (workload.keys, k.shape[1]) if workload.apart else (None, None)
    return workload.queries, keys, q.shape[2], q.shape[1], tokens if workload.kind == "lengths" else None


def _backward(
    strided: tuple[Tensor, ...], mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float,
    causal: bool, sequences: Sequences | None,
) -> tuple[Launch, Launch | None, tuple[int, ...]]:  # fmt: skip
    """Configure the kernel that takes a whole head, or those of dq and of dk and dv. Also return the shape of what the
    dq kernel passes to the other. strided: q, k, v, o, do, dq, dk, dv."""
    heads, strides, of_mask, workload = described(strided, mask, seed, scale, causal, sequences)
    B, tokens, H, _ = strided[0].shape
    if constants := _backward_short_config(workload):
        numbers: Any = workload.queries, H, *strides, scale, dropout_p
        return Launch(attention_bwd_short_kernel, heads, numbers, constants), None, ()
    sizes = sizes_of(strided[0], strided[1], workload)
    rows, constants = _backward_config("dq", workload)
    numbers = *sizes, *strides[:18], *of_mask, scale, dropout_p
    of_dq = Launch(attention_bwd_dq_kernel, heads * cdiv(workload.queries, rows), numbers, constants)
    rows, constants = _backward_config("dkdv", workload)
    numbers = *sizes, *strides[:9], *strides[12:15], *strides[18:], *of_mask, scale, dropout_p
    programs = heads // workload.group * cdiv(workload.keys, rows)
    of_dkdv = Launch(attention_bwd_dkdv_kernel, programs, numbers, constants)
    return of_dq, of_dkdv, (B, H, 3 if is_added(mask) else 2, tokens)


class Workload(NamedTuple):
    """What configurations are chosen by. queries, keys: of a sample, or the most in a packed sequence. unit: of the
    strides; mask_rows: whether queries have a mask each; group: how many heads share keys. kind: why it is not plain
    attention: "mask", "lengths", "groups", "causal", "keys" (more or fewer of them than queries), or ""."""

    queries: int
    keys: int
    head_dim: int
    itemsize: int
    has_dropout: bool
    arch: str
    precision: str  # of the matmuls
    unit: int
    mask_rows: bool
    group: int
    causal: bool
    apart: bool  # keys have numbers or lengths of their own
    kind: str


def described(
    strided: tuple[Tensor, ...], mask: Tensor | None, seed: Tensor | None, scale: float, causal: bool,
    sequences: Sequences | None,
) -> tuple[int, tuple[int, ...], tuple[int, ...], Workload]:  # fmt: skip
    """Return the number of heads of all sequences together, 0 if there is nothing to do; the strides of q, k and the
    rest, and of the mask, as the kernels take them; and what configurations are chosen by."""
    q, k = strided[:2]
    _check(q, scale)
    B, M, H, d = q.shape
    N, apart = k.shape[1], k.shape[1] != M
    if sequences is not None:
        B, M, apart = sequences.ends.shape[0] - 1, sequences.longest, sequences.ends_k is not None
        N = sequences.longest_k if apart else M
    # a batch of one query next to several keys: the strides of both count
    shape = (*q.shape[:1], max(q.shape[1], k.shape[1]), *q.shape[2:])
    unit, strides = in_units(shape, *[t.stride() for t in strided])
    mask_rows, of_mask = _mask_in_units(mask)
    workload = Workload(
        max(M, 1), max(N, 1), d, q.element_size(), seed is not None, device.arch(q), dot_precision(q), unit, mask_rows,
        H // k.shape[2] if H else 1, causal, apart, _kind(q, k, mask, causal, apart, sequences),
    )  # fmt: skip
    planes = B * H if sequences is None else (B + 1) * H  # one more for tokens outside all sequences
    return planes if q.numel() else 0, strides, of_mask, workload


def _kind(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, apart: bool, sequences: Sequences | None) -> str:
    if mask is not None:
        return "mask"
    if sequences is not None:
        return "lengths"
    if q.shape[2] != k.shape[2]:
        return "groups"
    return "causal" if causal else "keys" if apart else ""


@_tuned.cached
def _forward_config(workload: Workload) -> tuple[int, Constants]:
    """Return how many queries a program owns, and the constants."""
    config, constants = configured(
        _attention_configs.attention_fwd, workload, workload.keys, workload.queries, workload.causal
    )
    tails = (config.block_n, 0) if workload.causal or workload.kind == "lengths" else config.tails
    tiles = {"BLOCK_N": config.block_n, "LOOP": config.loop, "TAIL_0": tails[0], "TAIL_1": tails[1]}
    return config.block_m, general(workload) | constants | tiles


@_tuned.cached
def _backward_short_config(workload: Workload) -> Constants | None:
    """Return the constants of the kernel that takes a whole head, or None if it is not to be used."""
    config, constants = configured(_attention_configs.attention_bwd_short, workload, workload.keys)
    return None if config is None else constants | {"BLOCK_N": config.block_n}


@_tuned.cached
def _backward_config(of: str, workload: Workload) -> tuple[int, Constants]:
    """Return how many queries ("dq") or keys ("dkdv") a program owns, and the constants."""
    if of == "dq":
        choose, sides = _attention_configs.attention_bwd_dq, (workload.keys, workload.queries)
    else:
        choose, sides = _attention_configs.attention_bwd_dkdv, (workload.queries, workload.keys)
    config, constants = configured(choose, workload, *sides, workload.causal)
    tail = config.tail
    if workload.kind == "lengths" or (workload.causal and of == "dq"):
        tail = config.block_n if of == "dq" else config.block_m
    tiles = {"BLOCK_N": config.block_n, "LOOP": config.loop, "TAIL": tail}
    if of == "dkdv":
        tiles["COLUMNS"] = min(max(32 * config.num_warps // config.block_m, 4), 16)  # an element of statistics a thread
    return (
        config.block_m if of == "dq" else config.block_n,
        general(workload) | constants | tiles | register_limit(config.max_registers),
    )


def general(workload: Workload) -> Constants:
    """Return the constants that the kernel for short sequences does not have."""
    return {"MASK_ROWS": workload.mask_rows, "GROUP": workload.group, "CAUSAL": workload.causal}


def configured(choose: Callable[..., Any], w: Workload, n: int, *more: int) -> tuple[Any, Constants]:
    """Return a config and the constants that all kernels have; without a config, none. n: how long the side is that
    programs loop over; more: the side that they own, and whether it is causal."""
    config = choose(n, w.head_dim, w.itemsize, w.has_dropout, w.arch, w.precision == "tf32", w.kind, *more)
    if config is None:
        return None, {}
    D0, D1 = config.parts
    return config, {
        "UNIT": w.unit, "HEAD_DIM": w.head_dim, "D0": D0, "D1": D1, "PRECISION": w.precision,
        "BLOCK_M": config.block_m, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
