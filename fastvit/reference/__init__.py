"""The models in plain PyTorch, straight from the papers: the Vision Transformer (`vit.py`) and its blocks (`block.py`),
with a distillation token (`distilled.py`), and EVA's (`eva.py`).

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
)
from fastvit.reference.distilled import VisionTransformerDistilled
from fastvit.reference.eva import Eva
from fastvit.reference.vit import AttentionPoolLatent, PatchEmbed, VisionTransformer

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
