"""From tokens to logits: pooling and classifier of `VisionTransformer`, with timm's names."""

from __future__ import annotations

from torch import Tensor, nn

from fastvit.features import Backbone
from fastvit.modules.arguments import check_integers
from fastvit.modules.parts import mask_arguments
from fastvit.modules.pooling import AttentionPoolLatent, check_pool, pool_tokens


class Head(Backbone):
    """Adds pooling and classifier to a `Backbone`; base class of `VisionTransformer`.

    B: batch, N: tokens, D: embed_dim.
    """

    num_classes: int
    global_pool: str
    attn_pool: AttentionPoolLatent | None
    head_drop: nn.Module
    head: nn.Module

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """(B, N, D) -> (B, D), or unchanged for "".

        Args:
            pool_type: another pooling than `global_pool`; as in timm, a model with attention pooling ignores it.

        Raises:
            ValueError: an unknown pool_type; "token" for a model without CLS, "map" for one without attention pooling.
        """
        pool = self.global_pool
        if pool_type is not None and self.attn_pool is None:
            self._check_pool("pool_type", pool_type)
            pool = pool_type
        if pool == "":
            return x
        if pool == "token":
            return x[:, 0]
        if not self._pools_prefix():
            x = x[:, self.num_prefix_tokens :]
        return pool_tokens(x, pool) if self.attn_pool is None else self.attn_pool(x)

    def _pools_prefix(self) -> bool:
        """Return whether the poolings of patches take CLS and registers too."""
        return False

    def _check_pool(self, name: str, pool: str) -> None:
        check_pool(name, pool, self.has_class_token)
        if pool == "map" and self.attn_pool is None:
            raise ValueError(f"{name} 'map' needs a model made with it, got {self.global_pool!r}")

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map tokens (B, N, D) to logits, or with pre_logits to the pooled and normalised features."""
        x = self.head_drop(self.fc_norm(self.pool(x)))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map an image to logits. attn_mask, is_causal: as in `forward_features`."""
        return self.forward_head(self.forward_features(x, **mask_arguments(attn_mask, is_causal)))

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Make a new head for num_classes (0: none), and optionally set another pooling; the norms stay where they are.

        Raises:
            TypeError, ValueError: a wrong num_classes; an unknown global_pool, "token" for a model without CLS, "map"
                for one without attention pooling. Nothing is changed then.
        """
        check_integers(0, num_classes=num_classes)
        if global_pool is not None:
            self._check_pool("global_pool", global_pool)
            if global_pool != "map":
                self.attn_pool = None
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = self._new_head()

    def _new_head(self) -> nn.Module:
        """Make a classifier for num_classes, or an identity for 0."""
        like = next(self.patch_embed.parameters())
        head: nn.Module = nn.Identity()
        if self.num_classes:
            head = nn.Linear(self.embed_dim, self.num_classes, device=like.device, dtype=like.dtype)
        return head.train(self.training)
