"""Small modules around attention, MLPs and norms, for `fastvit.compile`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

B, N, H, D = 2, 9, 2, 32
EPS = 1e-5


class FunctionModule(nn.Module):
    """A module of layers whose forward is a function(self, *inputs)."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._function = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(self, *inputs)


class RMSNorm(nn.Module):
    """The spelling of transformers' Llama."""

    def __init__(self, size: int = D) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * x.to(dtype)


NORMS = {"RMSNorm": RMSNorm, "LayerNorm": lambda size=D: nn.LayerNorm(size, EPS, bias=False)}


def half(forward: Callable[..., Any], **layers: Any) -> FunctionModule:
    """Return a module with norm, qkv, proj and more layers."""
    return FunctionModule(forward, norm=nn.LayerNorm(D), qkv=nn.Linear(D, 3 * D), proj=nn.Linear(D, D), **layers)


def mlp(forward: Callable[..., Any], hidden: int = 3 * D, widened: int = 1, **layers: Any) -> FunctionModule:
    """Return a module with norm, fc1, fc2 and more layers."""
    fc1, fc2 = nn.Linear(D, widened * hidden), nn.Linear(hidden, D)
    return FunctionModule(forward, norm=nn.LayerNorm(D), fc1=fc1, fc2=fc2, **layers)


def together(forwards: Iterable[Callable[..., Any]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return the forward that returns the outputs of all of these for the same inputs: one graph instead of many."""
    forwards = list(forwards)
    return lambda m, *inputs: tuple(t for forward in forwards for t in tensors(forward(m, *inputs)))


def heads(qkv: Tensor) -> tuple[Tensor, ...]:
    """(B, N, 3 * D) -> three of (B, H, N, d)"""
    return qkv.reshape(*qkv.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0)


def joined(attended: Tensor) -> Tensor:
    """(B, H, N, d) -> (B, N, D)"""
    return attended.transpose(1, 2).flatten(2)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.3


def tensors(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]
