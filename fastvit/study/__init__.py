"""What a ViT costs and what it looks at: plain functions that return dataclasses. The command
`fastvit` is over them."""

from fastvit.study._attention import AttentionMaps, TokenWeights, attention_maps, attention_rollout
from fastvit.study._pictures import Picture, read_picture

__all__ = ["AttentionMaps", "Picture", "TokenWeights", "attention_maps", "attention_rollout", "read_picture"]
