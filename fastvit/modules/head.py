"""From tokens to logits: pooling and classifier of `VisionTransformer`, with timm's names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastvit.features import Backbone
from fastvit.modules.arguments import check_integers
from fastvit.modules.packing import Images
from fastvit.modules.parts import check_unmasked, mask_arguments
from fastvit.modules.pooling import AttentionPoolLatent, check_pool, pool_sequences, pool_tokens


class Head(Backbone):
    """Adds pooling and classifier to a `Backbone`; base class of `VisionTransformer`.

    B: batch, N: tokens, D: embed_dim.
    """

    num_classes: int
    global_pool: str
    num_heads: int
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

    def _pool_packed(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Pool the tokens of every image of a list: (T, D) -> (B, D), or unchanged for ""."""
        pool = self.global_pool
        if pool == "":
            return x
        if pool == "token":
            return x.index_select(0, cu_seqlens[:-1])
        P = 0 if self._pools_prefix() else self.num_prefix_tokens
        if self.attn_pool is not None:
            return self.attn_pool.pool_sequences(x, cu_seqlens, max_seqlen, P)
        return pool_sequences(x, pool, cu_seqlens, max_seqlen, P, self.num_heads)

    def _pools_prefix(self) -> bool:
        """Return whether the poolings of patches take CLS and registers too."""
        return False

    def _check_pool(self, name: str, pool: str) -> None:
        check_pool(name, pool, self.has_class_token)
        if pool == "map" and self.attn_pool is None:
            raise ValueError(f"{name} 'map' needs a model made with it, got {self.global_pool!r}")

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map tokens (B, N, D) to logits, or with pre_logits to the pooled and normalised features."""
        return self._classify(self.pool(x), pre_logits)

    def _classify(self, pooled: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.fc_norm(pooled))
        return x if pre_logits else self.head(x)

    def forward_packed(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, *rest: Any) -> Any:
        """Map the embedded images of a list to logits: (T, D) -> (B, num_classes), for global_pool="" (T, num_classes).

        `forward` calls it for a list. It is the same for all sizes of images, unlike the embedding before it; to
        compile it once for all lists:

            model.forward_packed = torch.compile(model.forward_packed, dynamic=True)

        Args:
            tokens, cu_seqlens, max_seqlen, rest: as the embedding returns them.
        """
        x = self._blocks_packed(tokens, cu_seqlens, max_seqlen, *rest)
        return self._classify_packed(x, cu_seqlens, max_seqlen)

    def _classify_packed(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Any:
        return self._classify(self._pool_packed(x, cu_seqlens, max_seqlen))

    def forward(self, x: Tensor | Images, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
        """Map an image to logits, or a list of images of any sizes, as in `forward_features`: one row of logits each,
        (B, num_classes), in their order; with global_pool="" a list. attn_mask, is_causal: as in `forward_features`."""
        if isinstance(x, list | tuple):
            check_unmasked(attn_mask, is_causal, of="a list of images")
            packed, rest = self._embedded_list(x)
            out = self.forward_packed(packed.tokens, packed.cu_seqlens, packed.max_seqlen, *rest)
            return packed.split(out) if self.global_pool == "" else out
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
