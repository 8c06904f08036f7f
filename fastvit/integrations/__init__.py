"""Fused ops in the models of other libraries: `accelerate`, `restore`, `accelerated`."""

from fastvit.integrations._accelerate import accelerate, accelerated, restore
from fastvit.integrations._report import Entry, Report

__all__ = ["Entry", "Report", "accelerate", "accelerated", "restore"]
