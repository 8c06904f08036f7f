"""The modules of EVA, DINOv3 and the Perception Encoder: timm's names, arguments and state_dict keys, with fused ops
inside as in `fastvit.layers`."""

from fastvit.modules.eva import AttentionRope, EvaAttention, EvaBlock

__all__ = ["AttentionRope", "EvaAttention", "EvaBlock"]
