"""Studies of what a ViT costs and what it attends to: functions that return dataclasses. The command `fastvit` prints
their results."""

from fastvit.study.accuracy.verification import Verdict, verify
from fastvit.study.attention.layers import AttentionDistance, ClsEvolution, attention_distance, cls_evolution
from fastvit.study.attention.maps import AttentionMaps, TokenWeights, attention_maps, attention_rollout
from fastvit.study.explore.exploration import Exploration, PatchEmbedding, explore, patch_embedding
from fastvit.study.fitting.choices import Choice
from fastvit.study.fitting.planning import fit
from fastvit.study.fitting.report import Fit, FitPoint
from fastvit.study.machine import Finding, doctor
from fastvit.study.memory.block import BlockCost, BlockOp, block
from fastvit.study.memory.growth import MemoryStudy, image_size, memory
from fastvit.study.memory.plan import MemoryPoint, Parts
from fastvit.study.memory.search import largest_batch, largest_image
from fastvit.study.memory.step import Setting
from fastvit.study.models.costs import ModelCost, models
from fastvit.study.pictures import Picture, read_picture

__all__ = [
    "AttentionDistance",
    "AttentionMaps",
    "BlockCost",
    "BlockOp",
    "Choice",
    "ClsEvolution",
    "Exploration",
    "Finding",
    "Fit",
    "FitPoint",
    "MemoryPoint",
    "MemoryStudy",
    "ModelCost",
    "Parts",
    "PatchEmbedding",
    "Picture",
    "Setting",
    "TokenWeights",
    "Verdict",
    "attention_distance",
    "attention_maps",
    "attention_rollout",
    "block",
    "cls_evolution",
    "doctor",
    "explore",
    "fit",
    "image_size",
    "largest_batch",
    "largest_image",
    "memory",
    "models",
    "patch_embedding",
    "read_picture",
    "verify",
]
