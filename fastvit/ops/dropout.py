"""Dropout whose mask is drawn again in the backward pass instead of being stored: registration, gradient, function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.ops import _library
from fastvit.ops._checks import as_rows, check_dropout, check_float, contiguous
from fastvit.ops._library import FusedFunction, Unsupported, needs_autograd, once, register
from fastvit.ops._linear import out_dtype

if _library.HAVE_TRITON:
    import triton

    from fastvit.kernels import _configs
    from fastvit.kernels.dropout import dropout_kernel


def _aten(
    x: Tensor,
    seed: Tensor,
    p: float,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    rows: int,
) -> Tensor:
    # comparing raw 32-bit numbers takes a CPU a third of the time of bernoulli_
    generator = torch.Generator(x.device).manual_seed(int(seed))
    pairs = torch.empty(x.numel() // 2 + 1, dtype=torch.int64, device=x.device)
    numbers = pairs.random_(-(2**63), None, generator=generator).view(torch.int32)[: x.numel()].view(x.shape)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ge(numbers, min(round(p * 2**32), 2**32 - 1) - 2**31, out=out)
    out = out.mul_(x).mul_(1 / (1 - p)).to(out_dtype(x, layer_scale, residual))
    if row_scale is not None:
        out.view(row_scale.shape[0], rows, x.shape[1]).mul_(row_scale[:, None, None])
    if layer_scale is not None:
        out.mul_(layer_scale)
    return out if residual is None else out.add_(residual)


def _triton(
    x: Tensor,
    seed: Tensor,
    p: float,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    rows: int,
) -> Tensor:
    if x.dtype is torch.float64:
        raise Unsupported("float64")
    M, D = x.shape
    out = torch.empty(M, D, dtype=out_dtype(x, layer_scale, residual), device=x.device)
    layer_scale, row_scale = contiguous(layer_scale, row_scale)
    if x.numel():
        cfg = _configs.dropout(D)
        grid = (triton.cdiv(M, cfg.block_rows) * triton.cdiv(D, 4 * cfg.block_dim),)
        dropout_kernel[grid](
            x, seed, layer_scale, row_scale, residual, out,
            M, D, rows, x.stride(0), 0 if residual is None else residual.stride(0), p,
            BLOCK_M=cfg.block_rows, BLOCK_D=cfg.block_dim, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out


def _fake(
    x: Tensor,
    seed: Tensor,
    p: float,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    rows: int,
) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype(x, layer_scale, residual))


# residual + row_scale * layer_scale * dropout(x) on rows [M, D]. The mask depends on seed, p and shape only, so the op
# without a residual is its own gradient.
dropout_rows = register(
    "dropout(Tensor x, Tensor seed, float p, Tensor? layer_scale, Tensor? row_scale, Tensor? residual,"
    " int rows_per_sample) -> Tensor",
    aten=_aten, triton=_triton, fake=_fake,
)  # fmt: skip


def draw_seeds(count: int, device: torch.device) -> Tensor:
    """[count] int64 from the device's generator: follows torch.manual_seed and replays under checkpointing."""
    return torch.randint(0, 2**31 - 1, (count,), device=device)


def _run(x: Tensor, seed: Tensor, p: float) -> Tensor:
    return dropout_rows(as_rows(x), seed, p, None, None, None, 1).view(x.shape)


class _Dropout(FusedFunction):
    @staticmethod
    def forward(x: Tensor, seed: Tensor, p: float) -> Tensor:
        return _run(x, seed, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, seed, ctx.p = inputs
        ctx.save_for_backward(seed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return once("dropout", _run, dy, *ctx.saved_tensors, ctx.p), None, None


def dropout(x: Tensor, p: float, *, training: bool = True) -> Tensor:
    """Zeroes each element with probability p and divides the rest by 1 - p (Srivastava et al. 2014).

    Saves one seed for the backward pass, no mask. Reproducible under torch.manual_seed and activation checkpointing.
    The masks of the Triton and the ATen path differ for equal seeds.

    Args:
        x: (...), float32, float16, bfloat16 or float64, any strides.
        p: probability of zero, in [0, 1).
        training: False returns x itself, as does p = 0.

    Returns:
        (...), contiguous, x's dtype.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes and probabilities that do not fit.
    """
    check_float("x", x)
    check_dropout("p", p)
    if not training or p == 0.0 or x.numel() == 0:
        return x
    if x.dim() == 0:
        return dropout(x[None], p)[0]
    seed = draw_seeds(1, x.device)
    return _Dropout.apply(x, seed, p) if needs_autograd(x) else _run(x, seed, p)
