"""What a ViT costs and what it looks at: plain functions that return dataclasses. The command
`fastvit` is over them."""

from fastvit.study._memory import MemoryPoint, MemoryStudy, image_size, largest_batch, largest_image, memory
from fastvit.study._plan import Parts, Setting

__all__ = ["MemoryPoint", "MemoryStudy", "Parts", "Setting", "image_size", "largest_batch", "largest_image", "memory"]
