"""From tokens to logits: pooling and classifier of `VisionTransformer`, with timm's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastvit.modules.arguments import check_integers
from fastvit.modules.features import Backbone
from fastvit.modules.packing import Images
from fastvit.modules.parts import check_takes, mask_arguments
from fastvit.modules.pooling import AttentionPoolLatent, check_pool, pool_sequences, pool_tokens
from fastvit.ops.attention.checks import check_unmasked

_FOR_IMAGES = ("forward_features", "pool", "forward_head")  # methods that lists do not call


class Head(Backbone):
    """Adds pooling and classifier to a `Backbone`; base class of `VisionTransformer`.

    B: batch, N: tokens, D: embed_dim.
    """

    num_classes: int
    global_pool: str
    num_heads: int
    attn_pool: AttentionPoolLatent | None
    _compiled_lists: Callable[..., Any] | None = None
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
            lengths: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
            pooled: Tensor = self.attn_pool(x, **lengths, num_prefix_tokens=P)
            return pooled
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

    def compile_lists(self, **options: Any) -> None:
        """Compile what runs for a list of images after their embedding, in place, as `nn.Module.compile` compiles what
        runs for a batch: one graph for all lists of two images or more, and another one for a list of one image.
        Copies and pickles are not compiled.

        Args:
            options: of `torch.compile`; dynamic is True by default.
        """
        self._compiled_lists = torch.compile(type(self)._forward_packed, **{"dynamic": True, **options})

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_compiled_lists", None)
        return state

    def _forward_packed(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, rope: Tensor | None = None) -> Any:
        """Map the embedded images of a list to logits: (T, D) -> (B, num_classes), for global_pool="" (T, num_classes).
        It is the same for all sizes of images, unlike the embedding before it."""
        x = self._blocks_packed(tokens, cu_seqlens, max_seqlen, rope)
        return self._classify_packed(x, cu_seqlens, max_seqlen)

    def _classify_packed(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Any:
        return self._classify(self._pool_packed(x, cu_seqlens, max_seqlen))

    def forward(self, x: Tensor | Images, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
        """Map an image to logits, or a list of images of any sizes, as in `forward_features`: one row of logits each,
        (B, num_classes), in their order; with global_pool="" a list. attn_mask, is_causal: as in `forward_features`."""
        if isinstance(x, (list, tuple)):
            check_unmasked(attn_mask, is_causal, of="a list of images")
            self._check_takes_lists()
            packed = self._embedded_list(x)
            run = self._compiled_lists or type(self)._forward_packed
            out = run(self, *packed[:4])
            return packed.split(out) if self.global_pool == "" else out
        return self.forward_head(self.forward_features(x, **mask_arguments(attn_mask, is_causal)))

    def _check_takes_lists(self) -> None:
        """Check that a list has the results of the model's own methods: no other code for single images is ignored."""
        name = _other_method(type(self)) or next((name for name in _FOR_IMAGES if name in self.__dict__), None)
        if name is not None:
            raise TypeError(f"a list of images needs the {name} of fastvit, which {type(self).__qualname__} replaces")
        if self.attn_pool is not None:
            check_takes("attn_pool of a model that takes lists", self.attn_pool, "cu_seqlens")

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


def _other_method(kind: type) -> str | None:
    """Return the name of a method for single images that a class has from another class than `_classify_packed`, which
    does the same for lists, or None."""
    own = next(base for base in kind.__mro__ if "_classify_packed" in base.__dict__)
    return next((name for name in _FOR_IMAGES if getattr(kind, name) is not getattr(own, name)), None)


_other_method._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as has_own_forward: not traced
