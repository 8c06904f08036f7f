"""Calls that run as larger ones, so that few graphs stand for many sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.graphed.recorder import Unfit


class Leaves(NamedTuple):
    """The arguments of a call without their structure.

    values: tensors and others.
    sizes: of the first dimension of each tensor as the call runs; None: as it is.
    rows: how many rows of its results count; None: all.
    """

    values: list[Any]
    sizes: list[int | None]
    rows: int | None = None


def round_batch(batches: Sequence[int], values: list[Any]) -> Leaves:
    """Round the first dimension of all tensors up to one of `batches`, in ascending order."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    counts = {len(t) for t in tensors if t.dim()}
    if len(counts) != 1:
        raise Unfit(f"the batch size is not clear: first dimensions of its tensors are {sorted(counts)}")
    (count,) = counts
    size = _least(batches, count, "batch")
    return Leaves(values, [size if t.dim() else None for t in tensors], None if size == count else count)


def round_tokens(budgets: Sequence[int], values: list[Any]) -> Leaves:
    """Round the T tokens of a list of images up to one of `budgets`, and the number of sequences and the length of the
    longest up to powers of two. The tokens that are added are sequences of their own.

    values: arguments of `Backbone._blocks_packed`: tokens (T, D), cu_seqlens (B + 1,), max_seqlen, and tables (T, ...).
    """
    tokens, ends, longest, *rest = values
    count = len(tokens)
    size, most = _least(budgets, count, "number of tokens"), _power_of_two(longest)
    more = _power_of_two(len(ends) - 1 - (count - size) // most) - len(ends) + 1  # sequences that are added
    added = torch.arange(1, more + 1, dtype=ends.dtype, device=ends.device).mul_(most).add_(count).clamp_(max=size)
    sizes = [None if v is ends else size for v in values if isinstance(v, Tensor)]
    return Leaves([tokens, torch.cat((ends, added)), most, *rest], sizes, count)


def _least(sizes: Sequence[int], count: int, what: str) -> int:
    for size in sizes:
        if size >= count:
            return size
    raise Unfit(f"a {what} of {count} is larger than the largest that is rounded to, {sizes[-1]}")


def _power_of_two(n: int) -> int:
    """Return the least power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()
