"""Options and inputs of transformers' vision classes that the rules of coverage/small_transformers.py do not cover: the
tables of small_options.toml."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_EXCEPTIONS = tomllib.loads(Path(__file__).with_name("small_options.toml").read_text())["exception"]
OPTIONS, INPUTS = (
    {name: row[what] for row in _EXCEPTIONS if what in row for name in row["classes"]} for what in ("options", "inputs")
)


def _places(side: int) -> Tensor:
    """Return the row and column of every patch, (2, side * side, 2)."""
    return torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(2, -1, 2)


_GRID = torch.tensor([[1, 4, 4], [1, 4, 4]])  # two images of 4 x 4 patches
_TENSORS = {
    "grid": _GRID,
    "sides": _GRID[:, 1:],
    "places of 6 x 6": _places(6),
    "every other of 32": torch.arange(32)[None] % 2 == 0,
    "words": torch.arange(2 * 77).view(2, 77),
}


def inputs(name: str, config: Any, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Return the arguments of a class in INPUTS."""
    sizes = getattr(config, "vision_config", config).to_dict()

    def number(size: Any) -> int:
        if isinstance(size, list):
            return math.prod(map(number, size))
        return int(sizes[size] if isinstance(size, str) else size)

    def made(value: Any) -> Tensor:
        if isinstance(value, list):
            return normal(*map(number, value))
        if isinstance(value, dict):
            return torch.ones(value["ones"], dtype=torch.long)
        if value == "places and patches":
            return torch.cat([_places(4).float(), normal(2, 16, 768)], -1)
        return _TENSORS[value].clone()

    return {argument: made(value) for argument, value in INPUTS[name].items()}
