"""Lists of images of any sizes as one sequence of tokens, without padding (Dehghani et al. 2023, arXiv:2307.06304)."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.modules.parts import check_takes
from fastvit.modules.patch_embed import PatchEmbed
from fastvit.modules.positions import remembered
from fastvit.ops.runtime.checks import check_tensor

Images = list[Tensor] | tuple[Tensor, ...]

_made_bounds: dict[Any, Tensor] = {}


class Entry(NamedTuple):
    """An entry of a list of images.

    batch: how many images it has; None for one image (C, H, W).
    tokens: N, of each image.
    grid: patches down and across.
    """

    batch: int | None
    tokens: int
    grid: tuple[int, int]


class Packed(NamedTuple):
    """The embedded images of a list, one after the other.

    tokens: (T, D).
    cu_seqlens: (B + 1,) int32: where the B images begin and end.
    max_seqlen: the tokens of the largest image.
    rope: rotary positions of all tokens, (T, 2 * D / H), or None.
    entries: of the list.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rope: Tensor | None
    entries: tuple[Entry, ...]

    def split(self, x: Tensor) -> list[Tensor]:
        """Return a view of x (T, ...) for each entry: (N, ...), or (batch, N, ...) for a batch."""
        parts = x.split([(1 if entry.batch is None else entry.batch) * entry.tokens for entry in self.entries])
        return [
            part if entry.batch is None else part.unflatten(0, (entry.batch, entry.tokens))
            for part, entry in zip(parts, self.entries, strict=True)
        ]


def embed_images(model: Any, images: Images) -> Packed:
    """Embed a list of images as `VisionTransformer.forward_features` describes. Images of one size are embedded
    together; the tokens of all are copied once, into one buffer, if there are several sizes."""
    batches, grids = _checked(model, images)
    by_size: dict[tuple[int, ...], list[int]] = {}
    for i, batch in enumerate(batches):
        by_size.setdefault(tuple(batch.shape[2:]), []).append(i)
    parts: list[Tensor] = [None] * len(batches)  # type: ignore[list-item]
    for same in by_size.values():
        together = batches[same[0]] if len(same) == 1 else torch.cat([batches[i] for i in same])
        tokens = model._tokens(together, any_size=True)
        for i, part in zip(same, tokens.split([len(batches[i]) for i in same]), strict=True):
            parts[i] = part
    counts = [part.shape[1] for part in parts]
    one_size = len(by_size) == 1
    tokens = tokens.flatten(0, 1) if one_size else torch.cat([part.flatten(0, 1) for part in parts])
    entries = tuple(
        Entry(None if image.dim() == 3 else len(image), count, grid)
        for image, count, grid in zip(images, counts, grids, strict=True)
    )
    rope, device, P = None, tokens.device, model.num_prefix_tokens
    if model.rope is not None:
        every = (entry.grid for entry in entries for _ in range(entry.batch or 1))
        rope = torch.cat([model.rope.of_image(grid, P, device) for grid in every])
    return Packed(tokens, _bounds(entries, device), max(counts), rope, entries)


def _checked(model: Any, images: Images) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Check a list of images; return each entry as a batch (b, C, H, W), and its patch grid."""
    embed = model.patch_embed
    if not isinstance(embed, PatchEmbed):
        raise TypeError(f"a list of images needs a model whose patch_embed is a PatchEmbed, got {type(embed).__name__}")
    check_takes("patch_embed of a model that takes lists", embed, "any_size")
    for i, block in enumerate(model.blocks):
        check_takes(f"blocks[{i}] of a model that takes lists", block, "cu_seqlens")
    if not images:
        raise ValueError("images must not be an empty list")
    batches, grids = [], []
    for i, image in enumerate(images):
        check_tensor(f"images[{i}]", image, is_image=True)
        if image.dim() not in (3, 4) or image.shape[0] == 0:
            raise ValueError(f"images[{i}] must have shape (C, H, W) or (B, C, H, W), B > 0, got {tuple(image.shape)}")
        if image.dtype is not images[0].dtype or image.device != images[0].device:
            raise TypeError(
                f"images[{i}] must be like images[0], {images[0].dtype} on {images[0].device}, got {image.dtype} on "
                f"{image.device}"
            )
        batch = image[None] if image.dim() == 3 else image
        try:
            grids.append(embed.grid_of(batch, any_size=True))
        except (TypeError, ValueError) as error:
            raise type(error)(f"images[{i}]: {error}") from None
        batches.append(batch)
    return batches, grids


def _bounds(entries: tuple[Entry, ...], device: torch.device) -> Tensor:
    """Return where images begin and end, (B + 1,) int32. It is kept for lists of the same sizes."""
    counts = [entry.tokens for entry in entries for _ in range(1 if entry.batch is None else entry.batch)]
    ends = (0, *itertools.accumulate(counts))
    make = lambda: torch.tensor(ends, dtype=torch.int32, device="cpu").to(device)  # noqa: E731
    return remembered((ends, device), device, make, _made_bounds)


def patch_bounds(cu_seqlens: Tensor, num_prefix_tokens: int) -> tuple[Tensor, Tensor]:
    """Return where 2 * B sequences of B queries and of the tokens of B images begin and end, (2 * B + 1,) each, in
    cu_seqlens' dtype. Sequence 2 * i has the prefix tokens of image i and no query, sequence 2 * i + 1 its patches and
    one query."""
    first = cu_seqlens[:-1]
    bounds = torch.cat((torch.stack((first, first + num_prefix_tokens), 1).flatten(), cu_seqlens[-1:]))
    return torch.arange(bounds.shape[0], dtype=bounds.dtype, device=bounds.device) // 2, bounds
