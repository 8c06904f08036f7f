"""Launches the kernels of softmax attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _attention_configs, _tuned
from fastvit.kernels._configs import register_limit
from fastvit.kernels.attention import attention_fwd_kernel
from fastvit.kernels.attention_bwd import attention_bwd_dkdv_kernel, attention_bwd_dq_kernel
from fastvit.kernels.attention_bwd_short import attention_bwd_short_kernel
from fastvit.kernels.attention_short import attention_short_fwd_kernel
from fastvit.ops import _library
from fastvit.ops._checks import empty_like
from fastvit.ops._launch import Call, Constants, cdiv, launch
from fastvit.ops._library import Unsupported, dot_precision

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_STRIDE = 1 << 22  # elements between two tokens, so that offsets within a tile fit 32 bits


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """q, k, v (B, N, H, d), one of float32, bfloat16, float16, by stride; seed int64 [1], or None without dropout.

    -> o (B, N, H, d) contiguous, and LSE (B, H, N) float32, natural logarithm. Raises `Unsupported`.
    """
    o, lse, call = _forward(q, k, v, seed, scale, dropout_p)
    if call is not None:
        launch(*call)
    return o, lse


def attention_qkvpacked_fwd(qkv: Tensor, seed: Tensor | None, scale: float, dropout_p: float) -> tuple[Tensor, Tensor]:
    """The same for qkv (B, N, 3, H, d)."""
    q, k, v = qkv.unbind(2)
    o, lse, call = _forward(q, k, v, seed, scale, dropout_p)
    if call is not None:
        launch(*call)
    return o, lse


def _forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor, Call | None]:
    """Room for o and LSE, and the launch that fills it, if there is anything to fill."""
    _check(q, scale)
    B, N, H, _ = q.shape
    o = empty_like(q)
    lse = q.new_empty((B, H, N), dtype=torch.float32)
    if q.numel() == 0:
        return o, lse, None
    q, k, v = readable(q), readable(k), readable(v)
    unit, strides = in_units(q.shape, q.stride(), k.stride(), v.stride())
    short, rows, constants = _forward_plan(_workload(q, seed, unit))
    kernel = attention_short_fwd_kernel if short else attention_fwd_kernel
    numbers = N, H, *strides, scale, dropout_p
    return o, lse, (kernel, B * H * cdiv(N, rows), (q, k, v, seed, o, lse), numbers, constants)


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None, scale: float,
    dropout_p: float, *out: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """out: where the three gradients are written, by stride, instead of room of their own."""
    gradients: Any = out or tuple([empty_like(t) for t in (q, k, v)])
    launch_backward(do, q, k, v, o, lse, seed, scale, dropout_p, *gradients)
    return gradients


def attention_qkvpacked_bwd(do: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    dqkv = empty_like(qkv)
    arguments: Any = (do, *qkv.unbind(2), *rest, *dqkv.unbind(2))
    launch_backward(*arguments)
    return dqkv


def launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None, scale: float,
    dropout_p: float, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes the gradients of attention's inputs into dq, dk, dv.

    do, q, k, v, o, dq, dk, dv: (B, N, H, d), one of float32, bfloat16, float16, read and written by stride; the last
    dimension of all but do must be contiguous. lse: (B, H, N) float32, natural logarithm, contiguous. seed: int64 [1],
    the forward's, or None without dropout. Raises `Unsupported` for another dtype.
    """
    _check(q, scale)
    if q.numel() == 0:
        return
    B, N, H, _ = q.shape
    if N == 1 and seed is None:  # softmax over one key is constant: no gradient, not even one of rounding errors
        dq.zero_()
        dk.zero_()
        dv.copy_(do)
        return
    do, q, k, v = readable(do), readable(q), readable(k), readable(v)
    unit, strides = in_units(q.shape, *[t.stride() for t in (q, k, v, o, do, dq, dk, dv)])
    workload = _workload(q, seed, unit)
    numbers: Any = (scale, dropout_p)
    if constants := _backward_short_plan(workload):
        tensors: Any = (q, k, v, o, do, lse, seed, dq, dk, dv)
        launch(attention_bwd_short_kernel, B * H, tensors, (N, H, *strides, *numbers), constants)
        return
    statistics = q.new_empty((B, H, 2, N), dtype=torch.float32)
    rows, constants = _backward_plan("dq", workload)
    tensors = (q, k, v, o, do, lse, seed, dq, statistics)
    launch(attention_bwd_dq_kernel, B * H * cdiv(N, rows), tensors, (N, H, *strides[:18], *numbers), constants)
    rows, constants = _backward_plan("dkdv", workload)
    tensors = (q, k, v, do, statistics, seed, dk, dv)
    numbers = N, H, *strides[:9], *strides[12:15], *strides[18:], *numbers
    launch(attention_bwd_dkdv_kernel, B * H * cdiv(N, rows), tensors, numbers, constants)


def _check(q: Tensor, scale: float) -> None:
    """Raises `Unsupported` for what neither the forward nor the backward kernels take."""
    if q.dtype not in _DTYPES:
        raise Unsupported(f"attention has no kernel for {q.dtype}")
    if not scale > 0.0:  # the kernels scale the maximum of the unscaled scores
        raise Unsupported(f"attention's kernels need a positive scale, got {scale}")


def readable(x: Tensor) -> Tensor:
    """x (B, N, H, d) itself, or a copy if its head dimension is strided or its tokens are very far apart."""
    _, token, _, element = x.stride()
    return x if element == 1 and token <= MAX_STRIDE else x.contiguous()


@functools.lru_cache(4096)
def in_units(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """(unit, strides of batch, token and head of each (B, N, H, d) tensor, in units), for tensors of one shape. The
    unit is 8 elements where all are multiples of that, so that the kernels see 16-byte alignment; dimensions of one
    element have no stride."""
    elements = [tensor[i] if shape[i] > 1 else 0 for tensor in strides for i in range(3)]
    unit = 8 if all(s % 8 == 0 for s in elements) else 1
    return unit, tuple(s // unit for s in elements)


# N, d, bytes of an element, whether there is dropout, target, precision of the matmuls, unit of the strides
Workload = tuple[int, int, int, bool, str, str, int]


def _workload(q: Tensor, seed: Tensor | None, unit: int) -> Workload:
    _, N, _, d = q.shape
    return N, d, q.element_size(), seed is not None, _library.arch(q), dot_precision(q), unit


@_tuned.cached
def _forward_plan(workload: Workload) -> tuple[bool, int, Constants]:
    """Whether the kernel for short sequences is the one, the queries that a program owns, and the constants."""
    config, constants = _configured(_attention_configs.attention_fwd, workload)
    keys = config.chunks
    if config.algorithm == "short":
        tiles = {"KEYS_0": keys[0], "KEYS_1": keys[1], "KEYS_2": keys[2]}
        return True, config.block_m, constants | tiles
    tiles = {"BLOCK_N": config.block_n, "LOOP": config.loop, "TAIL_0": keys[0], "TAIL_1": keys[1]}
    return False, config.block_m, constants | tiles


@_tuned.cached
def _backward_short_plan(workload: Workload) -> Constants | None:
    """The constants of the kernel that takes a whole head, or None where that is not the one."""
    config, constants = _configured(_attention_configs.attention_bwd_short, workload)
    return None if config is None else constants | {"BLOCK_N": config.block_n}


@_tuned.cached
def _backward_plan(of: str, workload: Workload) -> tuple[int, Constants]:
    """The queries that a program owns, for the kernel of "dq", or keys for that of "dkdv", and the constants."""
    choose = _attention_configs.attention_bwd_dq if of == "dq" else _attention_configs.attention_bwd_dkdv
    config, constants = _configured(choose, workload)
    tiles = {"BLOCK_N": config.block_n, "LOOP": config.loop, "TAIL": config.tail}
    return (
        config.block_m if of == "dq" else config.block_n,
        constants | tiles | register_limit(config.max_registers),
    )


def _configured(choose: Callable[..., Any], workload: Workload) -> tuple[Any, Constants]:
    """A config, and the constants that all kernels have; of no config none."""
    n, d, itemsize, has_dropout, arch, precision, unit = workload
    config = choose(n, d, itemsize, has_dropout, arch, precision == "tf32")
    if config is None:
        return None, {}
    D0, D1 = config.parts
    return config, {
        "UNIT": unit, "HEAD_DIM": d, "D0": D0, "D1": D1, "PRECISION": precision, "BLOCK_M": config.block_m,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
