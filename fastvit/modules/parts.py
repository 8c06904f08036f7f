"""Small parts of blocks, under timm's names and arguments: activations, LayerScale, stochastic depth, and attention
whose modules are called one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fastvit import ops
from fastvit.blocks import read, run
from fastvit.blocks.submodules import qualified_name, read_or_none, submodules
from fastvit.modules.arguments import Device, Dtype, with_known_arguments
from fastvit.ops.attention.aten import checked_ends
from fastvit.ops.attention.checks import check_causal, check_lengths, check_unmasked, checked_mask
from fastvit.ops.runtime.checks import check_float, takes_head_dim
from fastvit.ops.runtime.device import is_fake
from fastvit.reference import ops as plain

ActLayer = Callable[[], nn.Module]
LayerFactory = Callable[..., nn.Module]


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), OpenAI CLIP's approximation of GELU."""

    __module__ = "fastvit.layers"

    def forward(self, x: Tensor) -> Tensor:
        return plain.quick_gelu(x)


ACT_LAYERS: dict[str, ActLayer] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


@with_known_arguments
class LayerScale(nn.Module):
    """A learnt factor `gamma` (D,) for every channel of a branch (Touvron et al. 2021, arXiv:2103.17239).

    Args:
        dim: D.
        init_values: gamma's initial value.
        device, dtype: of the parameter.
    """

    __module__ = "fastvit.layers"

    def __init__(self, dim: int, init_values: float = 1e-5, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.init_values = init_values
        self.gamma = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.init_values)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


@with_known_arguments
class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016, arXiv:1603.09382): in training, drop whole samples of a branch.

    Args:
        drop_prob: its probability, in [0, 1].
        scale_by_keep: divide the branches that stay by 1 - drop_prob.

    `forward` takes x (B, ..., D), or x (T, D) with cu_seqlens as `fastvit.Block` has them: then it drops sequences.
    """

    __module__ = "fastvit.layers"

    def __init__(self, drop_prob: float = 0.0, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self.scale_by_keep = scale_by_keep

    def row_scale(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor | None:
        """Draw for a batch like x: (B,) of 0 and 1 / keep in x's dtype, or None if nothing is dropped. With cu_seqlens
        draw for the sequences of x (T, D), as `fastvit.Block` takes them: (T,)."""
        p = self.drop_prob if self.training else 0.0
        return run.draw_drop_path(x, p, self.scale_by_keep, cu_seqlens) if p else None

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        scale = self.row_scale(x, cu_seqlens)
        return x if scale is None else x * scale.view(-1, *[1] * (x.dim() - 1))

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:.3g}"


def mask_arguments(
    attn_mask: Tensor | None, is_causal: bool, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    rope: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments for a submodule: only those that are used, because a module in its place need not take the
    others."""
    used: dict[str, Any] = {} if rope is None else {"rope": rope}
    if cu_seqlens is not None:
        used |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    elif attn_mask is not None or is_causal:
        used |= {"attn_mask": attn_mask, "is_causal": is_causal}
    return used


def for_call(
    described: Any, x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Any:  # fmt: skip
    """Return what a module was read as, also None, for one call: as it is, or for the sequences of x (T, D). Check the
    arguments that say which."""
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen must be None without cu_seqlens, got {max_seqlen}")
        return described
    check_float("x", x)  # first, because torch.fx calls with a proxy for every argument
    check_unmasked(attn_mask, is_causal, of="cu_seqlens")
    if x.dim() != 2:
        raise ValueError(f"x must have shape (T, D) with cu_seqlens, got {tuple(x.shape)}")
    check_lengths("x", x, cu_seqlens, max_seqlen)
    return None if described is None else run.within_sequences(described, x, cu_seqlens, max_seqlen)


def check_takes(name: str, module: nn.Module, argument: str) -> None:
    """Check that a module, which may have been put in the place of another one, takes an argument by its name."""
    if not _takes(type(module).forward, argument):
        raise TypeError(f"{name} must take {argument}: the forward of {qualified_name(module)} does not")


def _takes(forward: Any, argument: str) -> bool:
    return argument in _arguments(forward) or "**" in _arguments(forward)


_takes._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as has_own_forward: not traced


@cache
def _arguments(forward: Any) -> set[str]:
    """Return the names of a function's arguments, and "**" if it takes any."""
    parameters = inspect.signature(forward).parameters.values()
    return {"**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters}


def dropped(drop_path: Any, branch: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Call the module of stochastic depth, which in training draws once a sequence."""
    lengths = {}
    if cu_seqlens is not None and drop_path.training and type(drop_path) is not nn.Identity:
        check_takes("a module of stochastic depth", drop_path, "cu_seqlens")
        lengths = {"cu_seqlens": cu_seqlens}
    scaled: Tensor = drop_path(branch, **lengths)
    return scaled


def attend(
    attn: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor:  # fmt: skip
    """Attend in a module with attn_drop and scale, q (B, M, H, d), k and v (B, N, H, d) -> (B, M, H, d), or with
    cu_seqlens (T, H, d) as `ops.attention_varlen`: by one op, unless it does not take d, or attn_drop has to be called
    with the probabilities (B, H, M, N), of sequences (1, H, T, T_k)."""
    if takes_head_dim(q.shape[-1]) and read_or_none(submodules, attn, attn_drop=read.DROPOUT) is not None:
        p = attn.attn_drop.p if attn.attn_drop.training else 0.0
        if cu_seqlens is not None:
            return ops.attention_varlen(
                q, k, v, cu_seqlens, max_seqlen, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k, scale=attn.scale,
                dropout_p=p,
            )  # fmt: skip
        return ops.attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=attn.scale, dropout_p=p, layout="bnhd"
        )
    if cu_seqlens is not None:
        of_q = of_k = _sequence_of_tokens("", q, cu_seqlens, max_seqlen)
        if cu_seqlens_k is not None:
            of_k = _sequence_of_tokens("_k", k, cu_seqlens_k, max_seqlen_k)
        return attend(attn, q[None], k[None], v[None], of_q[:, None] == of_k)[0]
    check_causal(is_causal)
    if attn_mask is not None:
        B, M, H, _ = q.shape
        checked_mask(attn_mask, "x", q, (B, H, M, k.shape[1]), "B, H, M, N")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q * attn.scale) @ k.transpose(-2, -1)
    weights = plain.visible_softmax(scores, attn_mask, is_causal, empty_rows=attn_mask is not None)
    return (attn.attn_drop(weights) @ v).transpose(1, 2)


def _sequence_of_tokens(which: str, x: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Tensor:
    """Return the sequence of each token, after the checks of `ops.attention_varlen`: of values on the CPU only."""
    longest = check_lengths("x", x, cu_seqlens, max_seqlen, which)
    if cu_seqlens.device.type == "cpu" and not (torch.compiler.is_compiling() or is_fake(cu_seqlens)):
        checked_ends(which, cu_seqlens, longest, x.shape[0])
    return run.sequence_of_tokens(x, cu_seqlens)
