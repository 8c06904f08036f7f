"""Plain PyTorch: every op (`ops.py`, `windows.py`), and the Vision Transformer (`vit.py`) and its blocks (`block.py`),
straight from the papers. The plain form of `fastvit.Eva` and of models with a distillation token is timm's, with the
same state_dict.

`benchmarks/examples/worked_example.py` computes a tiny ViT step by step, next to numbers that were worked by hand.
"""

from fastvit.reference.block import (
    ACTIVATIONS,
    NORMS,
    Attention,
    Block,
    DropPath,
    LayerScale,
    Mlp,
    PostNormBlock,
    RMSNorm,
    SwiGLU,
    SwiGLUPacked,
)
from fastvit.reference.vit import AttentionPoolLatent, PatchEmbed, VisionTransformer

__all__ = [
    "ACTIVATIONS",
    "NORMS",
    "Attention",
    "AttentionPoolLatent",
    "Block",
    "DropPath",
    "LayerScale",
    "Mlp",
    "PatchEmbed",
    "PostNormBlock",
    "RMSNorm",
    "SwiGLU",
    "SwiGLUPacked",
    "VisionTransformer",
]
