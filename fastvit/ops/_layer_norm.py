"""The registered LayerNorm ops: ATen path, Triton launch, fakes. The gradients are in layer_norm.py.

All take rows [M, D] with statistics [M, 1]; `layer_norm_fwd` also contiguous tokens [B, N, D] with [B, N, 1], which the
backward ops read as [M, 1]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.ops import _library
from fastvit.ops._checks import as_rows, contiguous, row_stride, rows_and_columns
from fastvit.ops._column_sums import column_sums
from fastvit.ops._library import Unsupported, register, stat_dtype

if _library.HAVE_TRITON:
    import triton

    from fastvit.kernels import _configs
    from fastvit.kernels.layer_norm import layer_norm_bwd_kernel, layer_norm_fwd_kernel


# ---- ATen ----

_backward = torch.ops.aten.native_layer_norm_backward.default


def _fwd_aten(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _parameter_dtype(x)
    if weight.dtype is not dtype or bias.dtype is not dtype:  # x.to(x.dtype) takes 1 us
        weight, bias = weight.to(dtype), bias.to(dtype)
    y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
    return y if out_dtype is None or out_dtype is y.dtype else y.to(out_dtype), mean, rstd


def _parameter_dtype(x: Tensor) -> torch.dtype:
    """For which native_layer_norm keeps float32 statistics: on the CPU it stores them as the weight."""
    dtype = x.dtype
    return dtype if dtype is torch.float32 or x.is_cuda else stat_dtype(x)


def _bwd_aten(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, parameter_dtype = x.dtype, weight.dtype
    if dy.dtype != dtype:  # LayerNorm that also changed the dtype, under autocast
        x, dy = x.to(stat_dtype(x)), dy.to(stat_dtype(x))
    if weight.dtype is not _parameter_dtype(x):
        weight = weight.to(_parameter_dtype(x))
    dx, dweight, dbias = _backward(
        dy, x, (x.shape[1],), as_rows(mean), as_rows(rstd), weight, weight, (True, True, True)
    )
    if dx.dtype is not dtype:
        dx = dx.to(dtype)
    if dresidual is not None:
        dx.add_(dresidual)
    if dweight.dtype is not parameter_dtype:
        dweight, dbias = dweight.to(parameter_dtype), dbias.to(parameter_dtype)
    return dx, dweight, dbias


def _bwd_recompute_aten(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = torch.addcmul(bias, (x - as_rows(mean)).mul_(as_rows(rstd)), weight)
    return *_bwd_aten(dy, x, mean, rstd, weight, dresidual), y.to(dy.dtype)


def _branch_scale(layer_scale: Tensor | None, row_scale: Tensor | None, rows: int) -> Tensor | None:
    """row_scale * layer_scale as far as present, to multiply [M, D] with."""
    if row_scale is None:
        return layer_scale
    per_row = row_scale.repeat_interleave(rows)[:, None]
    return per_row if layer_scale is None else per_row * layer_scale


def _add_fwd_aten(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    rows: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = _branch_scale(layer_scale, row_scale, rows)
    s = residual + branch if scale is None else residual + (scale * branch).to(branch.dtype)
    return s, *_fwd_aten(s, weight, bias, eps, None)


def _add_bwd_aten(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    branch: Tensor,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ds, dweight, dbias = _bwd_aten(dy, s, mean, rstd, weight, dsum)
    scale = _branch_scale(layer_scale, row_scale, rows)
    dbranch = (ds if scale is None else ds * scale).to(branch.dtype, copy=scale is None)
    dlayer_scale = dweight.new_empty(0)
    if layer_scale is not None:
        per_row = _branch_scale(None, row_scale, rows)
        product = (ds * branch).to(stat_dtype(s))
        dlayer_scale = (product if per_row is None else product * per_row).sum(0).to(layer_scale.dtype)
    return ds, dbranch, dweight, dbias, dlayer_scale


# ---- Triton ----


def _check_triton(x: Tensor) -> None:
    if x.dtype is torch.float64:
        raise Unsupported("float64")
    if x.shape[-1] > _configs.MAX_ROW:
        raise Unsupported(f"rows of more than {_configs.MAX_ROW} elements")


def _launch_fwd(
    s: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    rows: int,
    eps: float,
    sum_out: Tensor | None,
    y: Tensor,
) -> tuple[Tensor, Tensor]:
    """Writes sum_out and y; returns mean, rstd [..., 1] f32."""
    M, D = rows_and_columns(s)
    mean, rstd = (torch.empty(*s.shape[:-1], 1, dtype=torch.float32, device=s.device) for _ in range(2))
    weight, bias, layer_scale, row_scale = contiguous(weight, bias, layer_scale, row_scale)
    cfg = _configs.layer_norm(D, arch=_library.arch(s))
    if M:
        most = _configs.FORWARD_PROGRAMS_PER_SM * _library.multiprocessors(s.device.index)
        layer_norm_fwd_kernel[(min(triton.cdiv(M, cfg.block_rows), most),)](
            s, branch, weight, bias, layer_scale, row_scale, sum_out, y, mean, rstd,
            M, D, rows, row_stride(s), 0 if branch is None else row_stride(branch), eps,
            HAS_ROW_SCALE=row_scale is not None,
            BLOCK_M=cfg.block_rows, BLOCK_D=cfg.block_dim, num_warps=cfg.num_warps,
            )  # fmt: skip
    return mean, rstd


def _launch_bwd(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    y: Tensor | None = None,
    branch: Tensor | None = None,
    dbranch: Tensor | None = None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rows: int = 1,
) -> tuple[Tensor, ...]:
    """-> ds [M, D] like s; dweight, dbias [D] and, with layer_scale, dlayer_scale [D]. Writes y and dbranch."""
    _check_triton(s)
    M, D = s.shape
    weight, bias, layer_scale, row_scale = contiguous(weight, bias, layer_scale, row_scale)
    ds = torch.empty(M, D, dtype=s.dtype, device=s.device)
    parameters = (weight, weight) if layer_scale is None else (weight, weight, layer_scale)
    if M == 0:
        return ds, *(torch.zeros_like(p) for p in parameters)
    cfg = _configs.layer_norm(D, backward=True, arch=_library.arch(s))
    programs = min(triton.cdiv(M, cfg.block_rows), _configs.PROGRAMS_PER_SM * _library.multiprocessors(s.device.index))
    partial = torch.empty(len(parameters), programs, D, dtype=torch.float32, device=s.device)
    layer_norm_bwd_kernel[(programs,)](
        dy, dsum, s, mean, rstd, weight, bias, branch, layer_scale, row_scale, ds, dbranch, y, partial,
        M, D, rows, dy.stride(0), 0 if dsum is None else dsum.stride(0), s.stride(0),
        0 if branch is None else branch.stride(0),
        HAS_ROW_SCALE=row_scale is not None,
        BLOCK_M=cfg.block_rows, BLOCK_D=cfg.block_dim, num_warps=cfg.num_warps,
    )  # fmt: skip
    return ds, *column_sums(partial, *parameters)


def _fwd_triton(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    _check_triton(x)
    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    return y, *_launch_fwd(x, None, weight, bias, None, None, 1, eps, None, y)


def _bwd_triton(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _launch_bwd(dy, dresidual, x, mean, rstd, weight)
    return dx, dweight, dbias


def _bwd_recompute_triton(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    dx, dweight, dbias = _launch_bwd(dy, dresidual, x, mean, rstd, weight, bias=bias, y=y)
    return dx, dweight, dbias, y


def _add_fwd_triton(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    rows: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(residual.dtype, branch.dtype)
    s = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    _check_triton(s)
    y = torch.empty_like(s)
    stats = _launch_fwd(residual, branch, weight, bias, layer_scale, row_scale, rows, eps, s, y)
    return s, y, *stats


def _add_bwd_triton(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    branch: Tensor,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dbranch = torch.empty(branch.shape, dtype=branch.dtype, device=branch.device)
    ds, dweight, dbias, *rest = _launch_bwd(
        dy, dsum, s, mean, rstd, weight,
        branch=branch, dbranch=dbranch, layer_scale=layer_scale, row_scale=row_scale, rows=rows,
    )  # fmt: skip
    return ds, dbranch, dweight, dbias, rest[0] if rest else weight.new_empty(0)


# ---- registration ----


def _fwd_fake(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(*x.shape[:-1], 1, dtype=stat_dtype(x)) for _ in range(2))
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), mean, rstd


def _bwd_fake(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _bwd_recompute_fake(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_bwd_fake(dy, x, mean, rstd, weight, dresidual), dy.new_empty(dy.shape)


def _add_fwd_fake(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s = residual.new_empty(residual.shape, dtype=torch.promote_types(residual.dtype, branch.dtype))
    return s, *_fwd_fake(s, weight, bias, 0.0, None)


def _add_bwd_fake(
    dy: Tensor,
    dsum: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    branch: Tensor,
    layer_scale: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dlayer_scale = weight.new_empty(0) if layer_scale is None else layer_scale.new_empty(layer_scale.shape)
    ds, dweight, dbias = _bwd_fake(dy, s, mean, rstd, weight, dsum)
    return ds, branch.new_empty(branch.shape), dweight, dbias, dlayer_scale


layer_norm_fwd = register(
    "layer_norm_fwd(Tensor x, Tensor weight, Tensor bias, float eps, ScalarType? out_dtype)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    aten=_fwd_aten, triton=_fwd_triton, fake=_fwd_fake,
)  # fmt: skip
layer_norm_bwd = register(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? dresidual)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    aten=_bwd_aten, triton=_bwd_triton, fake=_bwd_fake,
)  # fmt: skip
layer_norm_bwd_recompute = register(
    "layer_norm_bwd_recompute(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor bias,"
    " Tensor? dresidual) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor y)",
    aten=_bwd_recompute_aten, triton=_bwd_recompute_triton, fake=_bwd_recompute_fake,
)  # fmt: skip
add_layer_norm_fwd = register(
    "add_layer_norm_fwd(Tensor residual, Tensor branch, Tensor weight, Tensor bias, Tensor? layer_scale,"
    " Tensor? row_scale, int rows, float eps) -> (Tensor sum, Tensor y, Tensor mean, Tensor rstd)",
    aten=_add_fwd_aten, triton=_add_fwd_triton, fake=_add_fwd_fake,
)  # fmt: skip
add_layer_norm_bwd = register(
    "add_layer_norm_bwd(Tensor dy, Tensor? dsum, Tensor sum, Tensor mean, Tensor rstd, Tensor weight, Tensor branch,"
    " Tensor? layer_scale, Tensor? row_scale, int rows)"
    " -> (Tensor ds, Tensor dbranch, Tensor dweight, Tensor dbias, Tensor dlayer_scale)",
    aten=_add_bwd_aten, triton=_add_bwd_triton, fake=_add_bwd_fake,
)  # fmt: skip
