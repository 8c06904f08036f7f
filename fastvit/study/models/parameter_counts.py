"""Counts a ViT's parameters by part, in any library's names."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from torch import Tensor, nn

from fastvit.study.sources.model_source import embeds_patches


@dataclass(frozen=True)
class Parameters:
    """A model's parameters by part. They add up to `total`: nothing is counted twice or left out.

    Attributes:
        patch_embedding: the projection of patches; in hierarchical models also the convolutions that merge patches.
        positions: embeddings of positions, and prefix tokens (CLS, registers, masks).
        attention, mlp: their linear layers, with biases.
        norms: norms and scales (LayerScale), in any part.
        head: classifier, pooler, attention pooling.
        other: parameters that fit none of these names.
    """

    patch_embedding: int = 0
    positions: int = 0
    attention: int = 0
    mlp: int = 0
    norms: int = 0
    head: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


# The first pattern found in a parameter's name decides, if its module does not: the names of timm, torchvision,
# transformers, and Meta's DINOv2 and DINOv3
_NAMES = (
    ("norms", r"norm|\bln_|gamma|lambda|layer_?scale|\bls\d"),
    ("head", r"^(attn_pool|heads?(_\w+)?\b|classifier|pooler|fc\b)|\.(head|classifier|pooler)\."),
    ("patch_embedding", r"patch_embed|conv_proj"),
    ("positions", r"pos_|position|token|class_embedding|rope|freqs"),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|fc\d|intermediate|output\.dense|ffn|\bw\d"),
)


_JOINT_LAYER = re.compile(r"\b(in|out)_proj\.(weight|bias)$")  # one layer for attention and a parallel MLP


def by_part(model: nn.Module) -> Parameters:
    """Count every parameter once; a shared one belongs to the part of its first name."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        for part, count in _shares(model, name, parameter).items():
            counts[part] = counts.get(part, 0) + count
    return Parameters(**counts)


def _shares(model: nn.Module, name: str, parameter: Tensor) -> dict[str, int]:
    """Return how many elements of a parameter belong to each part.

    In a layer that feeds attention and MLP, 3 * D rows belong to q, k and v. In a layer after both, D columns belong to
    attention, and so does the bias.
    """
    part, total = _part(model, name), parameter.numel()
    layer, found = model.get_submodule(name.rpartition(".")[0]), _JOINT_LAYER.search(name)
    if part == "other" and found and isinstance(layer, nn.Linear):
        D = min(layer.in_features, layer.out_features)
        attention = (3 * D if found[1] == "in" else D) * (D if parameter.dim() == 2 else 1)
        if attention <= total:
            return {"attention": attention, "mlp": total - attention}
    return {part: total}


def _part(model: nn.Module, name: str) -> str:
    owner = model.get_submodule(name.rpartition(".")[0])
    kind = type(owner).__name__.lower()
    if "norm" in kind or "layerscale" in kind:
        return "norms"
    if embeds_patches(owner):
        return "patch_embedding"
    in_linear = isinstance(owner, nn.Linear)
    for part, pattern in _NAMES:
        if re.search(pattern, name) and not (in_linear and part == "norms"):
            return part
    return "other"
