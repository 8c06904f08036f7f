"""What a library calls the weights of a Vision Transformer, and how it interpolates positions."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from fastvit.modules.positions import Resize, antialiased


def plain(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """As transformers and MAE."""
    return F.interpolate(image, size=grid, mode="bicubic")


def bilinear(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """As Meta's Perception Encoder."""
    return F.interpolate(image, size=grid, mode="bilinear")


def align_corners(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """As torchvision."""
    return F.interpolate(image, size=grid, mode="bicubic", align_corners=True)


def with_offset(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """As Meta's DINOv2 without registers: the scale of a grid that is 0.1 larger."""
    h, w = image.shape[-2:]
    return F.interpolate(image, scale_factor=((grid[0] + 0.1) / h, (grid[1] + 0.1) / w), mode="bicubic")


@dataclass(frozen=True)
class Source:
    """The names of one library. A key is `prefix + name + tail` or `prefix + block + name + tail`; `rename` looks
    the longest name up that is in the table, and keeps the tail (".weight")."""

    name: str
    marker: str  # behind the prefix, a key that only this source has
    prefixes: tuple[str, ...]
    block: str  # regular expression: the block's number, and the rest
    in_block: Mapping[str, str]
    in_model: Mapping[str, str]  # the vision model's other names
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # names without the prefix
    resize: Resize = antialiased
    square: bool = True  # whether positions always are of a square grid
    lacks: str = ""  # behind the prefix, a key that it has not and another one with its marker has

    def wrote(self, keys: Container[str], prefix: str) -> bool:
        return prefix + self.marker in keys and not (self.lacks and prefix + self.lacks in keys)

    def rename(self, key: str, prefix: str) -> str:
        """Our name; "" for what is no part of a vision model; the key itself where the tables do not have it."""
        if not key.startswith(prefix):
            return _looked_up(key, self.elsewhere, key)
        name = key.removeprefix(prefix)
        block = re.fullmatch(self.block, name)
        if block is None:
            return _looked_up(name, self.in_model, key)
        return f"blocks.{block[1]}.{_looked_up(block[2], self.in_block, block[2])}"


def _looked_up(name: str, table: Mapping[str, str], otherwise: str) -> str:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        head, tail = ".".join(parts[:cut]), parts[cut:]
        if head in table:
            return ".".join([table[head], *tail]) if table[head] else ""
    return otherwise


def ignored(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")
