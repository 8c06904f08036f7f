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

    distilled_training = False

    def make_prefix(self, class_token: bool, reg_tokens: int, **factory: Any) -> None:
        if not class_token or reg_tokens:
            raise ValueError("the two heads need class_token=True and reg_tokens=0")
        super().make_prefix(class_token, reg_tokens, **factory)
        self.dist_token = nn.Parameter(torch.empty(1, 1, self.embed_dim, **factory))
        self.num_prefix_tokens = 2

    def make_head(self, num_classes: int, **factory: Any) -> None:
        super().make_head(num_classes, **factory)
        self.head_dist = nn.Linear(self.embed_dim, num_classes, **factory) if num_classes else nn.Identity()

    @torch.no_grad()
    def init_weights(self) -> None:
        super().init_weights()
        nn.init.trunc_normal_(self.dist_token, std=0.02)

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
