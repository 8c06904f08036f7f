"""Launch the backward pass of attention with the gradient of a float mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _attention_configs, _tuned
from fastvit.kernels.attention_bwd_mask import attention_bwd_mask_kernel
from fastvit.ops.attention.launch import Workload, configured, described, general, launch_backward
from fastvit.ops.runtime import devices
from fastvit.ops.runtime.checks import empty_like
from fastvit.ops.runtime.column_sum import column_sums
from fastvit.ops.runtime.launch import Constants, Launch, cdiv
from fastvit.ops.runtime.plans import AFRESH, Plans


def attention_bwd_with_mask(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None,
    scale: float, dropout_p: float, *out: Tensor, plans: Plans = AFRESH,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return dq, dk, dv and the gradient of a float mask, contiguous."""
    gradients: Any = out or tuple([empty_like(t) for t in (q, k, v)])
    return *gradients, _launch(do, q, k, v, mask, o, lse, seed, scale, dropout_p, *gradients, plans=plans)


def attention_qkvpacked_bwd_with_mask(
    do: Tensor, qkv: Tensor, mask: Tensor, *rest: Any, plans: Plans = AFRESH
) -> tuple[Tensor, Tensor]:
    dqkv = empty_like(qkv)
    arguments: Any = do, *qkv.unbind(2), mask, *rest, *dqkv.unbind(2)
    return dqkv, _launch(*arguments, plans=plans)


def _launch(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None,
    scale: float, dropout_p: float, dq: Tensor, dk: Tensor, dv: Tensor, *, plans: Plans,
) -> Tensor:  # fmt: skip
    """Write dq, dk and dv; return the mask's gradient."""
    do, q, k, v, read_mask, statistics = launch_backward(
        do, q, k, v, mask, o, lse, seed, scale, dropout_p, dq, dk, dv, plans=plans
    )
    if q.numel() == 0:
        return torch.zeros_like(mask, memory_format=torch.contiguous_format)
    launch, shape = plans.plan(_plan, (q, k, v, do), mask, read_mask, seed, scale, dropout_p)
    has_rows = mask.shape[2] == q.shape[1]  # a mask of one row has the sum of all rows for its gradient
    dtype = mask.dtype if has_rows else torch.float32
    parts = mask.new_empty(shape, dtype=dtype if shape[0] == 1 else torch.float32)
    launch(q, k, v, do, statistics, read_mask, seed, parts)
    (found,) = [parts] if shape[0] == 1 else column_sums(parts.view(1, shape[0], -1), dtype, plans=plans)
    found = found.view(*mask.shape[:2], *shape[2:])[..., : q.shape[1]]
    return found.contiguous() if has_rows else found.sum(2, keepdim=True).to(mask.dtype)


def _plan(
    strided: tuple[Tensor, ...], mask: Tensor, read_mask: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Launch, tuple[int, ...]]:
    """Return the launch and the shape of its partial sums. strided: q, k, v, do. read_mask: the mask as it is read."""
    _, strides, of_mask, workload = described(strided, read_mask, seed, scale, None)
    q = strided[0]
    B, N, H, _ = q.shape
    samples, mask_heads = B // mask.shape[0], mask.shape[1]
    sharing, planes = samples * (H // mask_heads), mask.shape[0] * mask_heads
    rows, columns, constants = _config(workload)
    tiles = planes * cdiv(N, rows) * cdiv(N, columns)
    share = _attention_configs.mask_share(tiles, sharing, devices.multiprocessors(q.device.index))
    splits = cdiv(sharing, share)
    numbers = N, H, samples, mask_heads, planes, share, *strides, *of_mask, scale, dropout_p
    shape = splits, planes, N, cdiv(N, 16) * 16
    return Launch(attention_bwd_mask_kernel, splits * tiles, numbers, constants), shape


@_tuned.cached
def _config(workload: Workload) -> tuple[int, int, Constants]:
    """Return the tile of the gradient that a program owns, and the constants."""
    config, constants = configured(_attention_configs.attention_bwd_mask, workload)
    return config.block_m, config.block_n, general(workload) | constants | {"BLOCK_N": config.block_n}
