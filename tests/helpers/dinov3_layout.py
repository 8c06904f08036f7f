"""Modules with the names and layout of Meta's DINOv3 repository (`dinov3.layers`), which is on no package index. They
are written for the tests: `accelerate` takes them for the classes that it knows."""

import dinov2_layout
import torch
import torch.nn.functional as F
from stand_ins import defined_in, library_class
from torch import Tensor, nn

from fastvit import reference

Rope = tuple[Tensor, Tensor] | None


LayerScale = library_class("dinov3.layers.layer_scale.LayerScale", reference.LayerScale)
Mlp = library_class("dinov3.layers.ffn_layers.Mlp", dinov2_layout.Mlp)
PatchEmbed = library_class("dinov3.layers.patch_embed.PatchEmbed", reference.PatchEmbed)


@defined_in("dinov3.layers.ffn_layers")
class SwiGLUFFN(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(dim, hidden)
        self.w3 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


@defined_in("dinov3.layers.attention")
class LinearKMaskedBias(nn.Linear):
    bias_mask: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 3 * dim)
        self.register_buffer("bias_mask", torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias * self.bias_mask)


def rotated(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """In the tables' dtype, which the repository lets the model choose."""
    prefix, patches = x.to(sin.dtype).split([x.shape[2] - sin.shape[-2], sin.shape[-2]], dim=2)
    first, second = patches.chunk(2, dim=-1)
    return torch.cat([prefix, patches * cos + torch.cat([-second, first], dim=-1) * sin], dim=2).to(x.dtype)


@defined_in("dinov3.layers.attention")
class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = LinearKMaskedBias(dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_bias: Tensor | None = None, rope: Rope = None) -> Tensor:
        assert attn_bias is None
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if rope is not None:
            q, k = rotated(q, *rope), rotated(k, *rope)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


@defined_in("dinov3.layers.block")
class SelfAttentionBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, mlp: type[nn.Module] = Mlp) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-5)
        self.attn = SelfAttention(dim, num_heads)
        self.ls1 = LayerScale(dim, 0.5)
        self.norm2 = nn.LayerNorm(dim, eps=1e-5)
        self.mlp = mlp(dim, 2 * dim)
        self.ls2 = LayerScale(dim, 0.5)
        self.sample_drop_ratio = 0.0

    def forward(
        self, x_or_x_list: Tensor | list[Tensor], rope_or_rope_list: Rope | list[Rope] = None
    ) -> Tensor | list[Tensor]:
        if isinstance(x_or_x_list, Tensor):
            return self._tokens(x_or_x_list, rope_or_rope_list)  # type: ignore[arg-type]
        ropes = rope_or_rope_list or [None] * len(x_or_x_list)
        return [self._tokens(x, rope) for x, rope in zip(x_or_x_list, ropes, strict=True)]  # type: ignore[arg-type]

    def _tokens(self, x: Tensor, rope: Rope) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x), rope=rope))
        return x + self.ls2(self.mlp(self.norm2(x)))
