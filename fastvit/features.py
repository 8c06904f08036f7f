"""Dense features: the tokens after chosen blocks, as timm's models and Meta's DINOv2 and DINOv3 return them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastvit.modules.arguments import check_choice, check_flags, checked_indices
from fastvit.modules.parts import mask_arguments

__all__ = ["Backbone"]

Indices = int | Sequence[int]


class Backbone(nn.Module):
    """Base class of `VisionTransformer`: image to tokens, after the last block or after chosen ones.

    B: batch, P: prefix tokens (CLS, then registers or a distillation token), n = h * w: patches, D: embed_dim.
    """

    blocks: nn.Sequential
    norm: nn.Module
    patch_embed: Any  # PatchEmbed, or a module that was put in its place
    embed_dim: int
    fc_norm: nn.Module
    num_prefix_tokens: int
    has_class_token: bool

    def __init__(self) -> None:
        super().__init__()
        self.grad_checkpointing = False

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map an image (B, C, H, W) to the tokens after the last block and `norm`, (B, P + n, D).

        Args:
            x: image.
            attn_mask, is_causal: of every block, as in `fastvit.Attention`; its N = P + n tokens include the prefix.
        """
        x, *rest = self._embedded(x)
        masks = mask_arguments(attn_mask, is_causal)
        if rest or masks or (self.grad_checkpointing and torch.is_grad_enabled()):
            for i in range(len(self.blocks)):
                x = self._run_block(i, x, *rest, **masks)
        else:
            x = self.blocks(x)
        return self.norm(x)

    def forward_intermediates(
        self, x: Tensor, indices: Indices | None = None, return_prefix_tokens: bool = False, norm: bool = False,
        stop_early: bool = False, output_fmt: str = "NCHW", intermediates_only: bool = False, output_dict: bool = False,
        attn_mask: Tensor | None = None, is_causal: bool = False,
    ) -> Any:  # fmt: skip
        """Return the patches' tokens after chosen blocks, as timm's method of this name.

        Args:
            x: image (B, C, H, W).
            indices: blocks, counted from the end if negative; an integer n stands for the last n, None for all. The
                result is in the order of the blocks, each once.
            return_prefix_tokens: return pairs with the prefix tokens, (B, P, D), if the model has any.
            norm: apply `norm` to each of them.
            stop_early: run no block after the last one that is wanted.
            output_fmt: "NCHW" for (B, D, h, w), contiguous; "NLC" for (B, n, D).
            intermediates_only: leave out the final tokens.
            output_dict: return a dict of "image_intermediates", "image_intermediates_prefix" and "image_features".
            attn_mask, is_causal: as in `forward_features`.

        Returns:
            (tokens (B, P + n, D) after `norm`, list of intermediates), the list alone, or the dict.

        Raises:
            TypeError, ValueError: unknown indices or output_fmt.
        """
        check_flags(
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            stop_early=stop_early,
            intermediates_only=intermediates_only,
            output_dict=output_dict,
        )
        check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        depth = len(self.blocks)
        taken = checked_indices("indices", depth if indices is None else indices, depth)
        masks = mask_arguments(attn_mask, is_causal)
        x, patches, prefix = self._intermediates(x, taken, norm, stop_early, output_fmt == "NCHW", masks)
        if output_dict:
            found: dict[str, Any] = {"image_intermediates": patches}
            if return_prefix_tokens and prefix:
                found["image_intermediates_prefix"] = prefix
            return found if intermediates_only else {**found, "image_features": self.norm(x)}
        pairs = list(zip(patches, prefix, strict=True)) if return_prefix_tokens and prefix else patches
        return pairs if intermediates_only else (self.norm(x), pairs)

    def get_intermediate_layers(
        self, x: Tensor, n: Indices = 1, reshape: bool = False, *, return_prefix_tokens: bool = False,
        return_class_token: bool = False, norm: bool = True, attn_mask: Tensor | None = None, is_causal: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the patches' tokens after chosen blocks, as DINOv2's method of this name, and timm's.

        **norm is True by default, as in DINOv2, whose callers rely on it; in timm it is False.** The arguments after
        `reshape`, whose order differs between the two, are taken by name only.

        Args:
            x: image (B, C, H, W).
            n: how many of the last blocks, or the blocks' indices, counted from the end if negative.
            reshape: (B, D, h, w) instead of (B, n, D).
            return_prefix_tokens: timm's: return pairs with the prefix tokens, (B, P, D), if the model has any.
            return_class_token: DINOv2's: return pairs with CLS, (B, D).
            norm: apply `norm` to each of them.
            attn_mask, is_causal: as in `forward_features`.

        Returns:
            A tuple with a tensor or a pair for each block, in the order of the blocks.

        Raises:
            TypeError, ValueError: an unknown n; both kinds of pairs; CLS of a model without one.
        """
        check_flags(
            reshape=reshape, return_prefix_tokens=return_prefix_tokens, return_class_token=return_class_token, norm=norm
        )
        if return_class_token and return_prefix_tokens:
            raise ValueError(
                "return_class_token and return_prefix_tokens must not both be True: prefix tokens have CLS"
            )
        if return_class_token and not self.has_class_token:
            raise ValueError("return_class_token must be False for a model with class_token=False, got True")
        taken = checked_indices("n", n, len(self.blocks))
        masks = mask_arguments(attn_mask, is_causal)
        _, patches, prefix = self._intermediates(x, taken, norm, True, reshape, masks)
        if return_class_token:
            return tuple((y, tokens[:, 0]) for y, tokens in zip(patches, prefix, strict=True))
        if return_prefix_tokens and prefix:
            return tuple(zip(patches, prefix, strict=True))
        return tuple(patches)

    def prune_intermediate_layers(
        self, indices: Indices = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what `forward_intermediates` with these indices does not need, in place, as timm's.

        Args:
            indices: as in `forward_intermediates`: the blocks after the last of them are removed.
            prune_norm: remove `norm`.
            prune_head: remove `attn_pool`, `fc_norm` and `head`; the model then returns all tokens, or, with
                a distillation token, the mean of its two tokens.

        Returns:
            The indices, counted from the first block.
        """
        check_flags(prune_norm=prune_norm, prune_head=prune_head)
        taken = checked_indices("indices", indices, len(self.blocks))
        self.blocks = nn.Sequential(*list(self.blocks)[: max(taken) + 1])
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return taken

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """List each block's name, its channels D and the longer side of a patch, for timm's feature extractors."""
        reduction = max(self.patch_embed.patch_size)
        return [
            {"module": f"blocks.{i}", "num_chs": self.embed_dim, "reduction": reduction}
            for i in range(len(self.blocks))
        ]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of saving its activations."""
        self.grad_checkpointing = enable

    # ---- defined by the subclasses ----

    def _embedded(self, x: Tensor) -> tuple[Any, ...]:
        """Return the first block's tokens (B, P + n, D) of an image, and further arguments that all blocks take."""
        raise NotImplementedError

    def _grid_of(self, x: Tensor) -> tuple[int, int]:
        """Return the patch grid (h, w) of an image."""
        raise NotImplementedError

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        raise NotImplementedError

    # ---- internal ----

    def _run_block(self, i: int, x: Tensor, *rest: Any, **masks: Any) -> Tensor:
        block = self.blocks[i]
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, *rest, use_reentrant=False, **masks)
        return block(x, *rest, **masks)

    def _intermediates(
        self, image: Tensor, taken: Collection[int], norm: bool, stop_early: bool, reshape: bool, masks: dict[str, Any]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the tokens after the last block that ran, and the patches and prefix tokens after the taken blocks."""
        grid = self._grid_of(image)
        x, *rest = self._embedded(image)
        last = max(taken) if stop_early else len(self.blocks) - 1
        kept = []
        for i in range(last + 1):
            x = self._run_block(i, x, *rest, **masks)
            if i in taken:
                kept.append(self.norm(x) if norm else x)
        P = self.num_prefix_tokens
        prefix = [y[:, :P] for y in kept] if P else []
        patches = [y[:, P:] for y in kept]
        if reshape:
            patches = [y.transpose(1, 2).unflatten(2, grid).contiguous() for y in patches]
        return x, patches, prefix
