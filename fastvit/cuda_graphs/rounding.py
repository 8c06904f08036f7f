"""Calls that run as larger ones, so that few graphs stand for many sizes, and the check that their results allow it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.cuda_graphs.captured import Outputs
from fastvit.cuda_graphs.recorder import Unfit
from fastvit.ops.runtime.device import float32_precision


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


def grown(tensors: Sequence[Tensor], sizes: Sequence[int | None], *, filled: bool = False) -> list[Tensor]:
    """Return tensors with more rows: zeros, or if `filled`, other values than zeros that are as valid as the last row.

    sizes: how many rows in all; None: as many as there are.
    """
    result = []
    for t, size in zip(tensors, sizes, strict=True):
        if size is not None and size > len(t):
            added = t.new_zeros(size - len(t), *t.shape[1:])
            if filled:
                added += 2 * t[-1] + 1 if t.is_floating_point() else t[-1]
            t = torch.cat((t, added))
        result.append(t)
    return result


def rows_are_independent(
    run: Callable[[Sequence[Tensor]], Any], own: Outputs, tensors: Sequence[Tensor], leaves: Leaves,
    precision: float,
) -> bool:  # fmt: skip
    """Return whether the first rows of a call's results stay as they are when rows are added.

    Runs of one size have to agree exactly, whatever is in the rows that are added. The call's own results come from
    another size, for which PyTorch may choose other kernels: both may have an error of 2 ulp of the largest value, and
    together 2^-16 of it from sums in float32.

    Args:
        run: the model's forward.
        own: what the call returned as it was.
        tensors: of the call; `leaves` says how many rows they get.
        precision: eps of the coarsest dtype in which the model computes.
    """
    size = next(size for size in leaves.sizes if size is not None)
    zeros, others = (Outputs.of(run(grown(tensors, leaves.sizes, filled=filled))) for filled in (False, True))
    if not own[1:] == zeros[1:] == others[1:]:
        return False
    return all(
        t.dim() > 0
        and (leaves.rows, *t.shape[1:]) == t.shape
        and (size, *t.shape[1:]) == a.shape == b.shape
        and _agree(a[: leaves.rows], b[: leaves.rows], 0)
        and _agree(t, a[: leaves.rows], 4 * precision + 2**-16)
        for t, a, b in zip(own.tensors, zeros.tensors, others.tensors, strict=True)
    )


def coarsest(tensors: Iterable[Tensor]) -> float:
    """Return the largest eps of the dtypes in which a model of such tensors computes now."""
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    dtypes |= {torch.get_autocast_dtype(t.device.type) for t in tensors if torch.is_autocast_enabled(t.device.type)}
    tf32 = 2**-10 if float32_precision() != "highest" else 0.0
    return max(tf32, *(torch.finfo(dtype).eps for dtype in dtypes), 0.0)


def _agree(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Compare two tensors of one shape. tolerance: of the largest finite value."""
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
    a, b = a.double(), b.double()
    bound = tolerance * b.nan_to_num(0, 0, 0).abs().max() if tolerance and b.numel() else 0.0
    return bool((((a - b).abs() <= bound) | (a == b) | (a.isnan() & b.isnan())).all())
