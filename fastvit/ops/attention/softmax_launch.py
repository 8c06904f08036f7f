"""Launch the kernels of softmax attention on tensors (B, N, H, d)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastvit.kernels.attention import attention_fwd_kernel
from fastvit.kernels.attention_bwd_dkdv import attention_bwd_dkdv_kernel
from fastvit.kernels.attention_bwd_dq import attention_bwd_dq_kernel
from fastvit.kernels.attention_bwd_short import attention_bwd_short_kernel
from fastvit.ops.attention import hopper
from fastvit.ops.attention.aten_samples import gradients_of_one_key, zero_without_queries
from fastvit.ops.attention.groups import Groups, Sequences, is_added
from fastvit.ops.attention.workload import (
    Call,
    backward_config,
    backward_short_config,
    check,
    described,
    forward_config,
    mask_strides,
    numbers_of_windows,
    sizes_of,
    stored,
)
from fastvit.ops.runtime.launch import Launch, cdiv
from fastvit.ops.runtime.rows import empty_like, unexpanded

MAX_STRIDE = 1 << 22  # elements between two tokens, so that offsets within a tile fit 32 bits


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float,
    causal: bool, groups: Groups,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel; return o and LSE."""
    q, k, v = map(readable, (q, k, v))
    if mask is not None:
        mask = readable_mask(mask)
    launch, shape = _forward_launch(q, k, v, mask, seed, scale, dropout_p, causal, groups)
    o = empty_like(q)
    lse = q.new_empty(shape, dtype=torch.float32)
    ends, ends_k = (groups.ends, groups.ends_k) if isinstance(groups, Sequences) else (None, None)
    launch(q, k, v, mask, ends, ends_k, seed, o, lse)
    return o, lse


def launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None,
    scale: float, dropout_p: float, causal: bool, gradients: Sequence[Tensor], groups: Groups,
) -> tuple[Any, ...]:  # fmt: skip
    """Write the gradients of attention's inputs. Return q, k, v, do and the mask as the kernels read them, and the
    statistics of `attention_bwd_dq_kernel`; with a mask they are always computed, otherwise this may be empty.

    do, q, o, dq: (B, M, H, d); k, v and their gradients (B, N, H or a divisor of it, d); one of float32, bfloat16,
    float16, read and written by stride; the last dimension of all but do must be contiguous. lse: (B, H, M) float32,
    contiguous, or as the forward has it. mask, seed, lse: the forward's. Raise `KernelUnsupported` for another dtype.
    """
    dq, dk, dv = gradients
    if seed is None and mask is None:
        if groups is None and k.shape[1] == 1:
            check(q, scale)
            for to, gradient in zip(gradients, gradients_of_one_key(do, q, k, v), strict=True):
                to.copy_(gradient)
            return ()
        one_token = isinstance(groups, Sequences) and groups.longest == 1 and groups.ends_k is None
        if one_token and q.shape == k.shape:
            check(q, scale)
            nothing = o - o  # NaN: not computed
            dq.copy_(nothing)
            dk.copy_(nothing)
            torch.add(do, nothing, out=dv)
            return ()
    zero_without_queries(q, dk, dv)
    do, q, k, v = map(readable, (do, q, k, v))
    if mask is not None:
        mask = readable_mask(mask)
    strided = q, k, v, o, do, dq, dk, dv
    call = described(strided, mask, seed, scale, causal, groups)
    launches = _backward(strided, call, mask, scale, dropout_p, groups)
    both = functools.partial(_launch_both, launches, mask, groups)
    tensors = q, k, v, o, do, lse, seed, dq, dk, dv
    if (launch := hopper.launch_backward(strided, call, scale, both)) is not None:
        launch(*tensors)
        return ()
    return both(*tensors)


def _launch_both(
    launches: tuple[Launch, Launch | None, tuple[int, ...]], mask: Tensor | None, groups: Groups, *tensors: Any
) -> tuple[Any, ...]:
    """Launch what `_backward` has configured. Return what `launch_backward` does."""
    first, second, shape = launches
    if second is None:
        first(*tensors)
        return ()
    q, k, v, o, do, lse, seed, dq, dk, dv = tensors
    ends, ends_k = (groups.ends, groups.ends_k) if isinstance(groups, Sequences) else (None, None)
    statistics = q.new_empty(shape, dtype=torch.float32)
    first(q, k, v, o, do, lse, mask, ends, ends_k, seed, dq, statistics)
    second(q, k, v, do, statistics, mask, ends, ends_k, seed, dk, dv)
    return q, k, v, do, mask, statistics


def readable(x: Tensor) -> Tensor:
    """Return x (B, N, H, d), or a copy if its head dimension is strided or its tokens are very far apart."""
    _, token, _, element = x.stride()
    return x if element == 1 and token <= MAX_STRIDE else x.contiguous()


def readable_mask(mask: Tensor) -> Tensor:
    """Return mask (B or 1, H or 1, M or 1, N) as the kernels read it, with one element where it is broadcast. Copy it,
    with padded rows, if its row stride is not a multiple of 16 elements: otherwise 2 bytes would be loaded at a
    time."""
    N = mask.shape[3]
    narrow = unexpanded(mask).expand(-1, -1, -1, N)
    strides = mask_strides(narrow)
    if N % 16 or narrow.stride(3) != 1 or strides[1] > MAX_STRIDE or any(stride % 16 for stride in strides):
        room = narrow.new_empty((*narrow.shape[:3], cdiv(N, 16) * 16))
        room[..., :N] = narrow
        return room
    return mask if narrow.shape == mask.shape else narrow


def _forward_launch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float,
    causal: bool, groups: Groups,
) -> tuple[Launch, tuple[int, ...]]:  # fmt: skip
    """Configure the kernel. Also return LSE's shape."""
    heads, strides, of_mask, workload = described((q, k, v), mask, seed, scale, causal, groups)
    rows, constants = forward_config(workload)
    numbers: Any = *sizes_of(q, k, workload), *numbers_of_windows(groups), *strides, *of_mask, scale, dropout_p
    samples, H, N = stored(q, groups)
    shape = (samples, H, 2, N) if is_added(mask) else (samples, H, N)
    launch = Launch(attention_fwd_kernel, heads * cdiv(workload.queries, rows), numbers, constants)
    return hopper.launch(q, k, v, heads, workload, scale, launch), shape


def _backward(
    strided: tuple[Tensor, ...], call: Call, mask: Tensor | None, scale: float, dropout_p: float, groups: Groups
) -> tuple[Launch, Launch | None, tuple[int, ...]]:
    """Configure the kernel that takes a whole head, or those of dq and of dk and dv. Also return the shape of what the
    dq kernel passes to the other. strided: q, k, v, o, do, dq, dk, dv."""
    heads, strides, of_mask, workload = call
    if constants := backward_short_config(workload):
        numbers: Any = workload.queries, strided[0].shape[2], *strides, scale, dropout_p
        return Launch(attention_bwd_short_kernel, heads, numbers, constants), None, ()
    sizes = *sizes_of(strided[0], strided[1], workload), *numbers_of_windows(groups)
    rows, constants = backward_config("dq", workload)
    numbers = *sizes, *strides[:18], *of_mask, scale, dropout_p
    of_dq = Launch(attention_bwd_dq_kernel, heads * cdiv(workload.queries, rows), numbers, constants)
    rows, constants = backward_config("dkdv", workload)
    numbers = *sizes, *strides[:9], *strides[12:15], *strides[18:], *of_mask, scale, dropout_p
    programs = heads // workload.group * cdiv(workload.keys, rows)
    of_dkdv = Launch(attention_bwd_dkdv_kernel, programs, numbers, constants)
    samples, H, N = stored(strided[0], groups)
    return of_dq, of_dkdv, (samples, H, 3 if is_added(mask) else 2, N)
