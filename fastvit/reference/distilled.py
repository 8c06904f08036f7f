"""The Vision Transformer with a distillation token (Touvron et al. 2021, arXiv:2012.12877), in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastvit.reference.vit import VisionTransformer


class VisionTransformerDistilled(VisionTransformer):
    """Section 4: a second token after CLS has a head of its own, which learns from a teacher; the logits are the mean
    of both heads'. Image (B, C, H, W) -> (B, num_classes), or a pair of them in distilled training.

    For the arguments see `fastvit.VisionTransformerDistilled`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        D, like = self.embed_dim, self.patch_embed.proj.weight
        factory: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.num_prefix_tokens = 2
        self.dist_token = nn.Parameter(torch.empty(1, 1, D, **factory))
        nn.init.trunc_normal_(self.dist_token, std=0.02)
        if self.pos_embed is not None:
            n = self.patch_embed.num_patches + (0 if self.no_embed_class else self.num_prefix_tokens)
            self.pos_embed = nn.Parameter(torch.empty(1, n, D, **factory))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.head_dist: nn.Module = nn.Identity()
        if self.num_classes:
            self.head_dist = nn.Linear(D, self.num_classes, **factory)
            nn.init.trunc_normal_(self.head_dist.weight, std=0.02)
            nn.init.zeros_(self.head_dist.bias)
        self.distilled_training = False

    def prefix_tokens(self) -> list[Tensor]:
        return [*super().prefix_tokens(), self.dist_token]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        cls, dist = self.head_drop(x[:, 0]), self.head_drop(x[:, 1])
        if pre_logits:
            return (cls + dist) / 2
        cls, dist = self.head(cls), self.head_dist(dist)
        if self.distilled_training and self.training:
            return cls, dist
        return (cls + dist) / 2

    def set_distilled_training(self, enable: bool = True) -> None:
        self.distilled_training = enable
