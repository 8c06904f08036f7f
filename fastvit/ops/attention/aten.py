"""Softmax attention on PyTorch's own functions. Packed sequences are computed one after the other; the tokens of a grid
are gathered by windows. Both are then samples (aten_samples.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention import window_places
from fastvit.ops.attention.aten_samples import backward, empty_gradients, forward, has_flash_backward
from fastvit.ops.attention.window_places import from_windows, mask_of_windows, to_windows
from fastvit.ops.attention.within import (
    Gradients,
    Heads,
    Positions,
    Relative,
    Sequences,
    Windows,
    lse_shape,
    unpacked,
    within_of,
)
from fastvit.ops.runtime.device import is_fake
from fastvit.ops.runtime.dtypes import stat_dtype


def attention_fwd(
    q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, seed: Tensor | None, scale: float,
    dropout_p: float, causal: bool = False, *positions: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    p, given = Positions(*positions), (q, k, v)
    q, k, v = unpacked(q, k, v)
    within, numbers = within_of(q, p), (scale, dropout_p, causal)
    if within is None:
        return forward(q, k, v, mask, seed, *numbers, _relative(p))
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty(lse_shape(q, mask, within), dtype=stat_dtype(q))
    if isinstance(within, Sequences):
        for one in _sequences(within, mask, seed, lse, (q, o), (k, v)):
            (its_q, out), (its_k, its_v) = one.of_q, one.of_k
            out[:], one.lse[:] = forward(its_q, its_k, its_v, one.mask, one.seed, *numbers)
    else:
        for some in _samples(within, mask, seed, given, p):
            out, its_lse = forward(*some.heads, some.mask, some.seed, *numbers, some.relative)
            some.store(out, o)
            lse.unflatten(0, (q.shape[0], -1))[some.at] = its_lse.unflatten(0, (-1, within.per_sample))
    return o, lse


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, o: Tensor, lse: Tensor,
    seed: Tensor | None, scale: float, dropout_p: float, causal: bool = False, wants_mask: bool = False,
    *positions: Any, out: Heads | None = None,
) -> Gradients:  # fmt: skip
    """Compute the gradients. out: three tensors to write those of q, k and v to, perhaps views of one packed buffer."""
    p, given, packed = Positions(*positions), (q, k, v), None
    heads = unpacked(q, k, v)
    within, numbers, relative = within_of(heads[0], p), (scale, dropout_p, causal), _relative(p)
    plain = within is None and relative is None and not wants_mask
    if k is None and plain and has_flash_backward(do, *heads, mask, seed, causal):
        # PyTorch's kernel allocates gradients; they are packed once its workspace is freed
        found: Any = backward(do, *heads, mask, o, lse, seed, *numbers)
        return Gradients(torch.stack(found[:3], 2))
    if k is None:
        packed = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out = unpacked(packed)
    if within is None:
        found = backward(do, *heads, mask, o, lse, seed, *numbers, relative, wants_mask=wants_mask, out=out)
    elif isinstance(within, Sequences):
        out = out or empty_gradients(*heads)
        for one in _sequences(within, mask, seed, lse, (do, heads[0], o, out[0]), (*heads[1:], *out[1:])):
            (its_do, its_q, its_o, to_q), (its_k, its_v, to_k, to_v) = one.of_q, one.of_k
            tensors = its_do, its_q, its_k, its_v, one.mask, its_o, one.lse, one.seed
            backward(*tensors, *numbers, out=(to_q, to_k, to_v))
        found = Gradients(*out)
    else:
        out = out or empty_gradients(*heads)
        into = out if packed is None else (packed,)
        found = Gradients(*out, *_windows_backward(within, do, given, mask, o, lse, seed, numbers, p, into, wants_mask))
    return found if packed is None else found._replace(q=packed, k=None, v=None)


def _relative(p: Positions) -> Relative | None:
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
    within: Sequences, mask: Tensor | None, seed: Tensor | None, lse: Tensor, of_q: Sequence[Tensor],
    of_k: Sequence[Tensor],
) -> Iterator[_Sequence]:  # fmt: skip
    """Yield the sequences of q's tensors (T, H, d), of those of k, and of lse."""
    T, H, _ = of_q[0].shape
    numbers = lse_shape(of_q[0], mask, within)[0] // max(T * H, 1)  # of each query

    def one(i: int, first: int, end: int, first_k: int, end_k: int) -> _Sequence:
        shape = (1, H, end - first) if numbers < 2 else (1, H, numbers, end - first)
        its_lse = lse[numbers * first * H : numbers * end * H].view(shape)
        its_mask = None if mask is None else mask[:, :, : max(end - first, 1), : end_k - first_k]
        parts = [t[None, first:end] for t in of_q], [t[None, first_k:end_k] for t in of_k]
        return _Sequence(*parts, its_lse, its_mask, None if seed is None else seed + i)

    if is_fake(within.ends):  # the longest sequence needs the memory of all
        yield one(0, 0, min(within.longest, T), 0, min(within.longest_k, of_k[0].shape[0]))
        return
    ends = ends_k = checked_ends("", within.ends, within.longest, T)
    if within.ends_k is not None:
        ends_k = checked_ends("_k", within.ends_k, within.longest_k, of_k[0].shape[0])
    for i, (of_queries, of_keys) in enumerate(zip(pairwise(ends), pairwise(ends_k), strict=True)):
        if of_queries[0] < of_queries[1] or of_keys[0] < of_keys[1]:
            yield one(i, *of_queries, *of_keys)


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


class _Samples(NamedTuple):
    """Some samples of a grid, gathered by windows: `tensors` are q, k and v, or all of them in one."""

    at: slice
    places: window_places.WindowPlaces
    tensors: list[Tensor]
    mask: Tensor | None
    relative: Relative | None
    seed: Tensor | None

    @property
    def heads(self) -> Heads:
        return unpacked(*self.tensors)

    def gathered(self, x: Tensor) -> Tensor:
        return to_windows(x[self.at], self.places)

    def store(self, in_windows: Tensor, x: Tensor) -> None:
        """Put these samples' windows into x (B, gh, gw, ...)."""
        from_windows(in_windows, self.places, x[self.at], out=x[self.at])


def _samples(
    within: Windows, mask: Tensor | None, seed: Tensor | None, qkv: Sequence[Tensor | None], p: Positions
) -> Iterator[_Samples]:
    """Yield all samples, or, where windows have masks of their own, one after the other, so that the masks are not
    repeated for all samples."""
    tensors, relative = [t for t in qkv if t is not None], _relative(p)
    B = tensors[0].shape[0]
    if tensors[0].numel() == 0:
        return
    places = window_places.of(tensors[0], within)
    mask = mask_of_windows(mask, places, within.shift_bias, tensors[0].dtype)
    alone = mask is not None and mask.shape[0] > 1
    for i, at in enumerate([slice(i, i + 1) for i in range(B)] if alone else [slice(0, B)]):
        its = None if relative is None else Relative(*[to_windows(t[at], places) for t in relative])
        gathered = [to_windows(t[at], places) for t in tensors]
        yield _Samples(at, places, gathered, mask, its, None if seed is None else seed + i)


def _windows_backward(
    within: Windows, do: Tensor, qkv: Sequence[Tensor | None], mask: Tensor | None, o: Tensor, lse: Tensor,
    seed: Tensor | None, numbers: tuple[float, float, bool], p: Positions, into: Sequence[Tensor], wants_mask: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Write the gradients of qkv; return those of rows, columns and the mask."""
    of_relative = empty_gradients(*_relative(p) or ())
    wide, dmask = mask, None
    if mask is not None and wants_mask:
        wide = mask.to(stat_dtype(do))  # each sample adds to its gradient
        dmask = torch.zeros(mask.shape, dtype=wide.dtype, device=mask.device)
    for some in _samples(within, wide, seed, qkv, p):
        its_do = some.gathered(do)
        if some.places.exists is not None:
            nowhere = ~some.places.exists.repeat(len(its_do) // within.per_sample, 1)
            its_do.masked_fill_(nowhere[:, :, None, None], 0.0)
        its_o, its_lse = o, lse  # the gradients of masks and relative positions read neither
        if not wants_mask and some.relative is None:
            its_o, its_lse = some.gathered(o), lse.unflatten(0, (do.shape[0], -1))[some.at].flatten(0, 1)
        of_tensors = [torch.empty_like(t) for t in some.tensors]
        given = its_do, *some.heads, some.mask, its_o, its_lse, some.seed, *numbers, some.relative
        its: Any = backward(*given, wants_mask=wants_mask, out=unpacked(*of_tensors))
        for gradient, x in zip((*of_tensors, *its[3:5]), (*into, *of_relative), strict=False):
            some.store(gradient, x)
        if dmask is not None:
            dmask += its.mask.sum_to_size(dmask.shape)
    drows, dcolumns = of_relative or (None, None)
    return drows, dcolumns, None if dmask is None or mask is None else dmask.to(mask.dtype)
