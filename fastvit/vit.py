"""The Vision Transformer built from the fused layers: timm's argument names, attributes and state_dict keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastvit.blocks.submodules import read_or_none, submodules
from fastvit.modules.arguments import (
    Device,
    Dtype,
    Pair,
    by_name,
    check_choice,
    check_heads,
    check_hidden,
    check_init_values,
    check_integers,
    check_rates,
    with_known_arguments,
)
from fastvit.modules.block import BLOCKS, MLP_LAYERS, Block
from fastvit.modules.head import Head
from fastvit.modules.mlp import Mlp
from fastvit.modules.norms import NORM_LAYERS, NormLayer
from fastvit.modules.packing import Images, Packed, embed_images
from fastvit.modules.parts import ACT_LAYERS, ActLayer, LayerFactory
from fastvit.modules.patch_embed import PatchEmbed, join_tokens
from fastvit.modules.pooling import AttentionPoolLatent, check_pool, check_pool_size
from fastvit.modules.positions import FIXED, fixed_positions, remembered, resample_abs_pos_embed


@with_known_arguments
class VisionTransformer(Head):
    """ViT (Dosovitskiy et al. 2021, arXiv:2010.11929): image (B, C, H, W) -> logits (B, num_classes).

    A list of images of any sizes that the patch divides runs without padding (`forward_features`):

        logits = model([torch.randn(3, 224, 224), torch.randn(3, 160, 448)])  # (2, num_classes)
        logits = model([global_crops, local_crops])  # (B, 3, 224, 224), (B', 3, 96, 96) -> (B + B', num_classes)
        model.compile_lists()  # one graph for all lists of two images or more

    Args:
        img_size, patch_size: int or (height, width); patch_size divides img_size.
        in_chans, num_classes: num_classes 0 leaves out the head: forward returns the pooled features (B, D).
        global_pool: "token" (CLS), "avg", "max", "avgmax" over the patches, "map" (a learnt query attends to them:
            SigLIP's), or "" for all tokens (B, N, D).
        embed_dim, depth, num_heads, mlp_ratio: D, number of blocks, H (divides D), MLP width as a multiple of D.
        qkv_bias, proj_bias: biases of the qkv layer, and of the projection and the MLP.
        init_values: initial value of LayerScale; None for no LayerScale.
        class_token, reg_tokens: whether there is a CLS token, and the number of registers after it.
        pos_embed: "learn"; "sincos2d" for MAE's fixed table of columns and rows, zeros for other tokens (He et al.
            2021, arXiv:2111.06377); "sincos" for the fixed table along the sequence of tokens, CLS first (Vaswani et
            al. 2017, arXiv:1706.03762); "" or "none" for no position. A fixed table is a buffer, which no optimizer
            changes, and is computed for another patch grid, where learnt positions are interpolated.
        no_embed_class: positions for the patches only, none for the tokens before them.
        pre_norm: a norm before the blocks and no bias in the patch embedding, as in CLIP.
        final_norm, fc_norm: a last norm; after the pooling if fc_norm, which None means for avg, avgmax and max.
        dynamic_img_size: accept any image size that patch_size divides; positions are interpolated in every call. Lists
            accept any size in either case.
        attn_pool_num_heads, attn_pool_mlp_ratio: sizes of the pooling "map"; None for those of the blocks.
        drop_rate, pos_drop_rate, proj_drop_rate, attn_drop_rate: dropout before the head, after the positions are
            added, after the projection and both MLP layers, and of the attention probabilities; in [0, 1).
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        embed_norm_layer: a norm of the patches before positions are added; None for no norm.
        mlp_layer: a class with the arguments of `Mlp`, or "mlp", "glumlp", "swiglu" or "swiglupacked".
        norm_layer: a class, or "layernorm" or "rmsnorm".
        act_layer: a class, or "gelu", "gelu_tanh", "quick_gelu", "relu" or "silu".
        qk_norm: norms of q and k, as in `Attention`.
        block_fn: a class with the arguments of `Block`, "block", or "postnorm" for `fastvit.layers.PostNormBlock`. As
            that ends in a norm, one after the blocks is unusual then: final_norm=False leaves it out.
        patch_init: initial values of the patch embedding's convolution: "" for PyTorch's default, as in timm, "kaiming"
            for a normal distribution of deviation sqrt(2 / fan_in) (He et al. 2015, arXiv:1502.01852; the default of
            `nn.init.kaiming_normal_`) and a bias of zeros.
        mean, std: in_chans values each, in [0, 1]: uint8 images are then taken as (x / 255 - mean) / std. Only if they
            are given does `pretrained_cfg` have them, from which timm makes its transforms: a model's name does not
            determine the normalisation that its weights were trained with.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before a parameter is made.
    """

    def __init__(
        self,
        img_size: Pair = 224, patch_size: Pair = 16, in_chans: int = 3,
        num_classes: int = 1000, global_pool: str = "token",
        embed_dim: int = 768, depth: int = 12, num_heads: int = 12, mlp_ratio: float = 4.0, qkv_bias: bool = True, *,
        proj_bias: bool = True, init_values: float | None = None,
        class_token: bool = True, pos_embed: str = "learn", no_embed_class: bool = False, reg_tokens: int = 0,
        pre_norm: bool = False, final_norm: bool = True, fc_norm: bool | None = None, dynamic_img_size: bool = False,
        attn_pool_num_heads: int | None = None, attn_pool_mlp_ratio: float | None = None,
        drop_rate: float = 0.0, pos_drop_rate: float = 0.0, proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0, drop_path_rate: float = 0.0, embed_norm_layer: str | NormLayer | None = None,
        mlp_layer: str | LayerFactory = Mlp, norm_layer: str | NormLayer = "layernorm",
        act_layer: str | ActLayer = "gelu", qk_norm: bool = False, block_fn: str | LayerFactory = Block,
        patch_init: str = "", mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
        device: Device = None, dtype: Dtype = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads("embed_dim", embed_dim, num_heads)
        check_integers(0, num_classes=num_classes, depth=depth, reg_tokens=reg_tokens)
        check_hidden("embed_dim", embed_dim, mlp_ratio)
        check_init_values(init_values)
        check_rates(
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
        )
        check_choice("pos_embed", pos_embed, ("learn", *FIXED, "", "none"))
        check_choice("patch_init", patch_init, ("", "kaiming"))
        check_pool("global_pool", global_pool, class_token)
        if fc_norm is None:
            fc_norm = global_pool in ("avg", "avgmax", "max")
        act = by_name("act_layer", act_layer, ACT_LAYERS)
        mlp = by_name("mlp_layer", mlp_layer, MLP_LAYERS)
        block = by_name("block_fn", block_fn, BLOCKS)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        norm = partial(by_name("norm_layer", norm_layer, NORM_LAYERS), **factory)
        if embed_norm_layer is not None:
            embed_norm_layer = by_name("embed_norm_layer", embed_norm_layer, NORM_LAYERS)
        pool_heads = num_heads if attn_pool_num_heads is None else attn_pool_num_heads
        pool_ratio = mlp_ratio if attn_pool_mlp_ratio is None else attn_pool_mlp_ratio
        if global_pool == "map":
            names = "attn_pool_num_heads", pool_heads, "attn_pool_mlp_ratio", pool_ratio
            check_pool_size(*names, "embed_dim", embed_dim)

        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.num_heads = num_heads
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.has_class_token = class_token
        self.num_reg_tokens = reg_tokens
        self.num_prefix_tokens = int(class_token) + reg_tokens
        self.no_embed_class = no_embed_class
        self.dynamic_img_size = dynamic_img_size
        self.patch_init = patch_init
        self.patch_embed = PatchEmbed(  # checks its arguments before it makes the first parameter
            img_size, patch_size, in_chans, embed_dim, not pre_norm, not dynamic_img_size, mean, std,
            norm_layer=embed_norm_layer, **factory,
        )  # fmt: skip
        self._make_tokens(pos_embed, factory)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.norm_pre = norm(embed_dim) if pre_norm else nn.Identity()
        self.rope = None
        options = {
            "mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias, "proj_bias": proj_bias, "proj_drop": proj_drop_rate,
            "attn_drop": attn_drop_rate, "init_values": init_values, "act_layer": act, "norm_layer": norm,
            "mlp_layer": mlp, "qk_norm": qk_norm, **factory,
        }  # fmt: skip
        drop_paths = [drop_path_rate * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.Sequential(*(block(embed_dim, num_heads, drop_path=p, **options) for p in drop_paths))
        self.norm = norm(embed_dim) if final_norm and not fc_norm else nn.Identity()
        self.attn_pool = None
        if global_pool == "map":
            self.attn_pool = AttentionPoolLatent(
                embed_dim, pool_heads, pool_ratio, norm_layer=norm, act_layer=act, **factory
            )
        self.fc_norm = norm(embed_dim) if final_norm and fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        self.init_weights(needs_reset=False)

    def _make_tokens(self, positions: str, factory: dict[str, Any]) -> None:
        """Make `cls_token`, `reg_token`, `pos_embed` and what timm's helpers read of the input."""

        def tokens(count: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(1, count, self.embed_dim, **factory)) if count else None

        embed = self.patch_embed
        self.cls_token = tokens(int(self.has_class_token))
        self.reg_token = tokens(self.num_reg_tokens)
        n = embed.num_patches + (0 if self.no_embed_class else self.num_prefix_tokens)
        self.pos_embed: Tensor | None
        self.fixed_positions = positions if positions in FIXED else None
        if self.fixed_positions is not None:
            self.register_buffer("pos_embed", torch.empty(1, n, self.embed_dim, **factory))
        else:
            self.pos_embed = tokens(n if positions == "learn" else 0)
        self.pretrained_cfg = self.default_cfg = {
            "input_size": (self.in_chans, *embed.img_size), "fixed_input_size": not self.dynamic_img_size,
            "num_classes": self.num_classes, "pool_size": None, "first_conv": "patch_embed.proj", "classifier": "head",
            **({} if embed.mean is None else {"mean": embed.mean, "std": embed.std}),
        }  # fmt: skip

    @torch.no_grad()
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise the parameters again, all of them by default, for instance after `nn.Module.to_empty`.

        Args:
            mode: "" for timm's values (trunc-normal 0.02, zero biases) and those that `patch_init` chooses; "skip", or
                "reset" as timm calls it, for tokens only.
            needs_reset: call `reset_parameters` of the modules that mode leaves out; otherwise they stay as they are.

        Raises:
            ValueError: another mode.
        """
        check_choice("mode", mode, ("", "skip", "reset"))
        if self.pos_embed is not None:
            if self.fixed_positions is None:
                nn.init.trunc_normal_(self.pos_embed, std=0.02)
            else:
                self.pos_embed.copy_(self.fixed_table(self.patch_embed.grid_size))
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)
        for module in reversed(list(self.modules())[1:]):  # children first: a module's own values replace its layers'
            if mode == "" and isinstance(module, nn.Linear):
                init_linear(module)
            elif mode == "" and callable(own := getattr(module, "init_weights", None)):
                own()
            elif needs_reset and callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        if mode == "" and self.patch_init == "kaiming":
            nn.init.kaiming_normal_(self.patch_embed.proj.weight)
            if self.patch_embed.proj.bias is not None:
                nn.init.zeros_(self.patch_embed.proj.bias)

    # ---- tokens ----

    def _embedded(self, x: Tensor) -> Tensor:
        return self.norm_pre(self.pos_drop(self._tokens(x)))

    def _embedded_list(self, images: Images) -> Packed:
        packed = embed_images(self, images)
        return packed._replace(tokens=self.norm_pre(self.pos_drop(packed.tokens)))

    def _grid_of(self, x: Tensor, any_size: bool = False) -> tuple[int, int]:
        embed = self.patch_embed
        return embed.grid_of(x, any_size) if isinstance(embed, PatchEmbed) else embed.grid_size

    def _tokens(self, x: Tensor, any_size: bool = False) -> Tensor:
        """Embed an image (B, C, H, W): prefix tokens, then patches with their positions, (B, P + n, D). any_size: as
        `PatchEmbed` takes it."""
        embed, option = self.patch_embed, {"any_size": True} if any_size else {}
        pos, prefix = self._position_and_prefix(self._grid_of(x, any_size))
        if read_or_none(submodules, self, patch_embed={PatchEmbed}):
            # by name: modules' trackers (FLOP counters) take the gradients of positional arguments for granted
            return embed(x, pos_embed=pos, prefix=prefix, **option)
        return join_tokens(embed(x, **option), pos, prefix)

    def _prefix_tokens(self) -> list[Tensor]:
        """Return the learnt tokens before the patches in their order, (1, count, D) each."""
        return [token for token in (self.cls_token, self.reg_token) if token is not None]

    def _position_and_prefix(self, grid: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
        """Return the positions of the patches (n, D), and the prefix tokens (P, D) with theirs added."""
        prefix = None
        if self.num_prefix_tokens:
            prefix = torch.cat([token[0] for token in self._prefix_tokens()])
        pos = None
        if self.pos_embed is not None:
            pos = self._positions(self.pos_embed, grid, self.patch_embed.grid_size)[0]
            if self.fixed_positions is not None:  # FSDP2's mixed precision casts parameters, and no buffers
                pos = pos.to(next(self.patch_embed.parameters()) if prefix is None else prefix)
            if prefix is not None and not self.no_embed_class:
                prefix = prefix + pos[: self.num_prefix_tokens]
                pos = pos[self.num_prefix_tokens :]
        return pos, prefix

    def _positions(self, pos_embed: Tensor, grid: tuple[int, int], old_grid: tuple[int, int]) -> Tensor:
        """Return pos_embed, (1, P + n, D) or with no_embed_class (1, n, D), for another patch grid: interpolated, or
        computed if it is fixed."""
        if self.fixed_positions is not None and grid != old_grid:
            key = self.fixed_positions, pos_embed.shape[2], grid, pos_embed.shape[1] - math.prod(old_grid)
            device, like = pos_embed.device, pos_embed.dtype
            return remembered((*key, like, device), device, lambda: self.fixed_table(grid).to(device, like))
        P = 0 if self.no_embed_class else self.num_prefix_tokens
        return resample_abs_pos_embed(pos_embed, grid, old_grid, num_prefix_tokens=P)

    def fixed_table(self, grid: tuple[int, int]) -> Tensor:
        """Compute the fixed positions of a patch grid, (1, P + n, D) or with no_embed_class (1, n, D), in float64
        (on MPS float32).

        Raises:
            ValueError: a model whose positions are not fixed.
        """
        if self.fixed_positions is None or self.pos_embed is None:
            raise ValueError("fixed_table needs a model with pos_embed='sincos' or 'sincos2d'")
        P = 0 if self.no_embed_class else self.num_prefix_tokens
        return fixed_positions(self.fixed_positions, self.embed_dim, grid, P, self.pos_embed.device)

    def set_input_size(self, img_size: Pair | None = None, patch_size: Pair | None = None) -> None:
        """Change the input size and the patch size, in place. `pos_embed` is interpolated to the new patch grid, or
        computed for it if it is fixed; the patch embedding's weight is resampled to the new patch size. Learnt
        positions and the weight become new parameters.

        Args:
            img_size, patch_size: int or (height, width); None keeps the present one.

        Raises:
            TypeError, ValueError: naming the argument; as `PatchEmbed.set_input_size`. Nothing is changed then.
        """
        old_grid = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        grid = self.patch_embed.grid_size
        self.pretrained_cfg["input_size"] = (self.in_chans, *self.patch_embed.img_size)
        if self.pos_embed is not None and grid != old_grid:
            pos = self._positions(self.pos_embed.detach(), grid, old_grid)
            if self.fixed_positions is None:
                pos = nn.Parameter(pos, requires_grad=self.pos_embed.requires_grad)
            self.pos_embed = pos

    # ---- timm's interface ----

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that an optimizer should not decay, in addition to norms and biases."""
        return {"pos_embed", "cls_token", "reg_token", "dist_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return how timm's optimizers group the parameters by depth, for layer-wise learning rates (`layer_decay`)."""
        stem = r"^(?:cls_token|reg_token|dist_token|pos_embed|patch_embed|norm_pre)\b"
        return {"stem": stem, "blocks": [(r"^blocks\.(\d+)", None), (r"^norm\.", (99999,))]}


def init_linear(layer: nn.Linear) -> None:
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
