"""Follows CLS through the blocks of a model, towards its final state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastvit.study.attention import recording
from fastvit.study.attention.queries import QueryTokens
from fastvit.study.attention.recording import AttentionCall, Patches
from fastvit.study.attention.weights import several_images
from fastvit.study.sources.model_source import blocks


@dataclass(frozen=True)
class ClsEvolution:
    """The cosine of a state after each block to the state after the last block.

    Attributes:
        cosine: (images, blocks), float64 on the CPU. The last column is 1.
        pooled: True if the state is the mean of the patches, because the model has no CLS.
    """

    cosine: Tensor = field(repr=False)
    pooled: bool

    @property
    def mean(self) -> Tensor:
        """The mean over the images, (blocks,)."""
        return self.cosine.mean(0)

    @property
    def state(self) -> str:
        """The state in words: "CLS" or "the patches' mean"."""
        return "the patches' mean" if self.pooled else "CLS"


def cls_evolution(model: nn.Module, images: Tensor | Sequence[Tensor]) -> ClsEvolution:
    """Compute the cosine of CLS after each block to CLS after the last block, before the model's last norm. For a model
    without CLS, it is the mean of the patches instead.

    The model runs once for each image, as for `attention_maps`. Only the states are kept.

    Args:
        model: any with a list of blocks (nn.ModuleList, nn.Sequential) that return all tokens, as in timm, transformers
            and torchvision: ours, accelerated, or untouched. If there are several lists, the longest is taken.
        images: (B, C, H, W) or (C, H, W), as the model takes them, or a sequence of (C, H, W) of one size.

    Raises:
        ValueError: no blocks are found, or they return something else than (1, N, D) or (1, h, w, D) with the N of all
            patches and prefix tokens; or the model has no patches or no attention.
        TypeError: images that are no tensors.
    """
    found = [_states(model, image) for image in several_images(images)]
    cosine = torch.stack([F.cosine_similarity(states, states[-1:], dim=-1) for states, _ in found])
    return ClsEvolution(cosine, found[0][1])


def _states(model: nn.Module, image: Tensor) -> tuple[Tensor, bool]:
    """Return the state after each block, (blocks, D) float64 on the CPU, and whether it is the mean of the patches."""
    tokens, states, patches = QueryTokens(model, None), list[Tensor](), list[Patches | None]()

    def on_call(call: AttentionCall) -> None:
        patches.append(call.patches)

    def after(block: nn.Module, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(x, Tensor) or x.dim() < 3 or x.shape[0] != 1:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"block {len(states)} ({type(block).__name__}) must return (1, N, D), got {got}")
        if not patches:
            raise ValueError(f"block {len(states)} ({type(block).__name__}) has no self-attention that is seen")
        x = x.flatten(1, -2)[0].cpu().double()
        if reason := tokens.locate(len(x), patches[0]):
            raise ValueError(f"block {len(states)} does not return all tokens: {reason}")
        states.append(x[0] if tokens.has_cls else x[tokens.prefix :].mean(0))

    hooks = [block.register_forward_hook(after) for block in blocks(model)]
    try:
        recording.run(model, image, on_call)
    finally:
        for hook in hooks:
            hook.remove()
    if not states:
        raise ValueError(
            f"{tokens.kind} has no list of blocks that run: no nn.ModuleList or nn.Sequential of one class"
        )
    return torch.stack(states), not tokens.has_cls
