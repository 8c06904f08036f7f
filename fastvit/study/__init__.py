"""What a ViT costs and what it looks at: plain functions that return dataclasses. The command
`fastvit` is over them."""

from fastvit.study._hardware import GPUS
from fastvit.study._models import ModelCost, models

__all__ = ["GPUS", "ModelCost", "models"]
