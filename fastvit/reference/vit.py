"""The Vision Transformer of Dosovitskiy et al. (2021, arXiv:2010.11929) in plain PyTorch; its blocks are in `block.py`.

Read it next to the paper. It is written to be checked by eye, not to be fast: attention materialises its N x N matrix,
every step is its own line. The tests compare the fused model with it, and the benchmarks use it as their baseline. It
takes the same constructor arguments and the same `state_dict` as `fastvit.VisionTransformer`.

Later additions to the paper's model, each off by default:

    LayerScale (init_values)          Touvron et al. 2021, arXiv:2103.17239
    stochastic depth (drop_path_rate) Huang et al. 2016, arXiv:1603.09382
    registers (reg_tokens)            Darcet et al. 2023, arXiv:2309.16588
    norms of q and k (qk_norm of `Block`)  Dehghani et al. 2023, arXiv:2302.05442
    RMSNorm (norm_layer="rmsnorm")    Zhang & Sennrich 2019, arXiv:1910.07467
    pooling by a learnt query (global_pool="map")  Zhai et al. 2022, arXiv:2106.04560
    post-norm blocks (block_fn="postnorm")  Vaswani et al. 2017, arXiv:1706.03762
    fixed positions (pos_embed="sincos", "sincos2d")  Vaswani et al. 2017, arXiv:1706.03762; He et al. 2021,
                                      arXiv:2111.06377
    initial patch embedding (patch_init="kaiming")  He et al. 2015, arXiv:1502.01852

Shapes: B batch, N tokens, D embedding, H heads, d = D / H, P prefix tokens (CLS and registers), (h, w) the patch grid.
factory: device and dtype of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastvit.reference.block import ACTIVATIONS, BLOCKS, Block, LayerFactory, Mlp, make_norm

Size = int | tuple[int, int]


class PatchEmbed(nn.Module):
    """Equation 1: an image is a sequence of patches, each flattened and projected to D. As a convolution whose stride
    is its kernel size. (B, C, H, W) -> (B, h*w, D)."""

    def __init__(
        self, img_size: Size = 224, patch_size: Size = 16, in_chans: int = 3, embed_dim: int = 768, bias: bool = True,
        norm_layer: str | LayerFactory | None = None, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.patch_size = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        (H, W), (ph, pw) = self.img_size, self.patch_size
        self.grid_size = H // ph, W // pw
        self.num_patches = math.prod(self.grid_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, self.patch_size, self.patch_size, bias=bias, **factory)
        self.norm = make_norm(norm_layer, embed_dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class AttentionPoolLatent(nn.Module):
    """Attention of one learnt query to the tokens, a projection, then x + Mlp(LN(x)). (B, N, D) -> (B, D)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        norm_layer: str | LayerFactory,
        act_layer: LayerFactory,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.latent = nn.Parameter(torch.empty(1, 1, dim, **factory))
        self.q = nn.Linear(dim, dim, **factory)
        self.kv = nn.Linear(dim, 2 * dim, **factory)
        self.proj = nn.Linear(dim, dim, **factory)
        self.norm = make_norm(norm_layer, dim, **factory)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer, **factory)
        nn.init.trunc_normal_(self.latent, std=dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        H, d = self.num_heads, D // self.num_heads
        q = self.q(self.latent).reshape(1, 1, H, d).transpose(1, 2)  # (1, H, 1, d)
        k, v = self.kv(x).reshape(B, N, 2, H, d).permute(2, 0, 3, 1, 4)  # each (B, H, N, d)
        probabilities = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)  # (B, H, 1, N)
        y = self.proj((probabilities @ v).transpose(1, 2).reshape(B, D))
        return y + self.mlp(self.norm(y))


def sincos(dim: int, n: int) -> Tensor:
    """Vaswani et al. 2017, section 3.5: PE(p, 2i) = sin(p / 10000^(2i / D)), PE(p, 2i + 1) its cosine. (n, D)"""
    i = torch.arange(dim // 2, dtype=torch.float64)
    angles = torch.arange(n, dtype=torch.float64)[:, None] / 10000 ** (2 * i / dim)  # (n, D / 2)
    table = angles.new_empty(n, dim)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()
    return table


def sincos2d(dim: int, h: int, w: int) -> Tensor:
    """MAE's table: sin and cos of the column in the first half of the channels, of the row in the second. (h*w, D)"""
    frequencies = 1 / 10000 ** (torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    columns = torch.arange(w, dtype=torch.float64).repeat(h)  # of every patch
    rows = torch.arange(h, dtype=torch.float64).repeat_interleave(w)
    angles = [torch.outer(places, frequencies) for places in (columns, rows)]  # each (h*w, D / 4)
    return torch.cat([values for a in angles for values in (a.sin(), a.cos())], dim=1)


class VisionTransformer(nn.Module):
    """Image (B, C, H, W) -> logits (B, num_classes). For the arguments see `fastvit.VisionTransformer`."""

    def __init__(
        self,
        img_size: Size = 224, patch_size: Size = 16, in_chans: int = 3,
        num_classes: int = 1000, global_pool: str = "token",
        embed_dim: int = 768, depth: int = 12, num_heads: int = 12, mlp_ratio: float = 4.0, qkv_bias: bool = True, *,
        proj_bias: bool = True, init_values: float | None = None,
        class_token: bool = True, pos_embed: str = "learn", no_embed_class: bool = False, reg_tokens: int = 0,
        pre_norm: bool = False, final_norm: bool = True, fc_norm: bool | None = None, dynamic_img_size: bool = False,
        attn_pool_num_heads: int | None = None, attn_pool_mlp_ratio: float | None = None,
        drop_rate: float = 0.0, pos_drop_rate: float = 0.0, proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0, drop_path_rate: float = 0.0, embed_norm_layer: str | LayerFactory | None = None,
        mlp_layer: LayerFactory = Mlp, norm_layer: str | LayerFactory = "layernorm",
        act_layer: str | LayerFactory = "gelu", qk_norm: bool = False, block_fn: str | LayerFactory = Block,
        patch_init: str = "", mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if (mean is None) != (std is None):
            raise ValueError(f"mean and std must both be given or both be None, got mean={mean} and std={std}")
        divisor = {"sincos": 2, "sincos2d": 4}.get(pos_embed, 1)
        if embed_dim % divisor:
            raise ValueError(f"embed_dim must be a multiple of {divisor} for {pos_embed=}, got {embed_dim}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        norm = partial(make_norm, norm_layer)
        act = ACTIVATIONS[act_layer] if isinstance(act_layer, str) else act_layer
        block = BLOCKS[block_fn] if isinstance(block_fn, str) else block_fn
        if fc_norm is None:
            fc_norm = global_pool in ("avg", "avgmax", "max")

        self.num_classes, self.global_pool, self.embed_dim = num_classes, global_pool, embed_dim
        self.no_embed_class, self.dynamic_img_size = no_embed_class, dynamic_img_size
        self.mean, self.std = mean, std
        self.patch_init = patch_init
        self.grad_checkpointing = False

        self.patch_embed = PatchEmbed(
            img_size, patch_size, in_chans, embed_dim, not pre_norm, embed_norm_layer, **factory
        )
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **factory)) if class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, reg_tokens, embed_dim, **factory)) if reg_tokens else None
        self.num_prefix_tokens = int(class_token) + reg_tokens
        n = self.patch_embed.num_patches + (0 if no_embed_class else self.num_prefix_tokens)
        self.fixed = pos_embed if pos_embed in ("sincos", "sincos2d") else None
        self.pos_embed: Tensor | None
        if self.fixed is not None:
            self.register_buffer("pos_embed", torch.empty(1, n, embed_dim, **factory))
        else:
            self.pos_embed = nn.Parameter(torch.empty(1, n, embed_dim, **factory)) if pos_embed == "learn" else None
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.norm_pre = norm(embed_dim, **factory) if pre_norm else nn.Identity()
        options: dict[str, Any] = {
            "mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias, "proj_bias": proj_bias, "proj_drop": proj_drop_rate,
            "attn_drop": attn_drop_rate, "init_values": init_values, "act_layer": act, "norm_layer": norm,
            "mlp_layer": mlp_layer, "qk_norm": qk_norm, **factory,
        }  # fmt: skip
        drop_paths = [drop_path_rate * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.Sequential(*(block(embed_dim, num_heads, drop_path=p, **options) for p in drop_paths))
        self.norm = norm(embed_dim, **factory) if final_norm and not fc_norm else nn.Identity()
        self.fc_norm = norm(embed_dim, **factory) if final_norm and fc_norm else nn.Identity()
        self.attn_pool = None
        if global_pool == "map":
            size = attn_pool_num_heads or num_heads, attn_pool_mlp_ratio or mlp_ratio
            self.attn_pool = AttentionPoolLatent(embed_dim, *size, norm, act, **factory)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **factory) if num_classes else nn.Identity()
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        if self.pos_embed is not None and self.fixed is not None:
            self.pos_embed.copy_(self.table(self.patch_embed.grid_size))
        elif self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.patch_init == "kaiming":
            nn.init.kaiming_normal_(self.patch_embed.proj.weight)
            if self.patch_embed.proj.bias is not None:
                nn.init.zeros_(self.patch_embed.proj.bias)

    def embed(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, P + h*w, D): CLS, registers and patches, with positions added."""
        B, _, H, W = x.shape
        ph, pw = self.patch_embed.patch_size
        if not self.dynamic_img_size and self.patch_embed.img_size != (H, W):
            raise ValueError(f"x must have image size {self.patch_embed.img_size}, got {(H, W)}")
        if H % ph or W % pw:
            raise ValueError(f"patch_size {(ph, pw)} must divide the image size, got {(H, W)}")
        if x.dtype is torch.uint8:
            x = x.to(self.patch_embed.proj.weight.dtype) / 255
            if self.mean is not None and self.std is not None:
                x = (x - x.new_tensor(self.mean).view(1, -1, 1, 1)) / x.new_tensor(self.std).view(1, -1, 1, 1)
        x = self.patch_embed(x)
        tokens = [token for token in (self.cls_token, self.reg_token) if token is not None]
        prefix = [token.expand(B, -1, -1) for token in tokens]
        if self.pos_embed is None:
            return torch.cat([*prefix, x], dim=1)
        pos = self.positions((H // ph, W // pw))
        if self.no_embed_class:
            return torch.cat([*prefix, x + pos], dim=1)
        return torch.cat([*prefix, x], dim=1) + pos

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """Interpolate the grid of pos_embed bicubically to another image size (section 3.2), or compute it if fixed."""
        assert self.pos_embed is not None
        if grid == self.patch_embed.grid_size:
            return self.pos_embed
        if self.fixed is not None:
            return self.table(grid).to(self.pos_embed)
        P = 0 if self.no_embed_class else self.num_prefix_tokens
        prefix, patches = self.pos_embed[:, :P], self.pos_embed[:, P:]
        image = patches.float().unflatten(1, self.patch_embed.grid_size).permute(0, 3, 1, 2)
        image = F.interpolate(image, size=grid, mode="bicubic", antialias=True)
        return torch.cat([prefix, image.flatten(2).transpose(1, 2).to(prefix.dtype)], dim=1)

    def table(self, grid: tuple[int, int]) -> Tensor:
        """Compute the fixed positions of a patch grid, (1, P + h*w, D), or (1, h*w, D) with no_embed_class."""
        P = 0 if self.no_embed_class else self.num_prefix_tokens
        if self.fixed == "sincos":
            return sincos(self.embed_dim, P + math.prod(grid))[None]
        h, w = grid
        patches = sincos2d(self.embed_dim, h, w)
        return torch.cat([patches.new_zeros(P, self.embed_dim), patches])[None]

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x = self.norm_pre(self.pos_drop(self.embed(x)))
        for block in self.blocks:
            if self.grad_checkpointing:
                x = checkpoint(block, x, attn_mask, is_causal, use_reentrant=False)
            else:
                x = block(x, attn_mask, is_causal)
        return self.norm(x)

    def pool(self, x: Tensor) -> Tensor:
        if self.global_pool == "":
            return x
        if self.global_pool == "token":
            return x[:, 0]
        patches = x[:, self.num_prefix_tokens :]
        if self.attn_pool is not None:  # map
            return self.attn_pool(patches)
        if self.global_pool == "avg":
            return patches.mean(dim=1)
        if self.global_pool == "max":
            return patches.amax(dim=1)
        return 0.5 * (patches.amax(dim=1) + patches.mean(dim=1))  # avgmax

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.fc_norm(self.pool(x)))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.forward_head(self.forward_features(x, attn_mask, is_causal))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable
