"""The modules of a Vision Transformer: timm's names, arguments and state_dict keys, with fused ops inside.

A fused op stands for several submodules at once, which remain real modules: parameters live in them, and hooks may be
put on them. Where a submodule inside a fused span carries a hook, has another `forward`, or is of another class
(parametrised), that part of the block calls its submodules one by one instead, so that nothing is skipped; a linear
layer that is quantised or has peft's LoRA is called by itself between the ops.
"""

from fastvit.modules.attention import Attention
from fastvit.modules.block import Block, ResPostBlock
from fastvit.modules.mlp import GluMlp, Mlp, SwiGLU, SwiGLUPacked
from fastvit.modules.norms import LayerNorm, RMSNorm
from fastvit.modules.parallel import ParallelScalingBlock
from fastvit.modules.parts import DropPath, LayerScale, QuickGELU
from fastvit.modules.patch_embed import PatchEmbed

__all__ = [
    "Attention",
    "Block",
    "DropPath",
    "GluMlp",
    "LayerNorm",
    "LayerScale",
    "Mlp",
    "ParallelScalingBlock",
    "PatchEmbed",
    "QuickGELU",
    "RMSNorm",
    "ResPostBlock",
    "RmsNorm",
    "SwiGLU",
    "SwiGLUPacked",
]

RmsNorm = RMSNorm  # timm's name of PyTorch's
