"""Launch the backward pass of attention with the gradient of a float mask."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _attention_configs
from fastvit.kernels.attention_bwd_mask import attention_bwd_mask_kernel
from fastvit.ops.attention import softmax_launch
from fastvit.ops.attention.groups import Groups
from fastvit.ops.attention.workload import (
    Workload,
    configured,
    described,
    general,
    numbers_of_windows,
    sizes_of,
)
from fastvit.ops.runtime import device
from fastvit.ops.runtime.column_sum import column_sums
from fastvit.ops.runtime.launch import Constants, Launch, cdiv


def launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None,
    scale: float, dropout_p: float, causal: bool, gradients: Sequence[Tensor], groups: Groups,
) -> Tensor:  # fmt: skip
    """Write dq, dk and dv; return the mask's gradient."""
    q, k, v, do, read_mask, statistics = softmax_launch.launch_backward(
        do, q, k, v, mask, o, lse, seed, scale, dropout_p, causal, gradients, groups
    )
    if q.numel() == 0:
        return torch.zeros_like(mask, memory_format=torch.contiguous_format)
    strided = q, k, v, do
    launch, shape = _mask_launch(strided, mask, read_mask, seed, scale, dropout_p, causal, groups)
    # a mask of one row has the sum of all rows for its gradient
    dtype = mask.dtype if mask.shape[2] == shape[2] else torch.float32
    parts = mask.new_empty(shape, dtype=dtype if shape[0] == 1 else torch.float32)
    launch(*strided, statistics, read_mask, seed, parts)
    if shape[0] > 1:
        (parts,) = column_sums(parts.view(1, shape[0], -1), [dtype])
    dmask = parts.view(*mask.shape[:2], *shape[2:])[..., : mask.shape[3]]
    return dmask.contiguous() if mask.shape[2] == shape[2] else dmask.sum(2, keepdim=True).to(mask.dtype)


def _mask_launch(
    strided: tuple[Tensor, ...], mask: Tensor, read_mask: Tensor, seed: Tensor | None, scale: float, dropout_p: float,
    causal: bool, groups: Groups,
) -> tuple[Launch, tuple[int, ...]]:  # fmt: skip
    """Return the launch, and the shape of its results, of which there may be several to be summed. strided: q, k, v,
    do. read_mask: the mask as it is read."""
    heads, strides, of_mask, workload = described(strided, read_mask, seed, scale, causal, groups)
    q, k = strided[:2]
    M, N, H = workload.queries, workload.keys, q.shape[2]
    samples, mask_heads = heads // H // mask.shape[0], mask.shape[1]
    sharing, planes = samples * (H // mask_heads), mask.shape[0] * mask_heads
    rows, columns, constants = _config(workload)
    tiles = planes * cdiv(M, rows) * cdiv(N, columns)
    share = _attention_configs.mask_share(tiles, sharing, device.multiprocessors(q.device.index))
    splits = cdiv(sharing, share)
    sizes = *sizes_of(q, k, workload)[:3], samples, mask_heads, planes, share
    numbers: Any = *sizes, *numbers_of_windows(groups), *strides, *of_mask, scale, dropout_p
    padded = cdiv(N, 16) * 16
    launch = Launch(attention_bwd_mask_kernel, splits * tiles, numbers, constants)
    return launch, (splits, planes, M, padded)


@functools.cache
def _config(workload: Workload) -> tuple[int, int, Constants]:
    """Return the tile of the gradient that a program owns, and the constants."""
    config, constants = configured(_attention_configs.attention_bwd_mask, workload, workload.keys)
    return config.block_m, config.block_n, general(workload) | constants | {"BLOCK_N": config.block_n}
