"""The public functions of softmax attention. Each is a spelling of the same op."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, Never

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fastvit._base.keywords import check_no_others
from fastvit.ops.attention.aten_samples import as_added
from fastvit.ops.attention.checks import (
    check_keys,
    check_keys_of_sequences,
    check_lengths,
    check_relative,
    check_relative_of_windows,
    check_windows,
    checked_mask,
    checked_mask_of_sequences,
    checked_scale,
)
from fastvit.ops.attention.groups import Relative, Windows, is_added
from fastvit.ops.attention.op import Attention, Options
from fastvit.ops.dropout.op import draw_seeds
from fastvit.ops.runtime.autograd import needs_autograd
from fastvit.ops.runtime.checks import check_dimensions
from fastvit.ops.runtime.dtypes import autocast_dtype
from fastvit.ops.runtime.run import Prepared, run


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False,
    relative: Relative | None = None, scale: float | None = None, dropout_p: float = 0.0, layout: str | None = None,
    **others: Never,
) -> Tensor:  # fmt: skip
    """Compute dropout(softmax(scale * q k^T + attn_mask)) v for q (B, M, H, d), k and v (B, N, H, d): tokens before
    heads. PyTorch's `scaled_dot_product_attention` takes heads before tokens: that is layout="bhnd". Takes O(M + N)
    memory in addition to the mask (Dao et al. 2022).

    Args:
        q: (B, M, H, d); float32, float16, bfloat16 or float64; any strides, read in place if the last dimension is
            contiguous. d is a multiple of 8 from 16 to 256.
        k, v: (B, N, H, d), as q, or with fewer heads; each then serves H / heads neighbouring heads of q (Ainslie et
            al. 2023, arXiv:2305.13245). N may differ from M: cross-attention (Vaswani et al. 2017, section 3.2.3).
        attn_mask: broadcastable to (B, H, M, N), or None. bool: True where a query sees a key. Any floating dtype:
            added to the scaled scores; it may require a gradient. The mask is read in place and never expanded. The
            output of a query that sees no key is zero. Only False and minus infinity hide a key: if all keys of a row
            have finite numbers, however low, the weights are the softmax of the float32 sums.
        is_causal: query i sees keys 0 to i only, of those that attn_mask lets it see. Needs no mask in memory.
        relative: relative positions of keys on a grid, or None. Their sums, the size of the scores, are never in memory
            at once. Takes no mask, causal order or dropout, and k and v with as many heads as q.
        scale: factor of the scores; d^-0.5 if None.
        dropout_p: probability of dropping an attention weight, in [0, 1). The dropout mask follows torch.manual_seed;
            it is not stored but drawn again in the backward pass. The Triton and the ATen route draw different masks.
        layout: "bnhd" for the shapes above, or "bhnd" for q (B, H, M, d), k, v (B, H, N, d) and a result like q, read
            and written by stride; attn_mask and relative stay as they are. None is "bnhd", with one warning in a
            process if q and k look like "bhnd": dimension 1 is at most 32, and dimension 2 at least twice as large.
        others: none. Names of other libraries, such as causal, are answered with the name here.

    Returns:
        (B, M, H, d), contiguous, q's dtype; under autocast autocast's. A NaN in one row of q makes that row NaN and no
        other.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit.
    """
    if others:
        check_no_others(others, attention)
    if layout is not None and layout != "bnhd":
        q, k, v = _heads_first(layout, q, k, v)
    op, tensors = "attention", (q, k, v, attn_mask, relative)
    out: Tensor = run(op, _of_samples, tensors, (op, is_causal, scale, dropout_p, layout is None))
    return out if layout is None or layout == "bnhd" else out.transpose(1, 2)


def attention_qkvpacked(
    qkv: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    dropout_p: float = 0.0, **others: Never,
) -> Tensor:  # fmt: skip
    """Compute `attention` of q, k, v = qkv.unbind(2), read in place. The gradient is one packed tensor.

    Args:
        qkv: (B, N, 3, H, d), as a qkv projection leaves it; dtypes, strides and d as in `attention`.
        attn_mask, is_causal, scale, dropout_p, others: as in `attention`.

    Returns:
        (B, N, H, d), contiguous, as from `attention`; view it as (B, N, H * d) for the output projection.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    if others:
        check_no_others(others, attention_qkvpacked)
    op, tensors = "attention_qkvpacked", (qkv, None, None, attn_mask, None)
    out: Tensor = run(op, _of_samples, tensors, (op, is_causal, scale, dropout_p))
    return out


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None,
    *, cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, dropout_p: float = 0.0, **others: Never,
) -> Tensor:  # fmt: skip
    """Compute `attention` within each of several sequences, such as images of several sizes, or windows. The sequences
    follow each other without padding (Dehghani et al. 2023, arXiv:2307.06304); tokens of different sequences do not see
    each other.

    Args:
        q: (T, H, d), the tokens of all sequences; dtypes, strides and d as in `attention`.
        k, v: as q, or with fewer heads, as in `attention`; with cu_seqlens_k, of another number of tokens (T_k, H, d).
        cu_seqlens: (B + 1,) int32 or int64, on q's device: where sequences begin and end, ascending from 0 to T. On a
            GPU the values are not checked, because that would wait for the GPU: tokens outside all sequences get NaN.
        max_seqlen: at least the length of the longest sequence; T if None. On a GPU a longer sequence gets NaN in its
            output and gradients.
        cu_seqlens_k, max_seqlen_k: the same of k and v, for cross-attention: as many sequences as q has. None if k and
            v have q's. Queries of a sequence without keys get zero.
        attn_mask: broadcastable to (1, H, max_seqlen, max_seqlen_k), or None: one mask for all sequences, of which each
            has the first rows and columns; as in `attention`, but without a gradient.
        is_causal: token i of a sequence sees its tokens 0 to i only.
        scale, dropout_p, others: as in `attention`.

    Returns:
        (T, H, d), contiguous, q's dtype; under autocast autocast's.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit; the values
            of cu_seqlens, and whether max_seqlen is too small, are checked on ATen only.
    """
    if others:
        check_no_others(others, attention_varlen)
    op, tensors = "attention_varlen", (q, k, v, cu_seqlens, cu_seqlens_k, attn_mask)
    out: Tensor = run(op, _of_sequences, tensors, (op, max_seqlen, max_seqlen_k, is_causal, scale, dropout_p))
    return out


def attention_varlen_qkvpacked(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, dropout_p: float = 0.0, **others: Never,
) -> Tensor:  # fmt: skip
    """Compute `attention_varlen` of q, k, v = qkv.unbind(1), read in place. The gradient is one packed tensor.

    Args:
        qkv: (T, 3, H, d), as a qkv projection of the tokens of all sequences leaves it; dtypes, strides and d as in
            `attention`.
        cu_seqlens, max_seqlen, attn_mask, is_causal, scale, dropout_p, others: as in `attention_varlen`.

    Returns:
        (T, H, d), contiguous, as from `attention_varlen`.

    Raises:
        TypeError, ValueError: as `attention_varlen`.
    """
    if others:
        check_no_others(others, attention_varlen_qkvpacked)
    op, tensors = "attention_varlen_qkvpacked", (qkv, None, None, cu_seqlens, None, attn_mask)
    out: Tensor = run(op, _of_sequences, tensors, (op, max_seqlen, None, is_causal, scale, dropout_p))
    return out


def attention_windows(
    qkv: Tensor, window: tuple[int, int], *, shift: tuple[int, int] = (0, 0), shift_bias: float = -math.inf,
    attn_mask: Tensor | None = None, relative: Relative | None = None, scale: float | None = None,
    dropout_p: float = 0.0, **others: Never,
) -> Tensor:  # fmt: skip
    """Compute `attention` within the windows of a grid of tokens, with a cyclic shift (Liu et al. 2021,
    arXiv:2103.14030, section 3.2). The tokens stay where they are: there is no copy into windows and back, and neither
    the mask of the shift nor attn_mask is repeated over the windows.

    The grid is rolled up and to the left by `shift`, then cut into windows from the top left on. Where only the roll
    has made tokens neighbours, `shift_bias` is added to their scores. Where the grid is not a multiple of the window,
    the last windows are smaller: what lies outside does not exist. Libraries pad the grid with zeros instead and attend
    to the padding; for their results, pad qkv's input.

    Args:
        qkv: (B, gh, gw, 3, H, d), as a qkv projection leaves it for a grid; dtypes and d as in `attention`, any
            strides, read in place if rows of the grid follow each other.
        window: rows and columns of a window, (wh, ww), at least 1.
        shift: how many rows and columns the grid is rolled by, each from 0 to less than the window's.
        shift_bias: what is added to the scores of tokens that only the roll has made neighbours. -inf hides them. Swin
            in timm, torchvision and transformers adds -100, which does not hide a token whose score is 100 higher.
        attn_mask: broadcastable to (windows, H, n, n) for n = wh * ww, or None; bool or float as in `attention`. One
            mask for each window of a sample, counted row by row in the rolled grid, the same for all samples; or one
            for all windows, as a relative position bias is. It may require a gradient.
        relative: decomposed relative positions within the windows, or None. Takes no shift, mask or dropout, and a grid
            that the windows divide: pad it before the projection, as SAM and ViTDet do. The whole grid may be a window.
        scale, dropout_p, others: as in `attention`.

    Returns:
        (B, gh, gw, H, d), contiguous, qkv's dtype; under autocast autocast's. The gradient of qkv is one packed tensor.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit.
    """
    if others:
        check_no_others(others, attention_windows)
    given = _pair("window", window), _pair("shift", shift), shift_bias, scale, dropout_p
    out: Tensor = run("attention_windows", _of_windows, (qkv, attn_mask, relative), given)
    return out


# ---- what the functions check, and the inputs of the node ----


def _heads_first(layout: str, *tensors: Tensor) -> list[Tensor]:
    """Return q, k and v of the layout "bhnd" with tokens before heads."""
    if layout != "bhnd":
        raise ValueError(f"layout must be 'bnhd' or 'bhnd', got {layout!r}")
    for name, t in zip("qkv", tensors, strict=True):
        check_dimensions(name, t, "B, H, N, d")
    return [t.transpose(1, 2) for t in tensors]


def _look_heads_first(*tensors: Tensor) -> bool:
    """Return whether all of them may be (B, H, N, d). Not asked while sizes are symbols, which would add guards."""
    return not is_dynamo_compiling() and all(
        isinstance(few, int) and isinstance(many, int) and 1 <= few <= 32 and many >= 2 * few
        for few, many in (t.shape[1:3] for t in tensors)
    )


@functools.cache  # once in a process
def _warn_of_layout() -> None:
    warnings.warn(
        "fastvit.ops.attention reads dimension 1 as tokens and 2 as heads, and q and k have few of the former: if they "
        'are (B, H, N, d), as for scaled_dot_product_attention, pass layout="bhnd"; if not, layout="bnhd"',
        stacklevel=5,
    )


def _of_samples(
    q: Tensor, k: Any, v: Any, attn_mask: Any, relative: Any, op: str, is_causal: bool, scale: float | None,
    dropout_p: float, no_layout: bool = False,
) -> Prepared:  # fmt: skip
    packed = op == "attention_qkvpacked"
    name = "qkv" if packed else "q"
    check_dimensions(name, q, "B, N, 3, H, d" if packed else "B, M, H, d")
    cast = autocast_dtype(q)
    if not packed:
        check_keys(q, k, v, dtype=cast is None)
        if no_layout and _look_heads_first(q, k):
            _warn_of_layout()
    scale = checked_scale(q.shape[-1], scale, dropout_p, is_causal)
    rows = columns = None
    if relative is not None:
        others = {"attn_mask": attn_mask, "is_causal": is_causal, "dropout_p": dropout_p}
        check_relative(relative, q, k, dtype=cast is None, **others)
        rows, columns = relative
    elif attn_mask is not None:
        full = q.shape[0], q.shape[-2], q.shape[1], (q if packed else k).shape[1]
        attn_mask = checked_mask(attn_mask, name, q, full, "B, H, N, N" if packed else "B, H, M, N")
    options = Options(op, cast, scale, dropout_p, is_causal)
    autograd = needs_autograd(op, q, k, v, attn_mask, rows, columns)
    return Attention, autograd, options, (q, k, v, attn_mask, _seed(q, dropout_p), rows, columns, None, None)


def _of_sequences(
    q: Tensor, k: Any, v: Any, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, attn_mask: Any, op: str,
    max_seqlen: int | None, max_seqlen_k: int | None, is_causal: bool, scale: float | None, dropout_p: float,
) -> Prepared:  # fmt: skip
    packed = op == "attention_varlen_qkvpacked"
    name = "qkv" if packed else "q"
    check_dimensions(name, q, "T, 3, H, d" if packed else "T, H, d")
    cast = autocast_dtype(q)
    if not packed:
        check_keys_of_sequences(q, k, v, own_tokens=cu_seqlens_k is not None, dtype=cast is None)
    scale = checked_scale(q.shape[-1], scale, dropout_p, is_causal)
    longest = longest_k = check_lengths(name, q, cu_seqlens, max_seqlen)
    if cu_seqlens_k is not None:
        longest_k = check_lengths("q", k, cu_seqlens_k, max_seqlen_k, "_k")
        if cu_seqlens_k.shape != cu_seqlens.shape:
            raise ValueError(
                f"cu_seqlens_k must have cu_seqlens' shape {tuple(cu_seqlens.shape)}, got {tuple(cu_seqlens_k.shape)}"
            )
    elif max_seqlen_k is not None:
        raise ValueError(f"max_seqlen_k must be None without cu_seqlens_k, got {max_seqlen_k}")
    if attn_mask is not None:
        of_keys = None if cu_seqlens_k is None else longest_k
        attn_mask = checked_mask_of_sequences(attn_mask, name, q, q.shape[-2], longest, of_keys)
    options = Options(op, cast, scale, dropout_p, is_causal, longest, longest_k)
    tensors = q, k, v, attn_mask, _seed(q, dropout_p), None, None, cu_seqlens, cu_seqlens_k
    return Attention, needs_autograd(op, q, k, v), options, tensors


def _of_windows(
    qkv: Tensor, attn_mask: Any, relative: Any, window: tuple[int, int], shift: tuple[int, int], shift_bias: float,
    scale: float | None, dropout_p: float,
) -> Prepared:  # fmt: skip
    check_dimensions("qkv", qkv, "B, gh, gw, 3, H, d")
    check_windows(window, shift, shift_bias)
    scale = checked_scale(qkv.shape[5], scale, dropout_p)
    cast = autocast_dtype(qkv)
    options = Options("attention_windows", cast, scale, dropout_p, False)
    if relative is not None:
        others = {"attn_mask": attn_mask, "shift": shift, "dropout_p": dropout_p}
        check_relative_of_windows(relative, qkv, window, dtype=cast is None, **others)
        autograd = needs_autograd("attention_windows", qkv, *relative)
        return Attention, autograd, options, (qkv, None, None, None, None, *relative, None, None)
    mask = None
    if attn_mask is not None:
        windows = Windows((qkv.shape[1], qkv.shape[2]), window, shift, shift_bias)
        full = windows.per_sample, qkv.shape[4], windows.tokens, windows.tokens
        mask = checked_mask(attn_mask, "qkv", qkv, full, "windows, H, N, N")
    if shift_bias != -math.inf and not is_added(mask):
        # with two numbers for the LSE, P is exact where a bool mask leaves a query only tokens far below
        nothing = qkv.new_zeros(1, 1, 1, window[0] * window[1])
        mask = nothing if mask is None else as_added(mask, qkv.dtype)
    options = options._replace(window=window, shift=shift, shift_bias=float(shift_bias))
    tensors = qkv, None, None, mask, _seed(qkv, dropout_p), *[None] * 4
    return Attention, needs_autograd("attention_windows", qkv, attn_mask), options, tensors


def _seed(x: Tensor, dropout_p: float) -> Tensor | None:
    return draw_seeds(1, x.device) if dropout_p > 0.0 else None


def _pair(name: str, value: Any) -> tuple[int, int]:
    """Return two integers as a tuple."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(i, (int, torch.SymInt)) and not isinstance(i, bool) for i in pair):
        raise TypeError(f"{name} must be two integers, got {value!r}")
    return pair
