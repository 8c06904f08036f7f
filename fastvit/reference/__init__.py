"""The models in plain PyTorch, straight from the papers: the Vision Transformer (`vit.py`) and EVA's (`eva.py`).

Classes and arguments have the names of `fastvit.layers`, where they are described.
"""

from fastvit.reference.eva import Eva
from fastvit.reference.vit import ACTIVATIONS as ACTIVATIONS
from fastvit.reference.vit import NORMS as NORMS
from fastvit.reference.vit import (
    Attention,
    AttentionPoolLatent,
    Block,
    DropPath,
    LayerScale,
    Mlp,
    PatchEmbed,
    RMSNorm,
    VisionTransformer,
)

__all__ = [
    "Attention",
    "AttentionPoolLatent",
    "Block",
    "DropPath",
    "Eva",
    "LayerScale",
    "Mlp",
    "PatchEmbed",
    "RMSNorm",
    "VisionTransformer",
]
