"""From tokens to logits: pooling and classifier of `VisionTransformer`, with timm's names."""

from __future__ import annotations

from torch import Tensor, nn

from fastvit.features import Trunk
from fastvit.modules.arguments import check_integers
from fastvit.modules.pooling import AttentionPoolLatent, check_pool, pool_tokens


class Head(Trunk):
    """What `VisionTransformer` and `Eva` do with the tokens of `Trunk`.

    B: batch, N: tokens, D: embed_dim.
    """

    num_classes: int
    global_pool: str
    pool_include_prefix: bool
    attn_pool: AttentionPoolLatent | None
    head_drop: nn.Module
    head: nn.Module

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """(B, N, D) -> (B, D), or unchanged for "".

        Args:
            pool_type: another pooling than `global_pool`; as in timm, attention pooling has precedence where there is.

        Raises:
            ValueError: no such pool_type; "token" of a model without CLS, "map" of one without attention pooling.
        """
        pool = self.global_pool
        if pool_type is not None and self.attn_pool is None:
            self._check_pool("pool_type", pool_type)
            pool = pool_type
        if pool == "":
            return x
        if pool == "token":
            return x[:, 0]
        if not self.pool_include_prefix:
            x = x[:, self.num_prefix_tokens :]
        return pool_tokens(x, pool) if self.attn_pool is None else self.attn_pool(x)

    def _check_pool(self, name: str, pool: str) -> None:
        check_pool(name, pool, self.has_class_token)
        if pool == "map" and self.attn_pool is None:
            raise ValueError(f"{name} 'map' needs a model made with it, got {self.global_pool!r}")

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, N, D) -> logits, or the pooled and normalised features with pre_logits."""
        x = self.head_drop(self.fc_norm(self.pool(x)))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head for num_classes (0: none), and optionally another pooling; the norms stay where they are.

        Raises:
            TypeError, ValueError: num_classes; no such global_pool, "token" of a model without CLS, "map" of one
                without attention pooling. Nothing is changed then.
        """
        check_integers(0, num_classes=num_classes)
        if global_pool is not None:
            self._check_pool("global_pool", global_pool)
            if global_pool != "map":
                self.attn_pool = None
            self.global_pool = global_pool
        self.num_classes = num_classes
        like = next(self.patch_embed.parameters())
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.embed_dim, num_classes, device=like.device, dtype=like.dtype)
        self.head.train(self.training)
