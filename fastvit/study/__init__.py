"""What a ViT costs and what it looks at: plain functions that return dataclasses. The command
`fastvit` is over them."""

from fastvit.study._attention import AttentionMaps, TokenWeights, attention_maps, attention_rollout
from fastvit.study._block import BlockCost, BlockOp, block
from fastvit.study._doctor import Finding, doctor
from fastvit.study._explore import Exploration, PatchEmbedding, explore, patch_embedding
from fastvit.study._hardware import gpus
from fastvit.study._memory import MemoryPoint, MemoryStudy, image_size, largest_batch, largest_image, memory
from fastvit.study._models import ModelCost, models
from fastvit.study._pictures import Picture, read_picture
from fastvit.study._plan import Parts, Setting
from fastvit.study._verify import Verdict, verify

__all__ = [
    "AttentionMaps",
    "BlockCost",
    "BlockOp",
    "Exploration",
    "Finding",
    "MemoryPoint",
    "MemoryStudy",
    "ModelCost",
    "Parts",
    "PatchEmbedding",
    "Picture",
    "Setting",
    "TokenWeights",
    "Verdict",
    "attention_maps",
    "attention_rollout",
    "block",
    "doctor",
    "explore",
    "gpus",
    "image_size",
    "largest_batch",
    "largest_image",
    "memory",
    "models",
    "patch_embedding",
    "read_picture",
    "verify",
]
