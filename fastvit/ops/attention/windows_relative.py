"""Softmax attention within the windows of a grid of tokens with decomposed relative positions: registration, gradient,
checks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastvit.ops.attention import windows_aten as aten
from fastvit.ops.attention.relative import check_tensors
from fastvit.ops.attention.window_layout import flops, lse_shape, relative_windows_of
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs
from fastvit.ops.runtime.call import Call
from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.ops.runtime.registry import register


def _fwd_fake(qkv: Tensor, rows: Tensor, columns: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    o, windows = qkv.new_empty((*qkv.shape[:3], *qkv.shape[4:])), relative_windows_of(qkv, rows, columns)
    return o, qkv.new_empty(lse_shape(qkv, None, windows), dtype=stat_dtype(qkv))


# qkv (B, gh, gw, 3, H, d), rows (B, gh, gw, H, wh), columns (B, gh, gw, H, ww): a window is wh x ww, and divides the
# grid. It is no argument: integers would be constants in a graph. `lse` as attention_windows's without a mask
attention_windows_relative_fwd = register(
    "attention_windows_relative_fwd(Tensor qkv, Tensor rows, Tensor columns, float scale) -> (Tensor o, Tensor lse)",
    aten=aten.attention_windows_relative_fwd,
    launch="attention.relative_launch",
    fake=_fwd_fake,
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

_NAMES = "qkv", "rows", "columns"
WindowsRelativeInputs = inputs(*_NAMES)


class AttentionWindowsRelative(FusedNode):
    """Its options are those of `attention_windows`."""

    Inputs = WindowsRelativeInputs
    casts = _NAMES
    keeps = ("lse",)
    saves = (*_NAMES, "result", "lse")

    @staticmethod
    def compute(t: Any) -> Computed:
        *tensors, o, call = t
        out, lse = attention_windows_relative_fwd(*tensors, o.scale, call=call)
        return (out,), {"lse": lse}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: Any, wants: Any, call: Call) -> dict[str, Any]:
        dtensors = attention_windows_relative_bwd(*douts, *s.values(), o.scale, call=call)
        return dict(zip(_NAMES, dtensors, strict=True))


def check_windows_relative(relative: Any, qkv: Tensor, window: tuple[int, int], *, dtype: bool) -> None:
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
