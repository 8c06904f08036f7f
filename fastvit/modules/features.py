"""Dense features: the tokens after chosen blocks, as timm's models and Meta's DINOv2 and DINOv3 return them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastvit.modules.arguments import check_choice, check_flags, checked_indices
from fastvit.modules.packing import Images, Packed
from fastvit.modules.parts import mask_arguments
from fastvit.ops.attention.checks import check_unmasked

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
    rope: Any  # rotary positions of `fastvit.modules.rope`, or None
    # Methods of the subclasses: the first block's tokens, (B, P + n, D) of an image, and the patch grid (h, w)
    _embedded: Callable[[Tensor], Tensor]
    _embedded_list: Callable[[Images], Packed]
    _grid_of: Callable[[Tensor], tuple[int, int]]
    reset_classifier: Callable[..., None]

    def __init__(self) -> None:
        super().__init__()
        self.grad_checkpointing = False

    def forward_features(self, x: Tensor | Images, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
        """Map an image (B, C, H, W) to the tokens (B, P + n, D) after the last block and `norm`.

        Args:
            x: image; or a list of images of any sizes that the patch divides, also with dynamic_img_size=False, of one
                dtype and device. An entry is an image (C, H, W) or a batch (B, C, H, W). The tokens of all images run
                together, without padding (Dehghani et al. 2023, arXiv:2307.06304); each image has the results that it
                has alone.
            attn_mask, is_causal: of every block, as in `fastvit.Attention`; its N = P + n tokens include the prefix.
                Not for a list.

        Returns:
            The tokens; for a list a list of the tokens of each entry, (P + n, D) or (B, P + n, D), views of one tensor.

        Raises:
            TypeError, ValueError: naming the entry of a list that does not fit.
        """
        if isinstance(x, (list, tuple)):
            check_unmasked(attn_mask, is_causal, of="a list of images")
            packed = self._embedded_list(x)
            return packed.split(self._blocks_packed(*packed[:4]))
        tokens = self._embedded(x)
        options = mask_arguments(attn_mask, is_causal)
        if self.rope is not None:
            options["rope"] = self.rope.get_embed(self._grid_of(x), x.device)
        if options or (self.grad_checkpointing and torch.is_grad_enabled()):
            for i in range(len(self.blocks)):
                tokens = self._run_block(i, tokens, **options)
        else:
            tokens = self.blocks(tokens)
        return self.norm(tokens)

    def forward_intermediates(
        self, x: Tensor, indices: Indices | None = None, return_prefix_tokens: bool = False, norm: bool = False,
        stop_early: bool = False, output_fmt: str = "NCHW", intermediates_only: bool = False, output_dict: bool = False,
        attn_mask: Tensor | None = None, is_causal: bool = False,
    ) -> Any:  # fmt: skip
        """Return the patches' tokens after chosen blocks, as timm's method of this name.

        Args:
            x: image (B, C, H, W), or a list as in `forward_features`. For a list there is a list instead of each
                tensor, with an element for each entry; an image (C, H, W) has no dimension B.
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
        by_entry: Callable[[Tensor], Any] = lambda y: y  # noqa: E731
        grids: Any
        if isinstance(x, (list, tuple)):
            check_unmasked(attn_mask, is_causal, of="a list of images")
            packed = self._embedded_list(x)
            tokens, by_entry, grids = packed.tokens, packed.split, [entry.grid for entry in packed.entries]
            options = mask_arguments(None, False, packed.cu_seqlens, packed.max_seqlen, packed.rope)
        else:
            tokens, grids = self._embedded(x), self._grid_of(x)
            options = mask_arguments(attn_mask, is_causal)
            if self.rope is not None:
                options["rope"] = self.rope.get_embed(grids, x.device)
        kept = []
        for i in range(max(taken) + 1 if stop_early else depth):
            tokens = self._run_block(i, tokens, **options)
            if i in taken:
                kept.append(by_entry(self.norm(tokens) if norm else tokens))
        P = self.num_prefix_tokens
        prefix = [_each(lambda t: t[..., :P, :], y) for y in kept] if P and return_prefix_tokens else []
        patches = [_each(lambda t: t[..., P:, :], y) for y in kept]
        if output_fmt == "NCHW":
            patches = [_each(_as_image, y, grids) for y in patches]
        last = None if intermediates_only else by_entry(self.norm(tokens))
        if output_dict:
            found = {"image_intermediates": patches}
            if prefix:
                found["image_intermediates_prefix"] = prefix
            return found if intermediates_only else {**found, "image_features": last}
        pairs = list(zip(patches, prefix, strict=True)) if prefix else patches
        return pairs if intermediates_only else (last, pairs)

    def get_intermediate_layers(
        self, x: Tensor, n: Indices = 1, reshape: bool = False, *, return_prefix_tokens: bool = False,
        return_class_token: bool = False, norm: bool = True, attn_mask: Tensor | None = None, is_causal: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the patches' tokens after chosen blocks, as DINOv2's method of this name, and timm's.

        **norm is True by default, as in DINOv2, whose callers rely on it; in timm it is False.** The arguments after
        `reshape`, whose order differs between the two, are taken by name only.

        Args:
            x: image (B, C, H, W), or a list as in `forward_intermediates`.
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
        check_flags(reshape=reshape, return_class_token=return_class_token)
        if return_class_token and return_prefix_tokens:
            raise ValueError(
                "return_class_token and return_prefix_tokens must not both be True: prefix tokens have CLS"
            )
        if return_class_token and not self.has_class_token:
            raise ValueError("return_class_token must be False for a model with class_token=False, got True")
        taken = checked_indices("n", n, len(self.blocks))
        pairs = self.forward_intermediates(
            x, taken, return_class_token or return_prefix_tokens, norm, True, "NCHW" if reshape else "NLC", True,
            attn_mask=attn_mask, is_causal=is_causal,
        )  # fmt: skip
        if return_class_token:
            return tuple((y, _each(lambda t: t[..., 0, :], prefix)) for y, prefix in pairs)
        return tuple(pairs)

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

    # ---- internal ----

    def _run_block(self, i: int, x: Tensor, **options: Any) -> Tensor:
        block = self.blocks[i]
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, use_reentrant=False, **options)
        return block(x, **options)

    def _blocks_packed(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, rope: Tensor | None = None) -> Tensor:
        """Run all blocks and `norm` on the tokens (T, D) of a list of images."""
        options = mask_arguments(None, False, cu_seqlens, max_seqlen, rope)
        for i in range(len(self.blocks)):
            x = self._run_block(i, x, **options)
        return self.norm(x)


def _each(function: Callable[..., Tensor], y: Any, *others: Any) -> Any:
    """Call a function with a tensor and others, or with the elements of lists of them."""
    return function(y, *others) if isinstance(y, Tensor) else list(map(function, y, *others))


def _as_image(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """(..., n, D) -> (..., D, h, w), contiguous."""
    return patches.transpose(-2, -1).unflatten(-1, grid).contiguous()
