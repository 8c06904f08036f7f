"""The modules of a Vision Transformer: timm's names, arguments and state_dict keys, with fused ops inside, of
EVA, DINOv3 and the Perception Encoder, too. `SwiGLUPacked` is `GluMlp` with silu and the gate first.

A fused op replaces the calls of several submodules, which remain ordinary modules: they hold the parameters, and hooks
may be registered on them. If a submodule in a fused group has a hook, another `forward` or another class (for instance
because it is parametrised), that part of the block calls its submodules one by one, so that nothing is skipped. A
linear layer that is quantised or has peft's LoRA is called as a module between the ops.
"""

from fastvit.modules.attention import Attention, CrossAttention
from fastvit.modules.block import Block, PostNormBlock
from fastvit.modules.eva import AttentionRope, EvaAttention, EvaBlock
from fastvit.modules.mlp import GluMlp, Mlp, SwiGLU, SwiGLUPacked
from fastvit.modules.norms import LayerNorm, RMSNorm
from fastvit.modules.parts import DropPath, LayerScale, QuickGELU
from fastvit.modules.patch_embed import PatchEmbed
from fastvit.modules.rope import RotaryEmbeddingCat, RotaryEmbeddingDinoV3

__all__ = [
    "Attention",
    "AttentionRope",
    "Block",
    "CrossAttention",
    "DropPath",
    "EvaAttention",
    "EvaBlock",
    "GluMlp",
    "LayerNorm",
    "LayerScale",
    "Mlp",
    "PatchEmbed",
    "PostNormBlock",
    "QuickGELU",
    "RMSNorm",
    "RmsNorm",
    "RotaryEmbeddingCat",
    "RotaryEmbeddingDinoV3",
    "SwiGLU",
    "SwiGLUPacked",
]

RmsNorm = RMSNorm
"""timm's name of PyTorch's."""
