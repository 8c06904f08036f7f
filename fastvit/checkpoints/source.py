"""The names that a library gives the weights of a Vision Transformer, and how it interpolates positions."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from fastvit.modules.positions import Resize, antialiased


def plain(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """Interpolate like transformers and MAE."""
    return F.interpolate(image, size=grid, mode="bicubic")


def bilinear(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """Interpolate like Meta's Perception Encoder."""
    return F.interpolate(image, size=grid, mode="bilinear")


def with_offset(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """Interpolate like Meta's DINOv2 without registers: with the scale factor of a grid that is 0.1 larger."""
    h, w = image.shape[-2:]
    return F.interpolate(image, scale_factor=((grid[0] + 0.1) / h, (grid[1] + 0.1) / w), mode="bicubic")


@dataclass(frozen=True)
class Source:
    """The names of one library. A key is `prefix + name + tail` or `prefix + block + name + tail`; `rename` looks up
    the longest name that is in the table, and keeps the tail (".weight")."""

    name: str
    marker: str  # a key, after the prefix, that only this source has
    prefixes: tuple[str, ...]
    block: str  # regular expression with two groups: the block's number, and the name in the block
    in_model: Mapping[str, str]  # the names in the vision model outside of blocks
    in_block: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # names without the prefix
    resize: Resize = antialiased
    square: bool = True  # whether positions always belong to a square grid
    lacks: str = ""  # a key, after the prefix, that another source with this marker has and this one has not

    def wrote(self, keys: Container[str], prefix: str) -> bool:
        return prefix + self.marker in keys and not (self.lacks and prefix + self.lacks in keys)

    def rename(self, key: str, prefix: str) -> str:
        """Return our name of a key: "" if it is no part of a vision model, the key itself if no table has it."""
        if not key.startswith(prefix):
            return _looked_up(key, self.elsewhere, key)
        name = key.removeprefix(prefix)
        block = re.fullmatch(self.block, name)
        if block is None:
            return _looked_up(name, self.in_model, key)
        return f"blocks.{block[1]}.{_looked_up(block[2], self.in_block, block[2])}"


def _looked_up(name: str, table: Mapping[str, str], otherwise: str) -> str:
    parts = name.split(".", 8)  # no table has names of more parts
    for cut in range(len(parts), 0, -1):
        head, tail = ".".join(parts[:cut]), parts[cut:]
        if head in table:
            return ".".join([table[head], *tail]) if table[head] else ""
    return otherwise


def ignored(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")
