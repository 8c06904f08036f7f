"""Dropout on PyTorch's own functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.runtime.epilogue import add_residual_
from fastvit.reference.ops import add_branch


def dropout(x: Tensor, seed: Tensor, p: float, *epilogue: Tensor | None) -> Tensor:
    # comparing raw 32-bit numbers takes a CPU a third of the time of bernoulli_
    generator = torch.Generator(x.device).manual_seed(int(seed))
    pairs = torch.empty(x.numel() // 2 + 1, dtype=torch.int64, device=x.device)
    numbers = pairs.random_(-(2**63), None, generator=generator).view(torch.int32)[: x.numel()].view(x.shape)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ge(numbers, min(round(p * 2**32), 2**32 - 1) - 2**31, out=out)
    return add_residual_(out.mul_(x).mul_(1 / (1 - p)), *epilogue)


def plain(x: Tensor, seed: Tensor, p: float, *epilogue: Tensor | None) -> Tensor:
    """The op for exporters, which draws other masks."""
    return add_branch(F.dropout(x, p), *epilogue)
