"""Fused ops in the models of other libraries: `accelerate`, `restore`, `accelerated`."""

from fastvit.integrations.apply import accelerate, accelerated, restore
from fastvit.report import Entry, Report

__all__ = ["Entry", "Report", "accelerate", "accelerated", "restore"]
