"""Multi-head self-attention as a module, under timm's name, arguments and state_dict keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastvit import ops
from fastvit.blocks import read, read_timm, run
from fastvit.blocks.submodules import read_or_none, submodules
from fastvit.modules.arguments import (
    Device,
    Dtype,
    check_factory,
    check_heads,
    check_rates,
)
from fastvit.modules.norms import NormLayer, checked_norm_layer
from fastvit.modules.parts import attend


class Attention(nn.Module):
    """Multi-head self-attention, (B, N, D) -> (B, N, D), by `fastvit.ops.attention_qkvpacked`.

    A hook on `attn_drop` receives the probabilities (B, H, N, N): they are materialised while it is registered.

    Args:
        dim: D.
        num_heads: H, a divisor of D; D / H is a multiple of 8 from 16 to 256.
        qkv_bias, proj_bias: whether `qkv` and `proj` have one.
        attn_drop, proj_drop: dropout of the probabilities, and after the projection; in [0, 1).
        device, dtype: of the parameters.
        qk_norm: norm_layer(D / H) as `q_norm` and `k_norm`, which normalise every head of q and k (Dehghani et al.
            2023, arXiv:2302.05442).
        norm_layer: for qk_norm: a class (or partial), "layernorm" or "rmsnorm".
    """

    __module__ = "fastvit.layers"

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = False, proj_bias: bool = True,
        attn_drop: float = 0.0, proj_drop: float = 0.0, device: Device = None, dtype: Dtype = None,
        *, qk_norm: bool = False, norm_layer: str | NormLayer | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads("dim", dim, num_heads)
        check_rates(attn_drop=attn_drop, proj_drop=proj_drop)
        norm = checked_norm_layer(norm_layer, qk_norm=qk_norm)
        check_factory(device, dtype)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        if qk_norm:
            self.q_norm = norm(self.head_dim, device=device, dtype=dtype)
            self.k_norm = norm(self.head_dim, device=device, dtype=dtype)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend.

        Args:
            x: (B, N, D).
            attn_mask: broadcastable to (B, H, N, N), or None. bool: True where a query sees a key. Floating: added to
                the scaled scores; it may require a gradient. A mask of padding (B, N), True for tokens, is passed as
                `mask[:, None, None, :]`. For a query that sees no key the output is `proj`'s bias.
            is_causal: token i sees tokens 0 to i, and of these the ones that attn_mask allows.
        """
        attention = read_or_none(read_timm.read_attention, self)
        if attention is not None:
            return run.run_attention(x, attention, None, attn_mask, is_causal)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        if "q_norm" in self._modules:
            q, k, v = qkv.unbind(2)
            qkv = torch.stack((self.q_norm(q), self.k_norm(k), v), 2)
        if read_or_none(submodules, self, attn_drop=read.DROPOUT):
            p = self.attn_drop.p if self.attn_drop.training else 0.0
            out = ops.attention_qkvpacked(qkv, attn_mask=attn_mask, is_causal=is_causal, dropout_p=p)
        else:
            q, k, v = qkv.unbind(2)
            out = attend(self, q, k, v, attn_mask, is_causal)
        return self.proj_drop(self.proj(out.flatten(2)))
