"""What a ViT costs and what it looks at: plain functions that return dataclasses. The command
`fastvit` is over them."""

from fastvit.study._doctor import Finding, doctor
from fastvit.study._hardware import gpus
from fastvit.study._models import ModelCost, models
from fastvit.study._verify import Verdict, verify

__all__ = ["Finding", "ModelCost", "Verdict", "doctor", "gpus", "models", "verify"]
