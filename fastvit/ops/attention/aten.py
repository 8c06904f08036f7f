"""Softmax attention on PyTorch's own functions. Packed sequences are computed one after the other; the tokens of a grid
are cut into windows. Both are then samples (aten_samples.py)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention.aten_samples import backward, empty_gradients, forward, has_flash_backward
from fastvit.ops.attention.groups import (
    Gradients,
    Heads,
    LastArguments,
    Relative,
    Sequences,
    Windows,
    groups_of,
    lse_shape,
    unpacked,
)
from fastvit.ops.runtime.device import is_fake
from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.ops.runtime.record import constant
from fastvit.reference.windows import Size, apart_in_windows, from_windows, mask_of_windows, to_windows


def attention_fwd(
    q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, seed: Tensor | None, scale: float,
    dropout_p: float, causal: bool = False, *last: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    p, tensors = LastArguments(*last), [t for t in (q, k, v) if t is not None]
    q, k, v = unpacked(q, k, v)
    groups, numbers = groups_of(q, p), (scale, dropout_p, causal)
    if groups is None:
        return forward(q, k, v, mask, seed, *numbers, _relative(p))
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty(lse_shape(q, mask, groups), dtype=stat_dtype(q))
    if isinstance(groups, Sequences):
        for sequence in _sequences(groups, mask, seed, lse, (q, o), (k, v)):
            (q_part, o_part), (k_part, v_part) = sequence.of_q, sequence.of_k
            o_part[:], sequence.lse[:] = forward(q_part, k_part, v_part, sequence.mask, sequence.seed, *numbers)
    else:
        for part in _samples(groups, mask, seed, tensors, p):
            o_part, lse_part = forward(*unpacked(*part.tensors), part.mask, part.seed, *numbers, part.relative)
            part.grid.join(o_part, o[part.samples])
            _of_samples(lse, part.samples, q).copy_(lse_part)
    return o, lse


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, o: Tensor, lse: Tensor,
    seed: Tensor | None, scale: float, dropout_p: float, causal: bool = False, wants_mask: bool = False,
    *last: Any, out: Heads | None = None,
) -> Gradients:  # fmt: skip
    """Compute the gradients. out: three tensors to write those of q, k and v to, perhaps views of one packed buffer."""
    p, packed, tensors = LastArguments(*last), None, [t for t in (q, k, v) if t is not None]
    heads = unpacked(q, k, v)
    groups, numbers, relative = groups_of(heads[0], p), (scale, dropout_p, causal), _relative(p)
    plain = groups is None and relative is None and not wants_mask
    if k is None and plain and has_flash_backward(do, *heads, mask, seed, causal):
        # PyTorch's kernel allocates gradients; they are packed once its workspace is freed
        found: Any = backward(do, *heads, mask, o, lse, seed, *numbers)
        return Gradients(torch.stack(found[:3], 2))
    if k is None:
        packed = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out = unpacked(packed)
    if groups is None:
        found = backward(do, *heads, mask, o, lse, seed, *numbers, relative, wants_mask=wants_mask, out=out)
    elif isinstance(groups, Sequences):
        out = out or empty_gradients(*heads)
        for sequence in _sequences(groups, mask, seed, lse, (do, heads[0], o, out[0]), (*heads[1:], *out[1:])):
            (do_part, q_part, o_part, dq), (k_part, v_part, dk, dv) = sequence.of_q, sequence.of_k
            saved = q_part, k_part, v_part, sequence.mask, o_part, sequence.lse, sequence.seed
            backward(do_part, *saved, *numbers, out=(dq, dk, dv))
        found = Gradients(*out)
    else:
        out = out or empty_gradients(*heads)
        of_tensors = out if packed is None else (packed,)
        others = _windows_backward(groups, do, tensors, mask, o, lse, seed, numbers, p, of_tensors, wants_mask)
        found = Gradients(*out, *others)
    return found if packed is None else found._replace(q=packed, k=None, v=None)


def _relative(p: LastArguments) -> Relative | None:
    return None if p.rows is None or p.columns is None else Relative(p.rows, p.columns)


# ---- sequences ----


class _Sequence(NamedTuple):
    """One sequence: its parts (1, N, H, d) of q's tensors and of k's, (1, H, N) of the LSE, its mask and its seed."""

    of_q: list[Tensor]
    of_k: list[Tensor]
    lse: Tensor
    mask: Tensor | None
    seed: Tensor | None


def _sequences(
    groups: Sequences, mask: Tensor | None, seed: Tensor | None, lse: Tensor, of_q: Sequence[Tensor],
    of_k: Sequence[Tensor],
) -> Iterator[_Sequence]:  # fmt: skip
    """Yield the sequences of q's tensors (T, H, d), of those of k, and of lse."""
    T, H, _ = of_q[0].shape
    numbers = lse_shape(of_q[0], mask, groups)[0] // max(T * H, 1)  # of each query

    def part(i: int, first: int, end: int, first_k: int, end_k: int) -> _Sequence:
        shape = (1, H, end - first) if numbers < 2 else (1, H, numbers, end - first)
        lse_part = lse[numbers * first * H : numbers * end * H].view(shape)
        mask_part = None if mask is None else mask[:, :, : max(end - first, 1), : end_k - first_k]
        tensors = [t[None, first:end] for t in of_q], [t[None, first_k:end_k] for t in of_k]
        return _Sequence(*tensors, lse_part, mask_part, None if seed is None else seed + i)

    if is_fake(groups.ends):  # the longest sequence needs the memory of all
        yield part(0, 0, min(groups.longest, T), 0, min(groups.longest_k, of_k[0].shape[0]))
        return
    ends = ends_k = checked_ends("", groups.ends, groups.longest, T)
    if groups.ends_k is not None:
        ends_k = checked_ends("_k", groups.ends_k, groups.longest_k, of_k[0].shape[0])
    for i, (of_queries, of_keys) in enumerate(zip(pairwise(ends), pairwise(ends_k), strict=True)):
        if of_queries[0] < of_queries[1] or of_keys[0] < of_keys[1]:
            yield part(i, *of_queries, *of_keys)


def checked_ends(which: str, cu_seqlens: Tensor, max_seqlen: int, T: int) -> list[int]:
    """Check the values of cu_seqlens; return them. which: "_k" for those of k."""
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != T or ends != sorted(ends):
        raise ValueError(f"cu_seqlens{which} must ascend from 0 to the number of tokens {T}, got {ends}")
    if (longest := max(end - first for first, end in pairwise(ends))) > max_seqlen:
        raise ValueError(
            f"max_seqlen{which} must be at least the longest sequence's length {longest}, got {max_seqlen}"
        )
    return ends


# ---- windows ----


class _Cut(NamedTuple):
    """How a grid is cut. Tokens are gathered by an index: `to_windows` itself, which rolls, pads and copies, makes
    attention in shifted windows take a CPU 1.15 times as long forward, and 1.6 times in both passes.

    tokens: (windows * n), the token at each index of the windows. indices: (gh * gw), each token's index. apart: as
    `apart_in_windows` returns it. padded: (windows, n, 1, 1) bool, where no token exists, or None. n: tokens of a
    window."""

    tokens: Tensor
    indices: Tensor
    apart: tuple[Tensor, Tensor] | None
    padded: Tensor | None
    n: int

    def cut(self, x: Tensor) -> Tensor:
        """Return x (B, gh, gw, ...) as (B * windows, n, ...)."""
        return x.flatten(1, 2).index_select(1, self.tokens).unflatten(1, (-1, self.n)).flatten(0, 1)

    def join(self, x: Tensor, out: Tensor) -> None:
        """Write x (B * windows, n, ...) to out (B, gh, gw, ...)."""
        tokens = x.unflatten(0, (len(out), -1)).flatten(1, 2)
        torch.index_select(tokens, 1, self.indices, out=out.flatten(1, 2))


def _cut_of(grid: Size, window: Size, shift: Size, device: Any) -> _Cut:
    (gh, gw), (wh, ww) = grid, window
    tokens = to_windows(torch.arange(gh * gw, device=device).view(1, gh, gw), window, shift)
    indices = from_windows(torch.arange(tokens.numel(), device=device).view(tokens.shape), grid, window, shift)
    apart = apart_in_windows(grid, window, shift, device)
    padded = apart[1].view(-1, wh * ww, 1, 1) if apart and (gh % wh or gw % ww) else None
    return _Cut(tokens.flatten(), indices.flatten(), apart, padded, wh * ww)


_remembered = functools.lru_cache(16)(_cut_of)


class _Samples(NamedTuple):
    """Some samples of a grid, cut into windows. tensors: q, k and v, or all of them in one."""

    samples: slice
    grid: _Cut
    tensors: list[Tensor]
    mask: Tensor | None
    relative: Relative | None
    seed: Tensor | None


def _samples(
    groups: Windows, mask: Tensor | None, seed: Tensor | None, tensors: Sequence[Tensor], p: LastArguments
) -> Iterator[_Samples]:
    """Yield all samples, or, where windows have masks of their own, one after the other, so that the masks are not
    repeated for all samples."""
    relative, x = _relative(p), tensors[0]
    if x.numel() == 0:
        return
    geometry = groups.grid, groups.window, groups.shift
    # what is made for fake tensors is fake, and what a CUDA graph captures is made when it is replayed
    cut_of = _cut_of if is_fake(x) or not x.is_cpu else _remembered
    grid = constant(lambda: cut_of(*geometry, x.device))
    mask = mask_of_windows(mask, *geometry, groups.shift_bias, x, grid.apart)
    alone = mask is not None and mask.shape[0] > 1
    for i, samples in enumerate([slice(i, i + 1) for i in range(len(x))] if alone else [slice(0, len(x))]):
        of_samples = None if relative is None else Relative(*[grid.cut(t[samples]) for t in relative])
        parts = [grid.cut(t[samples]) for t in tensors]
        yield _Samples(samples, grid, parts, mask, of_samples, None if seed is None else seed + i)


def _windows_backward(
    groups: Windows, do: Tensor, qkv: Sequence[Tensor], mask: Tensor | None, o: Tensor, lse: Tensor,
    seed: Tensor | None, numbers: tuple[float, float, bool], p: LastArguments, out: Sequence[Tensor], wants_mask: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Write the gradients of qkv; return those of rows, columns and the mask."""
    of_relative = empty_gradients(*_relative(p) or ())
    wide, dmask = mask, None
    if mask is not None and wants_mask:
        wide = mask.to(stat_dtype(do))  # each sample adds to its gradient
        dmask = torch.zeros(mask.shape, dtype=wide.dtype, device=mask.device)
    for part in _samples(groups, wide, seed, qkv, p):
        do_part, o_part, lse_part = part.grid.cut(do[part.samples]), o, lse
        if part.grid.padded is not None:
            do_part.masked_fill_(part.grid.padded.repeat(len(do_part) // groups.per_sample, 1, 1, 1), 0.0)
        if not wants_mask and part.relative is None:  # the gradients of masks and relative positions read neither
            o_part, lse_part = part.grid.cut(o[part.samples]), _of_samples(lse, part.samples, do)
        gradients = [torch.empty_like(t) for t in part.tensors]
        tensors = do_part, *unpacked(*part.tensors), part.mask, o_part, lse_part, part.seed
        found: Any = backward(*tensors, *numbers, part.relative, wants_mask=wants_mask, out=unpacked(*gradients))
        for gradient, whole in zip((*gradients, *found[3:5]), (*out, *of_relative), strict=False):
            part.grid.join(gradient, whole[part.samples])
        if dmask is not None:
            dmask += found.mask.sum_to_size(dmask.shape)
    drows, dcolumns = of_relative or (None, None)
    return drows, dcolumns, None if dmask is None or mask is None else dmask.to(mask.dtype)


def _of_samples(lse: Tensor, samples: slice, q: Tensor) -> Tensor:
    """View the LSE of some samples of q, by windows."""
    return lse.unflatten(0, (q.shape[0], -1))[samples].flatten(0, 1)
