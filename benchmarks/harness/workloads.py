"""The shapes at which the launches of the ops are compiled and counted: widths, head dimensions and lengths of ViTs.

Every function runs one op, forward and backward, on meta tensors of the given dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.codegen.launches import Workload
from fastvit import ops

WIDTHS = (192, 384, 512, 768, 1024, 1152, 1280, 1408, 1664)
LENGTHS = (17, 65, 197, 256, 257, 577, 1024, 1025, 1370, 4097)
HEAD_DIMS = (16, 32, 64, 72, 80, 88, 96, 104, 128, 256)
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")
BATCH = 64


def workloads(op: str | None = None, *, quick: bool = False) -> list[Workload]:
    """All of them, those of one op, or the few that touch every kernel once."""
    found = [w for w in _all() if (op is None or w.op == op) and (w.quick or not quick)]
    if not found:
        raise ValueError(f"no workload of op {op!r}; ops: {sorted({w.op for w in _all()})}")
    return found


def _all() -> Iterator[Workload]:
    for D in WIDTHS:
        yield _case("layer_norm", f"D={D}", _layer_norm, D, quick=D == 768)
        yield _case("add_layer_norm", f"D={D}", _add_layer_norm, D, False)
        yield _case("add_layer_norm", f"D={D} scales", _add_layer_norm, D, True, quick=D == 768)
    for N in LENGTHS:
        yield _case("attention", f"N={N} d=64 packed", _attention_packed, N, 12, 64, 0.0, quick=N in (197, 1024, 1025))
    for d in HEAD_DIMS:
        for N in (197, 1370):
            yield _case("attention", f"N={N} d={d}", _attention, N, 8, d, 0.0, quick=d == 72)
    for N in (197, 577):
        yield _case("attention", f"N={N} d=64 dropout", _attention_packed, N, 12, 64, 0.1, quick=N == 577)
    yield _case("dropout", "D=768", _dropout, 768, quick=True)
    for D in WIDTHS:
        yield _case("linear", f"D={D}", _linear, D, None, False)
        yield _case("linear", f"D={D} scales", _linear, D, None, True, quick=D == 768)
        yield _case("mlp", f"D={D}", _mlp, D, "gelu", "activation", 0.0, False, quick=D == 768)
        yield _case("layer_norm_linear", f"D={D}", _layer_norm_linear, D, quick=D == 768)
        yield _case("layer_norm_mlp", f"D={D}", _layer_norm_mlp, D)
    for activation in ACTIVATIONS:
        yield _case("linear", f"D=768 {activation}", _linear, 768, activation, False, quick=activation == "gelu")
        for recompute in ("none", "activation", "all"):
            yield _case("mlp", f"D=768 {activation} {recompute}", _mlp, 768, activation, recompute, 0.0, True)
    yield _case("mlp", "D=768 dropout", _mlp, 768, "gelu", "activation", 0.1, True, quick=True)
    for patch, size, D in ((4, 32, 192), (8, 224, 768), (14, 518, 1024), (16, 224, 768), (32, 224, 768)):
        for kind in ("float", "uint8"):
            yield Workload(
                "patch_embed",
                f"{size}/{patch} D={D} {kind}",
                functools.partial(_patch_embed, patch, size, D, kind),
                quick=patch == 14 or (patch == 16 and kind == "float"),
                contiguous=patch,
                itemsize=1 if kind == "uint8" else None,
            )


def _case(op: str, label: str, function: Callable[..., None], *args: Any, quick: bool = False) -> Workload:
    return Workload(op, label, functools.partial(function, *args), quick)


def _tensor(*shape: int, dtype: torch.dtype, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def _backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])


def _layer_norm(D: int, dtype: torch.dtype) -> None:
    x, w, b = _tensor(BATCH, 197, D, dtype=dtype), _tensor(D, dtype=dtype), _tensor(D, dtype=dtype)
    _backward(ops.layer_norm(x, w, b))


def _add_layer_norm(D: int, scales: bool, dtype: torch.dtype) -> None:
    x, y = (_tensor(BATCH, 197, D, dtype=dtype) for _ in range(2))
    w, b, layer_scale = (_tensor(D, dtype=dtype) for _ in range(3))
    row_scale = _tensor(BATCH, dtype=torch.float32, grad=False)
    keywords: dict[str, Any] = {"layer_scale": layer_scale, "row_scale": row_scale} if scales else {}
    _backward(*ops.add_layer_norm(x, y, w, b, **keywords))


def _attention_packed(N: int, H: int, d: int, dropout_p: float, dtype: torch.dtype) -> None:
    qkv = _tensor(BATCH, N, 3, H, d, dtype=dtype)
    _backward(ops.attention_qkvpacked(qkv, dropout_p=dropout_p))


def _attention(N: int, H: int, d: int, dropout_p: float, dtype: torch.dtype) -> None:
    q, k, v = (_tensor(BATCH, N, H, d, dtype=dtype) for _ in range(3))
    _backward(ops.attention(q, k, v, dropout_p=dropout_p))


def _dropout(D: int, dtype: torch.dtype) -> None:
    _backward(ops.dropout(_tensor(BATCH, 197, D, dtype=dtype), 0.1))


def _scales(D: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "layer_scale": _tensor(D, dtype=dtype),
        "row_scale": _tensor(BATCH, dtype=torch.float32, grad=False),
        "residual": _tensor(BATCH, 197, D, dtype=dtype),
    }


def _linear(D: int, activation: str | None, scales: bool, dtype: torch.dtype) -> None:
    x, w, b = _tensor(BATCH, 197, D, dtype=dtype), _tensor(D, D, dtype=dtype), _tensor(D, dtype=dtype)
    keywords = _scales(D, dtype) if scales else {}
    _backward(ops.linear(x, w, b, activation=activation, **keywords))


def _mlp_weights(D: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = ((4 * D, D), (4 * D,), (D, 4 * D), (D,))
    return tuple(_tensor(*shape, dtype=dtype) for shape in shapes)


def _mlp(D: int, activation: str, recompute: str, dropout_p: float, scales: bool, dtype: torch.dtype) -> None:
    x = _tensor(BATCH, 197, D, dtype=dtype)
    keywords = _scales(D, dtype) if scales else {}
    keywords |= {"activation": activation, "recompute": recompute, "dropout_p": dropout_p}
    _backward(ops.mlp(x, *_mlp_weights(D, dtype), **keywords))


def _layer_norm_linear(D: int, dtype: torch.dtype) -> None:
    x, norm_weight, norm_bias = _tensor(BATCH, 197, D, dtype=dtype), *(_tensor(D, dtype=dtype) for _ in range(2))
    w, b = _tensor(3 * D, D, dtype=dtype), _tensor(3 * D, dtype=dtype)
    _backward(ops.layer_norm_linear(x, norm_weight, norm_bias, w, b))
    _backward(*ops.layer_norm_linear(x, norm_weight, norm_bias, w, b, return_residual=True))


def _layer_norm_mlp(D: int, dtype: torch.dtype) -> None:
    x, norm_weight, norm_bias = _tensor(BATCH, 197, D, dtype=dtype), *(_tensor(D, dtype=dtype) for _ in range(2))
    keywords = _scales(D, dtype) | {"residual": x}
    _backward(ops.layer_norm_mlp(x, norm_weight, norm_bias, *_mlp_weights(D, dtype), **keywords))


def _patch_embed(patch: int, size: int, D: int, kind: str, dtype: torch.dtype) -> None:
    n = (size // patch) ** 2
    w, b = _tensor(D, 3, patch, patch, dtype=dtype), _tensor(D, dtype=dtype)
    pos_embed, prefix = _tensor(n, D, dtype=dtype), _tensor(1, D, dtype=dtype)
    keywords: dict[str, Any] = {"pos_embed": pos_embed, "prefix": prefix}
    if kind == "uint8":
        image = _tensor(BATCH, 3, size, size, dtype=torch.uint8, grad=False)
        keywords |= {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    else:
        image = _tensor(BATCH, 3, size, size, dtype=dtype)
    _backward(ops.patch_embed(image, w, b, **keywords))
