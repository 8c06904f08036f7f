"""The models in plain PyTorch, straight from the papers: the Vision Transformer (`vit.py`), with a distillation token
(`distilled.py`), and EVA's (`eva.py`)."""

from fastvit.reference.distilled import VisionTransformerDistilled
from fastvit.reference.eva import Eva
from fastvit.reference.vit import (
    ACTIVATIONS,
    NORMS,
    Attention,
    AttentionPoolLatent,
    Block,
    DropPath,
    LayerScale,
    Mlp,
    PatchEmbed,
    PostNormBlock,
    RMSNorm,
    VisionTransformer,
)

__all__ = [
    "ACTIVATIONS",
    "NORMS",
    "Attention",
    "AttentionPoolLatent",
    "Block",
    "DropPath",
    "Eva",
    "LayerScale",
    "Mlp",
    "PatchEmbed",
    "PostNormBlock",
    "RMSNorm",
    "VisionTransformer",
    "VisionTransformerDistilled",
]
