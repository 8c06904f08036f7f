"""The choices that tuning tries for each table, and the choices of other tables that are fixed meanwhile."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping
from pathlib import Path

from fastvit.kernels._tuned import LONGEST_SHORT

Choice = tuple[int, ...]  # in the order of fastvit.kernels._tuned.FIELDS

# While a table is measured, these choices of other tables hold at every key, so that the table's own kernel runs.
_SPLIT = {"attention_bwd_short": (0, 64, 64, 4, 2)}
FIXED: dict[str, Mapping[str, Choice]] = {
    "attention_bwd_dq": _SPLIT,
    "attention_bwd_dkdv": _SPLIT,
    "activation_backward": {"use_triton_gemm": (0,)},
    "gemm": {"use_triton_gemm": (1,)},
}
_LISTS: dict[str, list[list[int]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def candidates(table: str, key: tuple[int, ...]) -> list[Choice]:
    """Return the choices to try in addition to the shipped one. Some may not compile or not fit the GPU."""
    if table == "layer_norm":
        width = max(1 << (key[0] - 1).bit_length(), 16)
        backward = bool(key[1])
        grids = ((2, 3), (3, 3), (2, 4), (3, 1)) if backward else ((8, 1), (4, 3))  # programs an SM, stages
        most = 16 if backward else 32  # elements a thread
        tiles = itertools.product((1, 2, 4, 8, 16), repeat=2)  # rows, warps
        fit = [(rows, warps) for rows, warps in tiles if 4 <= rows * width // (32 * warps) <= most]
        return [(*tile, *grid) for tile in fit for grid in grids]
    choices = [tuple(choice) for choice in _LISTS[table]]
    if table == "attention_bwd_short":
        short = key[0] <= LONGEST_SHORT
        return [c for c in choices if short and (c[0] == 0 or key[0] <= c[1] <= 2 * key[0])]
    return choices
