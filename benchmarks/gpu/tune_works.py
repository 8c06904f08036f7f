"""What benchmarks/gpu/tune.py times for every launch table, and the choices that it tries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastvit import ops

Choice = tuple[int, ...]  # in the order of fastvit.kernels._tuned.FIELDS
Run = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Work:
    """One op at one shape. `build(device)` gives the call to time, whose launches ask for choices of `table`."""

    table: str
    label: str
    build: Callable[[torch.device], Run]
    fixed: Mapping[str, Choice] = field(default_factory=dict)  # choices of other tables, at every key


def _normal(device: torch.device, *shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * std).to(torch.bfloat16).requires_grad_()


def _forward(function: Callable[[], Any]) -> Run:
    def run() -> tuple[Tensor, ...]:
        with torch.inference_mode():
            out = function()
        return out if isinstance(out, tuple) else (out,)

    return run


def _backward(function: Callable[[], Any], leaves: tuple[Tensor, ...]) -> Run:
    out = function()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)


def _step(function: Callable[[], Any], leaves: tuple[Tensor, ...]) -> Run:
    gradient = torch.randn_like(function())
    return lambda: torch.autograd.grad(function(), leaves, gradient)


def _layer_norm(M: int, D: int, backward: bool) -> Callable[[torch.device], Run]:
    def build(device: torch.device) -> Run:
        x, w, b = _normal(device, M, D), _normal(device, D), _normal(device, D)
        run = lambda: ops.layer_norm(x, w, b)  # noqa: E731
        return _backward(run, (x, w, b)) if backward else _forward(run)

    return build


def _attention(B: int, N: int, H: int, d: int, backward: bool) -> Callable[[torch.device], Run]:
    def build(device: torch.device) -> Run:
        qkv = _normal(device, B, N, 3, H, d)
        run = lambda: ops.attention_qkvpacked(qkv)  # noqa: E731
        return _backward(run, (qkv,)) if backward else _forward(run)

    return build


def _mlp(M: int, D: int) -> Callable[[torch.device], Run]:
    """Forward and backward, since fc1 and the gradient behind it share a choice."""

    def build(device: torch.device) -> Run:
        x = _normal(device, M, D)
        w1, w2 = _normal(device, 4 * D, D, std=D**-0.5), _normal(device, D, 4 * D, std=D**-0.5 / 2)
        b1, b2 = _normal(device, 4 * D), _normal(device, D)
        return _step(lambda: ops.mlp(x, w1, b1, w2, b2, residual=x), (x, w1, b1, w2, b2))

    return build


def _linear(M: int, N: int, K: int, activation: str | None, backward: bool = False) -> Callable[[torch.device], Run]:
    def build(device: torch.device) -> Run:
        x, w, b = _normal(device, M, K), _normal(device, N, K, std=K**-0.5), _normal(device, N)
        residual = None if activation else _normal(device, M, N)
        run = lambda: ops.linear(x, w, b, activation=activation, residual=residual)  # noqa: E731
        return _backward(run, (b,)) if backward else _forward(run)

    return build


def _patch_embed(B: int, px: int, patch: int, D: int, backward: bool) -> Callable[[torch.device], Run]:
    def build(device: torch.device) -> Run:
        image = _normal(device, B, 3, px, px).detach()
        w, b = _normal(device, D, 3, patch, patch, std=0.03), _normal(device, D)
        run = lambda: ops.patch_embed(image, w, b)  # noqa: E731
        return _backward(run, (w, b)) if backward else _forward(run)

    return build


_HEADS = ((64, (197, 257, 577, 1025, 1370, 4097, 16385)), *((d, (257, 1025)) for d in (72, 80, 88, 96, 128)))
_WIDTHS = (192, 384, 768, 1024, 1152, 1280, 1408, 1536, 1664)
_SPLIT = {"attention_bwd_short": (0, 64, 4, 2)}
_VENDOR_OFF = {"use_triton_gemm": (1,)}


def works(*, tiny: bool = False) -> Iterator[Work]:
    """In the order in which tables build on each other: a choice between two kernels comes after theirs."""
    widths, heads, rows = (_WIDTHS, _HEADS, 64 * 197) if not tiny else ((32,), ((16, (20,)),), 8)
    for backward in (False, True):
        for D in widths:
            yield Work("layer_norm", f"{rows}x{D}{' bwd' * backward}", _layer_norm(rows, D, backward))
    for D in widths:
        yield Work("column_sum", f"{rows}x{D}", _layer_norm(rows, D, True))
    for D in widths:
        yield Work("activation_backward", f"{rows}x{4 * D}", _linear(rows, 4 * D, D, "gelu", backward=True))
    shapes = [(1 if tiny else max(50_000 // N, 1), N, 1 if tiny else 16, d) for d, lengths in heads for N in lengths]
    for table in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_short"):
        for B, N, H, d in shapes:
            fixed = _SPLIT if table in ("bwd_dq", "bwd_dkdv") else {}
            if table != "bwd_short" or N <= 256:
                build = _attention(B, N, H, d, table != "fwd")
                yield Work(f"attention_{table}", f"B{B} N{N} H{H} d{d}", build, fixed)
    for D in (32,) if tiny else (384, 768, 1024, 1280):
        for M in (16,) if tiny else (197, 1370, 32 * 197, 256 * 197):
            yield Work("gemm", f"mlp {M}x{D}", _mlp(M, D), _VENDOR_OFF)
    for D in () if tiny else (384, 768, 1024, 1280):  # the interpreter runs all matmuls as Triton's
        for N, K, activation in ((4 * D, D, "gelu"), (D, 4 * D, None), (D, D, None)):
            M = 256 * 197
            yield Work("use_triton_gemm", f"{M}x{N}x{K} {activation or 'residual'}", _linear(M, N, K, activation))
    sizes = {(224, 16): (1, 32, 256), (224, 14): (1, 32, 128), (518, 14): (1, 16), (1024, 16): (1, 4)}
    for D in (32,) if tiny else (384, 768, 1024, 1280):
        for (px, patch), batches in ({(8, 4): (1,)} if tiny else sizes).items():
            for B in batches:
                for backward in (False, True):
                    label = f"B{B} {px}/{patch} D{D}{' bwd' * backward}"
                    yield Work("patch_embed", label, _patch_embed(B, px, patch, D, backward))


_ATTENTION = [(m, n, w, s) for m, n, w in ((64, 64, 4), (128, 64, 8), (128, 128, 8)) for s in (2, 3)] + [
    (64, 128, 4, 2), (64, 128, 8, 2), (128, 64, 4, 2), (64, 32, 4, 2)
]  # fmt: skip
_ATTENTION_BWD = [
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (128, 64, 8, 2), (64, 128, 8, 2), (128, 128, 8, 2),
    (64, 128, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2), (32, 128, 8, 2), (128, 32, 8, 2),
]  # fmt: skip
_GEMM = [
    (128, 128, 64, 8, 3, 128), (128, 128, 64, 8, 3, 0), (128, 128, 64, 8, 4, 0), (128, 128, 64, 4, 3, 0),
    (128, 256, 64, 8, 3, 0), (128, 256, 64, 8, 4, 0), (256, 128, 64, 8, 3, 0), (64, 128, 64, 4, 4, 0),
    (64, 64, 64, 4, 4, 0), (128, 64, 64, 4, 4, 0),
]  # fmt: skip
_PATCH = [
    (128, 128, 64, 8, 3), (128, 128, 32, 8, 4), (64, 64, 64, 4, 3), (64, 64, 32, 4, 4),
    (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 256, 64, 8, 3),
]  # fmt: skip


def candidates(table: str, key: tuple[int, ...]) -> list[Choice]:
    """What is tried besides the shipped choice. What does not compile or fit is found out by compiling."""
    if table == "layer_norm":
        width = max(1 << (key[0] - 1).bit_length(), 16)
        pairs = [(rows, warps) for rows in (1, 2, 4, 8, 16) for warps in (1, 2, 4, 8, 16)]
        return [(rows, warps) for rows, warps in pairs if 4 <= rows * width // (32 * warps) <= 32]
    if table == "column_sum":
        return [
            (16, 32, 4),
            (32, 32, 4),
            (32, 32, 8),
            (64, 32, 4),
            (64, 32, 8),
            (128, 16, 8),
            (32, 64, 4),
            (32, 128, 8),
        ]
    if table == "activation_backward":
        tiles = ((8, 256, 4), (4, 512, 4), (4, 256, 4), (8, 256, 8), (8, 128, 4), (16, 128, 4))
        return [(m, n, steps, warps) for m, n, warps in tiles for steps in (4, 8, 16)]
    if table == "attention_fwd":
        short = [(m, 0, warps, 2) for m, warps in ((64, 4), (128, 8), (64, 8))] if key[0] <= 288 else []
        return [*short, *_ATTENTION]
    if table in ("attention_bwd_dq", "attention_bwd_dkdv"):
        return list(_ATTENTION_BWD)
    if table == "attention_bwd_short":
        whole = [(64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 32, 8), (256, 64, 8), (256, 32, 8), (256, 64, 16)]
        return [(0, 64, 4, 2), *((m, n, warps, 2) for m, n, warps in whole if key[0] <= m <= 2 * key[0])]
    if table == "gemm":
        return [(m, n, k, group, *rest) for m, n, k, *rest in _GEMM for group in (1, 8)]
    if table == "use_triton_gemm":
        return [(0,), (1,)]
    if table == "patch_embed":
        return list(_PATCH)
    raise ValueError(f"no candidates for table {table!r}")
