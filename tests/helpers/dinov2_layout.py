"""Modules with the names and layout of Meta's DINOv2 repository (`dinov2.layers`), which is on no package index. They
are written for the tests: `accelerate` takes them for the classes that it knows."""

import torch.nn.functional as F
from stand_ins import defined_in, library_class
from torch import Tensor, nn

from fastvit import reference

LayerScale = library_class("dinov2.layers.layer_scale.LayerScale", reference.LayerScale)
PatchEmbed = library_class("dinov2.layers.patch_embed.PatchEmbed", reference.PatchEmbed)


@defined_in("dinov2.layers.mlp")
class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


@defined_in("dinov2.layers.swiglu_ffn")
class SwiGLUFFN(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden)
        self.w3 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


SwiGLUFFNFused = library_class("dinov2.layers.swiglu_ffn.SwiGLUFFNFused", SwiGLUFFN)


@defined_in("dinov2.layers.attention")
class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop: float | nn.Module = 0.0
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
        return self._attend(x, None, is_causal)

    def _attend(self, x: Tensor, attn_bias: Tensor | None, is_causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_bias, is_causal=is_causal)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


@defined_in("dinov2.layers.attention")
class MemEffAttention(Attention):
    def forward(self, x: Tensor, attn_bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self._attend(x, attn_bias)


@defined_in("dinov2.layers.block")
class NestedTensorBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = MemEffAttention(dim, num_heads)
        self.ls1 = LayerScale(dim, 0.5)
        self.drop_path1 = nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim)
        self.ls2 = LayerScale(dim, 0.5)
        self.drop_path2 = nn.Identity()
        self.sample_drop_ratio = 0.0

    def forward(self, x_or_x_list: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        if isinstance(x_or_x_list, list):
            return [self._tokens(x) for x in x_or_x_list]
        return self._tokens(x_or_x_list)

    def _tokens(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path1(self.ls2(self.mlp(self.norm2(x))))
