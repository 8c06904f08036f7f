"""Softmax attention within the windows of a grid of tokens, also with decomposed relative positions: registration,
gradients, checks, public function."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention import windows_aten as aten
from fastvit.ops.attention.aten import as_added, is_added
from fastvit.ops.attention.op import broadcast_mask, check_mask, checked_scale
from fastvit.ops.attention.relative import Relative, check_alone, check_tensors
from fastvit.ops.attention.window_layout import Windows, flops, lse_shape, relative_windows_of, windows_of
from fastvit.ops.dropout.op import draw_seeds
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs, needs_autograd
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.checks import check_float
from fastvit.ops.runtime.dtypes import autocast_dtype, stat_dtype
from fastvit.ops.runtime.registry import register
from fastvit.ops.runtime.run import Prepared, run


def _new_results(qkv: Tensor, mask: Tensor | None, windows: Windows) -> tuple[Tensor, Tensor]:
    o = qkv.new_empty((*qkv.shape[:3], *qkv.shape[4:]))
    return o, qkv.new_empty(lse_shape(qkv, mask, windows), dtype=stat_dtype(qkv))


# qkv (B, gh, gw, 3, H, d), `mask` (windows of a sample or 1, H or 1, n or 1, n) for windows of n tokens; `lse` (B *
# windows of a sample, H, n) or, with a float mask, (..., 2, n), as attention's. Windows go row by row through the
# rolled grid. Where a window lies outside of the grid, lse is that of zeros, or inf. Unless shift_bias is -inf, mask is
# a float tensor: with its two numbers for lse, P is exact where a bool mask leaves a query only tokens far below.
attention_windows_fwd = register(
    "attention_windows_fwd(Tensor qkv, Tensor? mask, Tensor? seed, int[] window, int[] shift, float shift_bias,"
    " float scale, float dropout_p) -> (Tensor o, Tensor lse)",
    aten=aten.attention_windows_fwd,
    launch="attention.windows_launch",
    fake=lambda qkv, mask, seed, window, *_: _new_results(qkv, mask, windows_of(qkv, window)),
    flops=lambda qkv, mask, seed, window, *_, **__: flops(qkv, window),
    decomposition=decompositions.attention_windows_fwd,
)
attention_windows_bwd = register(
    "attention_windows_bwd(Tensor do, Tensor qkv, Tensor? mask, Tensor o, Tensor lse, Tensor? seed, int[] window,"
    " int[] shift, float shift_bias, float scale, float dropout_p) -> Tensor",
    aten=aten.attention_windows_bwd,
    launch="attention.windows_launch",
    fake=lambda do, qkv, *_: qkv.new_empty(qkv.shape),
    flops=lambda do, qkv, mask, o, lse, seed, window, *_, **__: flops(qkv, window) * 5 // 2,
)
attention_windows_bwd_with_mask = register(
    "attention_windows_bwd_with_mask(Tensor do, Tensor qkv, Tensor mask, Tensor o, Tensor lse, Tensor? seed,"
    " int[] window, int[] shift, float shift_bias, float scale, float dropout_p) -> (Tensor dqkv, Tensor dmask)",
    aten=aten.attention_windows_bwd_with_mask,
    launch="attention.windows_launch",
    fake=lambda do, qkv, mask, *_: (qkv.new_empty(qkv.shape), mask.new_empty(mask.shape)),
    flops=lambda do, qkv, mask, o, lse, seed, window, *_, **__: flops(qkv, window) * 5 // 2,
)

# qkv (B, gh, gw, 3, H, d), rows (B, gh, gw, H, wh), columns (B, gh, gw, H, ww): a window is wh x ww, and divides the
# grid. It is no argument: integers would be constants in a graph. `lse` as attention_windows's without a mask
attention_windows_relative_fwd = register(
    "attention_windows_relative_fwd(Tensor qkv, Tensor rows, Tensor columns, float scale) -> (Tensor o, Tensor lse)",
    aten=aten.attention_windows_relative_fwd,
    launch="attention.relative_launch",
    fake=lambda qkv, rows, columns, *_: _new_results(qkv, None, relative_windows_of(qkv, rows, columns)),
    flops=lambda qkv, rows, columns, *_, **__: flops(qkv, (rows[4], columns[4])),
    decomposition=decompositions.attention_windows_relative_fwd,
)
attention_windows_relative_bwd = register(
    "attention_windows_relative_bwd(Tensor do, Tensor qkv, Tensor rows, Tensor columns, Tensor o, Tensor lse,"
    " float scale) -> (Tensor dqkv, Tensor drows, Tensor dcolumns)",
    aten=aten.attention_windows_relative_bwd,
    launch="attention.relative_launch",
    fake=lambda do, *inputs: tuple([t.new_empty(t.shape) for t in inputs[:3]]),
    flops=lambda do, qkv, rows, columns, *_, **__: flops(qkv, (rows[4], columns[4])) * 5 // 2,
)


class _Options(NamedTuple):
    op: str
    window: tuple[int, int]
    shift: tuple[int, int]
    shift_bias: float
    scale: float
    dropout_p: float
    cast: torch.dtype | None  # autocast's dtype


_Inputs = inputs("qkv", "mask", "seed")


class _AttentionWindows(FusedNode):
    Inputs = _Inputs
    casts = ("qkv",)
    keeps = ("lse",)
    saves = ("qkv", "mask", "seed", "result", "lse")

    @staticmethod
    def compute(t: Any) -> Computed:
        o, path, *tensors = t
        out, lse = attention_windows_fwd(*tensors, o.window, o.shift, o.shift_bias, o.scale, o.dropout_p, path=path)
        return (out,), {"lse": lse}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, wants: Any, path: Path) -> dict[str, Any]:
        qkv, mask, seed, out, lse = s.values()
        arguments = *douts, qkv, mask, out, lse, seed, o.window, o.shift, o.shift_bias, o.scale, o.dropout_p
        if wants.mask:
            dqkv, dmask = attention_windows_bwd_with_mask(*arguments, path=path)
            return {"qkv": dqkv, "mask": dmask}
        return {"qkv": attention_windows_bwd(*arguments, path=path)}


_RELATIVE_NAMES = "qkv", "rows", "columns"
_RelativeInputs = inputs(*_RELATIVE_NAMES)


class _AttentionWindowsRelative(FusedNode):
    Inputs = _RelativeInputs
    casts = _RELATIVE_NAMES
    keeps = ("lse",)
    saves = (*_RELATIVE_NAMES, "result", "lse")

    @staticmethod
    def compute(t: Any) -> Computed:
        o, path, *tensors = t
        out, lse = attention_windows_relative_fwd(*tensors, o.scale, path=path)
        return (out,), {"lse": lse}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, wants: Any, path: Path) -> dict[str, Any]:
        dtensors = attention_windows_relative_bwd(*douts, *s.values(), o.scale, path=path)
        return dict(zip(_RELATIVE_NAMES, dtensors, strict=True))


def attention_windows(
    qkv: Tensor, window: tuple[int, int], *, shift: tuple[int, int] = (0, 0), shift_bias: float = -math.inf,
    attn_mask: Tensor | None = None, relative: Relative | None = None, scale: float | None = None,
    dropout_p: float = 0.0,
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
        scale, dropout_p: as in `attention`.

    Returns:
        (B, gh, gw, H, d), contiguous, qkv's dtype; under autocast autocast's. The gradient of qkv is one packed tensor.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit.
    """
    window, shift = _pair("window", window), _pair("shift", shift)
    given = window, shift, shift_bias, scale, dropout_p
    out: Tensor = run("attention_windows", _prepared, (qkv, attn_mask, relative), given)
    return out


def _pair(name: str, value: Any) -> tuple[int, int]:
    """Return two integers as a tuple."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(i, (int, torch.SymInt)) and not isinstance(i, bool) for i in pair):
        raise TypeError(f"{name} must be two integers, got {value!r}")
    return pair


def _prepared(
    qkv: Tensor, attn_mask: Any, relative: Any, window: tuple[int, int], shift: tuple[int, int], shift_bias: float,
    scale: float | None, dropout_p: float,
) -> Prepared:  # fmt: skip
    check_float("qkv", qkv)
    if qkv.dim() != 6 or qkv.shape[3] != 3:
        raise ValueError(f"qkv must have shape (B, gh, gw, 3, H, d), got {tuple(qkv.shape)}")
    if min(window) < 1:
        raise ValueError(f"window must be at least (1, 1), got {window}")
    if not all(0 <= by < side for by, side in zip(shift, window, strict=True)):
        raise ValueError(f"shift must be from (0, 0) to less than the window {window}, got {shift}")
    if not -math.inf <= shift_bias < math.inf:
        raise ValueError(f"shift_bias must be -inf or finite, got {shift_bias}")
    scale = checked_scale(qkv.shape[5], scale, dropout_p)
    options = _Options("attention_windows", window, shift, float(shift_bias), scale, dropout_p, autocast_dtype(qkv))
    if relative is not None:
        check_alone(attn_mask=attn_mask, shift=shift, dropout_p=dropout_p)
        _check_relative(relative, qkv, window, dtype=options.cast is None)
        autograd = needs_autograd("attention_windows", qkv, *relative)
        return _AttentionWindowsRelative, autograd, options, (qkv, *relative)
    mask = None
    if attn_mask is not None:
        windows = windows_of(qkv, window)
        check_mask(attn_mask, "qkv", qkv, windows.per_sample, windows.tokens, qkv.shape[4], batch_name="windows")
        mask = broadcast_mask(attn_mask, windows.tokens)
    if shift_bias != -math.inf and not is_added(mask):
        nothing = qkv.new_zeros(1, 1, 1, window[0] * window[1])
        mask = nothing if mask is None else as_added(mask, qkv.dtype)
    seed = draw_seeds(1, qkv.device) if dropout_p > 0.0 else None
    return _AttentionWindows, needs_autograd("attention_windows", qkv, attn_mask), options, (qkv, mask, seed)


def _check_relative(relative: Any, qkv: Tensor, window: tuple[int, int], *, dtype: bool) -> None:
    """Check relative positions for qkv (B, gh, gw, 3, H, d). dtype: whether they must have qkv's."""
    B, gh, gw, _, H, _ = qkv.shape
    wh, ww = window
    shapes = {
        "rows": ((B, gh, gw, H, wh), "(B, gh, gw, H, wh)"),
        "columns": ((B, gh, gw, H, ww), "(B, gh, gw, H, ww)"),
    }
    check_tensors(relative, "qkv", qkv, shapes, dtype)
    if gh % wh or gw % ww:
        raise ValueError(f"window must divide qkv's grid ({gh}, {gw}) with relative, got {window}")
