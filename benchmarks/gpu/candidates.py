"""The choices that tuning tries for each table, and the choices of other tables that are fixed meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

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


def _with_stages(*tiles: tuple[int, ...]) -> list[Choice]:
    """Expand (block_m, block_n, num_warps, stages, stages, ...) to a choice for each number of stages."""
    return [(*tile[:3], stages) for tile in tiles for stages in tile[3:]]


_ATTENTION = _with_stages(
    (64, 32, 4, 3, 2), (128, 64, 8, 3, 2, 4), (64, 64, 4, 2, 3, 4), (128, 128, 8, 2, 3, 4), (64, 128, 4, 2, 3),
    (128, 64, 4, 2, 3), (128, 32, 8, 3),
)  # fmt: skip
_ATTENTION_DQ = _with_stages(
    (128, 64, 8, 2, 3, 4),
    (128, 128, 8, 2, 3),
    (64, 64, 4, 2, 3, 4),
    (64, 128, 4, 3),
    (128, 32, 8, 3),
    (64, 32, 4, 3, 4),
)
_ATTENTION_DKDV = _with_stages(
    (64, 128, 8, 2, 3, 4), (32, 128, 8, 2, 3), (64, 64, 4, 2, 3, 4), (32, 128, 4, 3, 4), (32, 64, 4, 2, 3, 4)
)
_GEMM = [
    (128, 128, 64, 8, 3, 128, 2), (128, 256, 64, 8, 4, 0, 1),  # a persistent grid, with operands by TMA
    (128, 128, 64, 8, 3, 128, 0), (128, 128, 64, 8, 3, 0, 0), (128, 128, 64, 8, 4, 0, 0), (128, 128, 64, 4, 3, 0, 0),
    (128, 256, 64, 8, 3, 0, 0), (128, 256, 64, 8, 4, 0, 0), (256, 128, 64, 8, 3, 0, 0), (64, 128, 64, 4, 4, 0, 0),
    (64, 64, 64, 4, 4, 0, 0), (128, 64, 64, 4, 4, 0, 0),
]  # fmt: skip
_PATCH: list[Choice] = [
    (128, 128, 64, 8, 3), (128, 128, 32, 8, 4), (64, 64, 64, 4, 3), (64, 64, 32, 4, 4),
    (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 256, 64, 8, 3),
]  # fmt: skip


_LAYER_NORM: list[Choice] = [(rows, warps) for rows in (1, 2, 4, 8, 16) for warps in (1, 2, 4, 8, 16)]
_COLUMN_SUM: list[Choice] = [
    (16, 32, 4), (32, 32, 4), (32, 32, 8), (64, 32, 4), (64, 32, 8), (128, 16, 8), (32, 64, 4), (32, 128, 8)
]  # fmt: skip
_ACTIVATION = [(8, 256, 4), (4, 512, 4), (4, 256, 4), (8, 256, 8), (8, 128, 4), (16, 128, 4)]
_SHORT_BWD = [(64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 32, 8), (256, 64, 8), (256, 32, 8), (256, 64, 16)]


def candidates(table: str, key: tuple[int, ...]) -> list[Choice]:
    """Return the choices to try in addition to the shipped one. Some may not compile or not fit the GPU."""
    if table == "layer_norm":
        width = max(1 << (key[0] - 1).bit_length(), 16)
        backward = bool(key[1])
        grids = ((2, 3), (3, 3), (2, 4), (3, 1)) if backward else ((8, 1), (4, 3))  # programs an SM, stages
        most = 16 if backward else 32  # elements a thread
        tiles = [(rows, warps) for rows, warps in _LAYER_NORM if 4 <= rows * width // (32 * warps) <= most]
        return [(*tile, *grid) for tile in tiles for grid in grids]
    if table == "activation_backward":
        return [(m, n, steps, warps) for m, n, warps in _ACTIVATION for steps in (4, 8, 16)]
    if table == "attention_bwd_short" and key[0] <= LONGEST_SHORT:
        return [(0, 64, 64, 4, 2), *((1, m, n, warps, 3) for m, n, warps in _SHORT_BWD if key[0] <= m <= 2 * key[0])]
    if table == "gemm":
        return [(m, n, k, group, *rest) for m, n, k, *rest in _GEMM for group in (1, 8)]
    fixed: dict[str, list[Choice]] = {
        "column_sum": _COLUMN_SUM, "attention_fwd": _ATTENTION, "attention_bwd_dq": _ATTENTION_DQ,
        "attention_bwd_dkdv": _ATTENTION_DKDV, "attention_bwd_short": [], "use_triton_gemm": [(0,), (1,)],
        "patch_embed": _PATCH,
    }  # fmt: skip
    return fixed[table]
