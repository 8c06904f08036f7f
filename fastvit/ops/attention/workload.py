"""The description of a call of attention that its kernels' configurations depend on, and these configurations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.kernels import _attention_configs
from fastvit.kernels._configs import register_limit
from fastvit.ops.attention.groups import Groups, Sequences, Windows
from fastvit.ops.runtime import device
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.device import dot_precision
from fastvit.ops.runtime.launch import Constants

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(q: Tensor, scale: float) -> None:
    """Raise `KernelUnsupported` for what neither the forward nor the backward kernels take."""
    if q.dtype not in DTYPES:
        raise KernelUnsupported(f"attention has no kernel for {q.dtype}")
    if not scale > 0.0:  # the kernels scale the maximum of the unscaled scores
        raise KernelUnsupported(f"attention's kernels need a positive scale, got {scale}")


def mask_strides(mask: Tensor) -> list[int]:
    return [0 if mask.shape[i] == 1 else mask.stride(i) for i in (0, 2, 1)]


def _mask_in_units(mask: Tensor | None) -> tuple[bool, tuple[int, ...]]:
    """Return whether the mask of `readable_mask` has a row for each query, and its strides of batch, token and head in
    units of 16 elements; 0 where it is broadcast."""
    if mask is None:
        return False, (0, 0, 0)
    return mask.shape[2] > 1, tuple([stride // 16 for stride in mask_strides(mask)])


@functools.lru_cache(4096)
def in_units(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the unit, and the strides of batch, token and head of each (B, N, H, d) tensor in units, for tensors of
    one shape. The unit is 8 elements if all strides are multiples of 8, so that the kernels see 16-byte alignment. The
    stride of a dimension of one element is 0."""
    elements = [tensor[i] if shape[i] > 1 else 0 for tensor in strides for i in range(3)]
    unit = 8 if all(s % 8 == 0 for s in elements) else 1
    return unit, tuple(s // unit for s in elements)


def shape_of_strides(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Return the shape for `in_units` of tensors like q and like k: the strides of tokens count if either has
    several."""
    return (*q.shape[:1], max(q.shape[1], k.shape[1]), *q.shape[2:])


def sizes_of(q: Tensor, k: Tensor, workload: Workload) -> tuple[int | None, ...]:
    """Return N, N_k, H, tokens and tokens_k as the kernels take them: the second and the last None if not needed."""
    keys, tokens = (workload.keys, k.shape[1]) if workload.apart else (None, None)
    return workload.queries, keys, q.shape[2], q.shape[1], tokens if workload.packed else None


def numbers_of_windows(groups: Groups) -> tuple[float | None, ...]:
    """Return the grid's rows and columns, a window's columns, the shift and its bias, as the kernels take them."""
    if not isinstance(groups, Windows):
        return (None,) * 6
    return *groups.grid, groups.window[1], *groups.shift, groups.shift_bias if groups.hides else None


def stored(q: Tensor, groups: Groups) -> tuple[int, int, int]:
    """Return for how many sequences, heads and tokens of each LSE is stored, for q (B, N, H, d); packed sequences count
    as one."""
    B, N, H, _ = q.shape
    return (B * groups.per_sample, H, groups.tokens) if isinstance(groups, Windows) else (B, H, N)


class Workload(NamedTuple):
    """The facts that decide on a configuration. queries, keys: of a sample, of a window, or the most in a packed
    sequence. unit: of the strides; mask_rows: whether queries have a mask each; group: how many heads share keys.
    kind: why it is not plain attention: "windows", "mask", "lengths", "groups", "causal", "keys" (more or fewer of them
    than queries), or ""."""

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
    packed: bool  # sequences of several lengths
    kind: str


Call = tuple[int, tuple[int, ...], tuple[int, ...], Workload]


def described(
    strided: tuple[Tensor, ...], mask: Tensor | None, seed: Tensor | None, scale: float, causal: bool, groups: Groups
) -> Call:
    """Return the number of heads of all sequences together, 0 if there is nothing to do; the strides of q, k and the
    rest, and of the mask, as the kernels take them; and what configurations are chosen by."""
    q, k = strided[:2]
    check(q, scale)
    B, M, H, d = q.shape
    N, apart = k.shape[1], k.shape[1] != M
    if isinstance(groups, Sequences):
        B, M, apart = groups.ends.shape[0], groups.longest, groups.ends_k is not None  # and the tokens outside of all
        N = groups.longest_k if apart else M
    elif groups is not None:
        B, M, N = B * groups.per_sample, groups.tokens, groups.tokens
    unit, strides = in_units(shape_of_strides(q, k), *[t.stride() for t in strided])
    mask_rows, of_mask = _mask_in_units(mask)
    workload = Workload(
        max(M, 1), max(N, 1), d, q.element_size(), seed is not None, device.arch(q), dot_precision(q), unit, mask_rows,
        H // k.shape[2] if H else 1, causal, apart, isinstance(groups, Sequences),
        _kind(q, k, mask, causal, apart, groups),
    )  # fmt: skip
    return B * H if q.numel() else 0, strides, of_mask, workload


def _kind(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, apart: bool, groups: Groups) -> str:
    if isinstance(groups, Windows):
        return "windows"
    if mask is not None:
        return "mask"
    if groups is not None:
        return "lengths"
    if q.shape[2] != k.shape[2]:
        return "groups"
    return "causal" if causal else "keys" if apart else ""


@functools.cache
def forward_config(workload: Workload) -> tuple[int, Constants]:
    """Return how many queries a program owns, and the constants."""
    config, constants = configured(
        _attention_configs.attention_fwd, workload, workload.keys, workload.queries, workload.causal
    )
    tails = (config.block_n, 0) if workload.causal or workload.packed else config.tails
    tiles = {"BLOCK_N": config.block_n, "LOOP": config.loop, "TAIL_0": tails[0], "TAIL_1": tails[1]}
    return config.block_m, general(workload) | constants | tiles


@functools.cache
def backward_short_config(workload: Workload) -> Constants | None:
    """Return the constants of the kernel that takes a whole head, or None if it is not to be used."""
    config, constants = configured(_attention_configs.attention_bwd_short, workload, workload.keys)
    return None if config is None else constants | {"BLOCK_N": config.block_n}


@functools.cache
def backward_config(of: str, workload: Workload) -> tuple[int, Constants]:
    """Return how many queries ("dq") or keys ("dkdv") a program owns, and the constants."""
    if of == "dq":
        choose, sides = _attention_configs.attention_bwd_dq, (workload.keys, workload.queries)
    else:
        choose, sides = _attention_configs.attention_bwd_dkdv, (workload.queries, workload.keys)
    config, constants = configured(choose, workload, *sides, workload.causal)
    tail = config.tail
    if workload.packed or (workload.causal and of == "dq"):
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
