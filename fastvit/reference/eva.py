"""EVA's Vision Transformer in plain PyTorch, with the rotary positions (Su et al. 2021, arXiv:2104.09864) and gated
MLPs (Shazeer 2020, arXiv:2002.05202) of EVA-02 and DINOv3.

It takes the constructor arguments and the `state_dict` of `fastvit.eva.Eva`, and shares no code with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastvit.reference.block import Attention, DropPath, LayerFactory, Mlp, make_norm
from fastvit.reference.vit import Size, VisionTransformer


class SwiGLU(nn.Module):
    """act(x W_g) * (x W_x), with a layer each, and an optional norm of the product. (..., D) -> (..., D)."""

    def __init__(
        self, in_features: int, hidden_features: int, act_layer: LayerFactory = nn.SiLU, bias: bool = True,
        drop: float = 0.0,
        norm_layer: str | LayerFactory | None = None, align_to: int = 0, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if align_to:
            hidden_features = math.ceil(hidden_features / align_to) * align_to
        self.fc1_g = nn.Linear(in_features, hidden_features, bias=bias, **factory)
        self.fc1_x = nn.Linear(in_features, hidden_features, bias=bias, **factory)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.norm = make_norm(norm_layer, hidden_features, **factory)
        self.fc2 = nn.Linear(hidden_features, in_features, bias=bias, **factory)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1_g(x)) * self.fc1_x(x)
        return self.drop2(self.fc2(self.norm(self.drop1(hidden))))


class SwiGLUPacked(nn.Module):
    """`SwiGLU` without the norm and with both layers in one of hidden_features rows, the gate's first."""

    def __init__(
        self, in_features: int, hidden_features: int, act_layer: LayerFactory = nn.SiLU, bias: bool = True,
        drop: float = 0.0, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        half = hidden_features // 2
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias, **factory)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(half, in_features, bias=bias, **factory)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.drop2(self.fc2(self.drop1(self.act(gate) * value)))


class EvaAttention(nn.Module):
    """Attention of rotated q and k. (B, N, D) -> (B, N, D). k_bias: whether k has a bias, as q and v have."""

    def __init__(
        self, dim: int, num_heads: int, bias: bool, k_bias: bool, fused: bool, num_prefix_tokens: int,
        attn_drop: float, proj_drop: float, rotate_half: bool, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.num_prefix_tokens, self.rotate_half = num_heads, num_prefix_tokens, rotate_half
        self.scale = (dim // num_heads) ** -0.5
        self.q_bias = self.v_bias = None
        if not fused:
            self.q_proj = nn.Linear(dim, dim, bias=bias, **factory)
            self.k_proj = nn.Linear(dim, dim, bias=k_bias, **factory)
            self.v_proj = nn.Linear(dim, dim, bias=bias, **factory)
        else:
            self.qkv = nn.Linear(dim, 3 * dim, bias=bias and k_bias, **factory)
            if bias and not k_bias:
                self.q_bias = nn.Parameter(torch.zeros(dim, **factory))
                self.v_bias = nn.Parameter(torch.zeros(dim, **factory))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if hasattr(self, "q_proj"):
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q, k, v) if self.q_bias is None else (q + self.q_bias, k, v + self.v_bias)

    def rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        """(B, H, N, d), and sin and cos side by side, (N - P, 2 d)."""
        sin, cos = rope.chunk(2, dim=-1)
        prefix, x = x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        if self.rotate_half:
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
        else:
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return torch.cat([prefix, (x * cos + turned * sin).to(x.dtype)], dim=2)

    attend: Any = Attention.attend

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.project(x))
        if rope is not None:
            q, k = self.rotate(q, rope), self.rotate(k, rope)
        out = self.attend(q, k, v, attn_mask, is_causal).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(out))


class EvaBlock(nn.Module):
    """x + gamma_1 * Attention(LN(x)), then x + gamma_2 * Mlp(LN(x)). (B, N, D) -> (B, N, D)."""

    def __init__(
        self, dim: int, num_heads: int, norm_layer: str | LayerFactory, qkv_bias: bool, qkv_fused: bool,
        mlp_ratio: float, swiglu_mlp: bool, swiglu_align_to: int, scale_mlp: bool, attn_type: str,
        num_prefix_tokens: int, rotate_half: bool, proj_drop: float, attn_drop: float, drop_path: float,
        init_values: float | None, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm1 = make_norm(norm_layer, dim, **factory)
        self.attn = EvaAttention(
            dim, num_heads, qkv_bias, qkv_bias and attn_type == "rope", qkv_fused, num_prefix_tokens, attn_drop,
            proj_drop, rotate_half, **factory,
        )  # fmt: skip
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = make_norm(norm_layer, dim, **factory)
        hidden, inner = int(dim * mlp_ratio), norm_layer if scale_mlp else None
        self.mlp: nn.Module
        if not swiglu_mlp:
            self.mlp = Mlp(dim, hidden, drop=proj_drop, norm_layer=inner, **factory)
        elif scale_mlp or swiglu_align_to:
            self.mlp = SwiGLU(dim, hidden, norm_layer=inner, drop=proj_drop, align_to=swiglu_align_to, **factory)
        else:
            self.mlp = SwiGLUPacked(dim, 2 * hidden, drop=proj_drop, **factory)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()
        self.gamma_1 = self.gamma_2 = None
        if init_values is not None:
            self.gamma_1, self.gamma_2 = (nn.Parameter(torch.full((dim,), init_values, **factory)) for _ in range(2))

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        branch = self.attn(self.norm1(x), rope, attn_mask, is_causal)
        x = x + self.drop_path1(branch if self.gamma_1 is None else self.gamma_1 * branch)
        branch = self.mlp(self.norm2(x))
        return x + self.drop_path2(branch if self.gamma_2 is None else self.gamma_2 * branch)


class Rope(nn.Module):
    """float32 sin and cos, (h*w, 2 d), of the angles coordinate * frequency, first of one axis, then of the other."""

    def __init__(
        self, dim: int, rope_type: str, temperature: float, grid_offset: float, grid_indexing: str, rotate_half: bool,
        ref_feat_shape: Size | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dinov3, self.offset = rope_type == "dinov3", grid_offset
        self.xy, self.rotate_half = grid_indexing == "xy", rotate_half
        self.dim, self.temperature = dim, temperature
        self.reference = (ref_feat_shape, ref_feat_shape) if isinstance(ref_feat_shape, int) else ref_feat_shape

    def coordinates(self, axis: int, length: int, device: torch.device) -> Tensor:
        steps = torch.arange(length, dtype=torch.float32, device=device) + self.offset
        if self.dinov3:  # the middles of patches of a grid from -1 to 1
            return (steps + 0.5) / length * 2 - 1
        return steps if self.reference is None else steps / length * self.reference[axis]

    def forward(self, grid: tuple[int, ...], device: torch.device) -> Tensor:
        axes = [self.coordinates(axis, length, device) for axis, length in enumerate(grid)]
        places = torch.cartesian_prod(*axes)  # (h*w, 2)
        if self.xy:
            places = places.flip(-1)
        exponents = torch.arange(self.dim // 4, dtype=torch.float32, device=device) / (self.dim // 4)
        frequencies = (2 * math.pi if self.dinov3 else 1.0) / self.temperature**exponents
        angles = (places[:, :, None] * frequencies).flatten(1)  # (h*w, d / 2)
        angles = torch.cat([angles, angles], dim=1) if self.rotate_half else angles.repeat_interleave(2, dim=1)
        return torch.cat([angles.sin(), angles.cos()], dim=1)


class VJepa2Rope(nn.Module):
    """float32 sin and cos, (t*h*w, 2 d), of the angles coordinate * frequency: the frequencies twice for frames, then
    twice for rows, then twice for columns, and angles of 0 for the rest of a head."""

    def __init__(self, dim: int, temperature: float) -> None:
        super().__init__()
        self.dim, self.temperature = dim, temperature

    def forward(self, grid: tuple[int, ...], device: torch.device) -> Tensor:
        axes = [torch.arange(length, dtype=torch.float32, device=device) for length in grid]
        places = torch.cartesian_prod(*axes)  # (t*h*w, 3)
        half = self.dim // 3 // 2
        frequencies = 1 / self.temperature ** (torch.arange(half, dtype=torch.float32, device=device) / half)
        angles = [place[:, None] * frequencies for place in places.unbind(1)]  # each (t*h*w, half)
        rest = angles[0].new_zeros(len(places), self.dim - 6 * half)
        table = torch.cat([angles[0], angles[0], angles[1], angles[1], angles[2], angles[2], rest], dim=1)
        return torch.cat([table.sin(), table.cos()], dim=1)


class Eva(VisionTransformer):
    """Image (B, C, H, W) -> logits (B, num_classes). For the arguments see `fastvit.eva.Eva`."""

    def __init__(
        self, img_size: Size = 224, patch_size: Size = 16, in_chans: int = 3, num_classes: int = 1000,
        global_pool: str = "avg", embed_dim: int = 768, depth: int = 12, num_heads: int = 12, *,
        qkv_bias: bool = True, qkv_fused: bool = True, mlp_ratio: float = 4.0, swiglu_mlp: bool = False,
        swiglu_align_to: int = 0, scale_mlp: bool = False, attn_type: str = "eva",
        init_values: float | None = None, num_reg_tokens: int = 0, class_token: bool = True,
        use_abs_pos_emb: bool = True, use_rot_pos_emb: bool = False, rope_type: str = "cat",
        rope_temperature: float = 10000.0, rope_grid_offset: float = 0.0, rope_grid_indexing: str = "ij",
        rope_rotate_half: bool = False, ref_feat_shape: Size | None = None, use_pre_transformer_norm: bool = False,
        use_fc_norm: bool | None = None, use_post_transformer_norm: bool | None = None, **options: Any,
    ) -> None:  # fmt: skip
        fc_norm = global_pool == "avg" if use_fc_norm is None else use_fc_norm
        final_norm = not fc_norm if use_post_transformer_norm is None else use_post_transformer_norm

        block_options: dict[str, Any] = {
            "qkv_fused": qkv_fused, "swiglu_mlp": swiglu_mlp, "swiglu_align_to": swiglu_align_to,
            "scale_mlp": scale_mlp, "attn_type": attn_type, "rotate_half": rope_rotate_half,
            "num_prefix_tokens": int(class_token) + num_reg_tokens,
        }  # fmt: skip

        def block(dim: int, num_heads: int, **options: Any) -> EvaBlock:
            for name in ("proj_bias", "act_layer", "mlp_layer", "qk_norm"):  # EVA's blocks fix them
                options.pop(name)
            return EvaBlock(dim, num_heads, **block_options, **options)

        super().__init__(
            img_size, patch_size, in_chans, num_classes, global_pool, embed_dim, depth, num_heads, mlp_ratio, qkv_bias,
            init_values=init_values, class_token=class_token, reg_tokens=num_reg_tokens,
            pos_embed="learn" if use_abs_pos_emb else "none", pre_norm=use_pre_transformer_norm,
            final_norm=fc_norm or final_norm, fc_norm=fc_norm, block_fn=block, **options,
        )  # fmt: skip
        self.rope: Rope | VJepa2Rope | None = None
        if use_rot_pos_emb and rope_type == "vjepa2":
            self.rope = VJepa2Rope(embed_dim // num_heads, rope_temperature)
        elif use_rot_pos_emb:
            self.rope = Rope(
                embed_dim // num_heads, rope_type, rope_temperature, rope_grid_offset, rope_grid_indexing,
                rope_rotate_half, ref_feat_shape,
            )  # fmt: skip
        with torch.no_grad():
            if isinstance(self.head, nn.Linear):
                self.head.weight.mul_(0.001)

    def pool(self, x: Tensor) -> Tensor:
        return super().pool(x) if self.attn_pool is None else self.attn_pool(x)  # CLS and registers too

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        grid = tuple(n // size for n, size in zip(x.shape[2:], self.patch_embed.patch_size, strict=True))
        rope = None if self.rope is None else self.rope(grid, x.device)
        x = self.norm_pre(self.pos_drop(self.embed(x)))
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, attn_mask, is_causal, use_reentrant=False)
            else:
                x = block(x, rope, attn_mask, is_causal)
        return self.norm(x)
