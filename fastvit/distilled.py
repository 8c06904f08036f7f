"""The Vision Transformer with a distillation token: timm's argument names, attributes and state_dict keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastvit.modules.arguments import Pair, check_choice, check_flags, with_known_arguments
from fastvit.vit import VisionTransformer

__all__ = ["VisionTransformerDistilled"]

_FIXED = ("class_token", "reg_tokens", "fc_norm")  # arguments of `VisionTransformer` whose value the two heads fix


@with_known_arguments
class VisionTransformerDistilled(VisionTransformer):
    """DeiT with distillation (Touvron et al. 2021, arXiv:2012.12877): image (B, C, H, W) -> logits (B, num_classes).

    A second token after CLS, `dist_token`, has a head of its own, `head_dist`, which learns from a teacher. The logits
    are the mean of both heads'. In training after `set_distilled_training(True)` they are a pair instead, CLS's and the
    distillation token's, each (B, num_classes), for a loss on each.

    Args:
        img_size, patch_size, in_chans, num_classes, embed_dim, depth, num_heads, mlp_ratio, qkv_bias: as in
            `VisionTransformer`.
        global_pool: "token" only: the heads read CLS and the distillation token.
        options: further arguments of `VisionTransformer`, but class_token, reg_tokens and fc_norm.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before a parameter is made.
    """

    def __init__(
        self, img_size: Pair = 224, patch_size: Pair = 16, in_chans: int = 3, num_classes: int = 1000,
        global_pool: str = "token", embed_dim: int = 768, depth: int = 12, num_heads: int = 12,
        mlp_ratio: float = 4.0, qkv_bias: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        if fixed := [name for name in _FIXED if name in options]:
            raise TypeError(f"VisionTransformerDistilled takes no {fixed[0]}: its two heads fix it")
        check_choice("global_pool", global_pool, ("token",))
        super().__init__(
            img_size, patch_size, in_chans, num_classes, global_pool, embed_dim, depth, num_heads, mlp_ratio, qkv_bias,
            **options,
        )  # fmt: skip
        self.distilled_training = False

    def _make_tokens(self, positions: str, factory: dict[str, Any]) -> None:
        self.num_prefix_tokens = 2
        super()._make_tokens(positions, factory)
        self.dist_token = nn.Parameter(torch.empty(1, 1, self.embed_dim, **factory))
        self.pretrained_cfg["classifier"] = ("head", "head_dist")

    def _prefix_tokens(self) -> list[Tensor]:
        return [*super()._prefix_tokens(), self.dist_token]

    @torch.no_grad()
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise as `VisionTransformer.init_weights` does, and the distillation token as positions."""
        super().init_weights(mode, needs_reset)
        nn.init.trunc_normal_(self.dist_token, std=0.02)

    def set_distilled_training(self, enable: bool = True) -> None:
        """Return both heads' logits in training, as a pair; or their mean if not `enable`."""
        check_flags(enable=enable)
        self.distilled_training = enable

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        """Map tokens (B, N, D) to logits, a pair of them in distilled training, or with pre_logits to the mean of both
        tokens (B, D)."""
        return self._classify_both(x[:, 0], x[:, 1], pre_logits)

    def _classify_packed(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Any:
        first = cu_seqlens[:-1]
        return self._classify_both(x.index_select(0, first), x.index_select(0, first + 1), False)

    def _classify_both(self, cls: Tensor, dist: Tensor, pre_logits: bool) -> Any:
        cls, dist = self.head_drop(cls), self.head_drop(dist)
        if not pre_logits:
            cls, dist = self.head(cls), self.head_dist(dist)
            if self.distilled_training and self.training:
                return cls, dist
        return (cls + dist) / 2

    def get_classifier(self) -> Any:
        """Return `head` and `head_dist`."""
        return self.head, self.head_dist

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Make both heads again for num_classes (0: none).

        Args:
            global_pool: None, "token" or, as timm's helpers pass it, ""; the model pools its two tokens in each case.

        Raises:
            TypeError, ValueError: a wrong num_classes or global_pool. Nothing is changed then.
        """
        if global_pool is not None:
            check_choice("global_pool", global_pool, ("token", ""))
        super().reset_classifier(num_classes)
        self.head_dist = self._new_head()
