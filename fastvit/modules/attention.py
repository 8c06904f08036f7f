"""Multi-head attention as modules, under timm's names, arguments and state_dict keys: of tokens to each other, and to
other tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastvit import ops
from fastvit.blocks import read_timm, run
from fastvit.blocks.submodules import read_or_none
from fastvit.blocks.unchanged import read_once
from fastvit.modules.arguments import Device, Dtype, check_heads, check_integers, with_known_arguments
from fastvit.modules.norms import NormLayer, checked_norm_layer
from fastvit.modules.parts import attend, for_call, mask_arguments
from fastvit.ops.runtime.checks import check_float


@with_known_arguments
class Attention(nn.Module):
    """Multi-head self-attention, (B, N, D) -> (B, N, D), by `fastvit.ops.attention_qkvpacked`.

    A hook on `attn_drop` receives the probabilities (B, H, N, N): they are materialised while it is registered.

    Args:
        dim: D.
        num_heads: H, a divisor of D; D / H is a multiple of 8 from 16 to 256.
        qkv_bias, proj_bias: whether q, k and v have a bias, and whether `proj` has.
        attn_drop, proj_drop: dropout of the probabilities, and after the projection; in [0, 1).
        device, dtype: of the parameters.
        qk_norm: norm_layer(D / H) as `q_norm` and `k_norm`, which normalise every head of q and k (Dehghani et al.
            2023, arXiv:2302.05442).
        norm_layer: for qk_norm: a class (or partial), "layernorm" or "rmsnorm".
        qkv_fused: one layer `qkv`, or the layers `q_proj`, `k_proj` and `v_proj`.
        k_bias: whether k has a bias if q and v have; without it the biases of `qkv` are parameters `q_bias`, `v_bias`.
        num_prefix_tokens, rotate_half: for rotary positions: the tokens before the patches, which have none, and
            whether heads are rotated by halves, as in DINOv3, or by neighbours.
    """

    __module__ = "fastvit.layers"

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = False, proj_bias: bool = True,
        attn_drop: float = 0.0, proj_drop: float = 0.0, device: Device = None, dtype: Dtype = None,
        *, qk_norm: bool = False, norm_layer: str | NormLayer | None = None, qkv_fused: bool = True,
        k_bias: bool = True, num_prefix_tokens: int = 0, rotate_half: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads("dim", dim, num_heads)
        norm = checked_norm_layer(norm_layer, qk_norm=qk_norm)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.num_prefix_tokens = num_prefix_tokens
        self.rotate_half = rotate_half
        if not qkv_fused:
            self.q_proj = nn.Linear(dim, dim, bias=qkv_bias, **factory)
            self.k_proj = nn.Linear(dim, dim, bias=qkv_bias and k_bias, **factory)
            self.v_proj = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        else:
            self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias and k_bias, **factory)
            if qkv_bias and not k_bias:
                self.q_bias = nn.Parameter(torch.zeros(dim, **factory))
                self.v_bias = nn.Parameter(torch.zeros(dim, **factory))
        if qk_norm:
            self.q_norm = norm(self.head_dim, **factory)
            self.k_norm = norm(self.head_dim, **factory)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def reset_parameters(self) -> None:
        for bias in self._parameters.values():  # q_bias and v_bias
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
        *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, rope: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend.

        Args:
            x: (B, N, D), or (T, D) with cu_seqlens.
            attn_mask: broadcastable to (B, H, N, N), or None. bool: True where a query sees a key. Floating: added to
                the scaled scores; it may require a gradient. A mask of padding (B, N), True for tokens, is passed as
                `mask[:, None, None, :]`. For a query that sees no key the output is `proj`'s bias.
            is_causal: token i sees tokens 0 to i, and of these the ones that attn_mask allows.
            cu_seqlens, max_seqlen: x has the tokens of several sequences one after the other, and attention stays
                within each, as in `fastvit.ops.attention_varlen`. They take neither a mask nor is_causal.
            rope: sin and cos side by side, (N - num_prefix_tokens, 2 * D / H), as `fastvit.modules.rope` makes them.
                With cu_seqlens (T, 2 * D / H); prefix tokens have sines of 0 and cosines of 1.
        """
        rotary = None if rope is None else read_timm.rotary(self, x, rope, cu_seqlens)
        attention = read_or_none(read_once, read_timm.read_attention, self)
        if cu_seqlens is not None or max_seqlen is not None:
            attention = for_call(attention, x, cu_seqlens, max_seqlen, attn_mask, is_causal)
        if attention is not None:
            return run.run_attention(x, attention, rotary, attn_mask, is_causal)
        if "q_proj" in self._modules:
            three = [layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        else:
            qkv, q_bias = self.qkv(x), getattr(self, "q_bias", None)
            if q_bias is not None:
                qkv = qkv + torch.cat((q_bias, torch.zeros_like(q_bias), self.v_bias))
            three = qkv.chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)) for t in three)
        if "q_norm" in self._modules:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = (ops.rotary(t if cu_seqlens is None else t[None], rotary).view(t.shape) for t in (q, k))
        out = attend(self, q, k, v, **mask_arguments(attn_mask, is_causal, cu_seqlens, max_seqlen))
        return self.proj_drop(self.proj(out.flatten(-2)))


@with_known_arguments
class CrossAttention(nn.Module):
    """Multi-head attention to other tokens (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3), x (B, M, D) and
    context (B, N, kv_dim) -> (B, M, D), by `fastvit.ops.attention`:

        proj(softmax(q(x) k(context)^T / sqrt(d) + attn_mask) v(context))

    The layers have the names of timm's `AttentionPoolLatent`: `q`, `kv` for k and v, and `proj`. A hook on `attn_drop`
    receives the probabilities (B, H, M, N): they are materialised while it is registered.

    Args:
        dim: D.
        num_heads: H, a divisor of D; D / H is a multiple of 8 from 16 to 256.
        qkv_bias, proj_bias: whether `q` and `kv` have one, and whether `proj` has.
        attn_drop, proj_drop: dropout of the probabilities, and after the projection; in [0, 1).
        device, dtype: of the parameters.
        kv_dim: channels of the context; None for D.
        qk_norm, norm_layer: as in `Attention`.
    """

    __module__ = "fastvit.layers"

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = False, proj_bias: bool = True,
        attn_drop: float = 0.0, proj_drop: float = 0.0, device: Device = None, dtype: Dtype = None,
        *, kv_dim: int | None = None, qk_norm: bool = False, norm_layer: str | NormLayer | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        kv_dim = dim if kv_dim is None else kv_dim
        check_heads("dim", dim, num_heads)
        check_integers(1, kv_dim=kv_dim)
        norm = checked_norm_layer(norm_layer, qk_norm=qk_norm)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.q = nn.Linear(dim, dim, bias=qkv_bias, device=device, dtype=dtype)
        self.kv = nn.Linear(kv_dim, 2 * dim, bias=qkv_bias, device=device, dtype=dtype)
        if qk_norm:
            self.q_norm = norm(self.head_dim, device=device, dtype=dtype)
            self.k_norm = norm(self.head_dim, device=device, dtype=dtype)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, context: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: (B, M, D), or (1, M, D) for queries that all samples share, for instance learnt ones.
            context: (B, N, kv_dim).
            attn_mask: broadcastable to (B, H, M, N), or None, as in `Attention`. A mask of padding of the context,
                (B, N), True for tokens, is passed as `mask[:, None, None, :]`.

        Raises:
            TypeError, ValueError: naming the argument, for dtypes and shapes that do not fit.
        """
        return self.proj_drop(self.proj(cross_attend(self, x, context, attn_mask)))


def cross_attend(attn: Any, x: Tensor, context: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Attend in a module with q, kv, attn_drop, scale, num_heads and perhaps norms, up to the projection: (B, M, D)."""
    check_float("x", x)
    check_float("context", context)
    D, kv_dim = (getattr(layer, "in_features", t.shape[-1]) for layer, t in ((attn.q, x), (attn.kv, context)))
    if context.dim() != 3 or context.shape[2] != kv_dim:
        raise ValueError(f"context must have shape (B, N, kv_dim) with kv_dim = {kv_dim}, got {tuple(context.shape)}")
    B = context.shape[0]
    if x.dim() != 3 or x.shape[0] not in (1, B):
        raise ValueError(f"x must have shape (B, M, D) or (1, M, D) with context's B = {B}, got {tuple(x.shape)}")
    if x.shape[2] != D:
        raise ValueError(f"x must have shape (B, M, D) with D = {D}, got {tuple(x.shape)}")
    q = attn.q(x).unflatten(-1, (attn.num_heads, -1))
    k, v = attn.kv(context).unflatten(-1, (2, attn.num_heads, -1)).unbind(2)
    if "q_norm" in attn._modules:
        q, k = attn.q_norm(q), attn.k_norm(k)
    return attend(attn, q.expand(B, -1, -1, -1), k, v, attn_mask).flatten(2)
