"""Launch configurations of attention with decomposed relative positions. They hold the widest tiles that spill no
registers, and were not chosen by time."""

import functools
from dataclasses import dataclass

from fastvit.kernels._attention_configs import _PLAIN, Row, Tile, _instructions, _parts
from fastvit.kernels._configs import FIRST_TIER, next_power_of_2

# By kernel, and by the instructions that matmuls compile to. The kernel of dK and dV owns keys, the others queries.
_ROWS: dict[str, dict[str, tuple[Row, ...]]] = {
    "fwd": {
        "wgmma": (Row(80, Tile(64, 64, 4)), Row(128, Tile(64, 32, 4), 256), Row(128, Tile(128, 64, 8))),
        "mma": (Row(64, Tile(64, 64, 4)), Row(128, Tile(64, 32, 4))),
    },
    "dq": {
        "wgmma": (Row(64, Tile(64, 32, 4), 1100), Row(64, Tile(128, 64, 8)), Row(128, Tile(64, 32, 4))),
        "mma": (Row(128, Tile(64, 32, 4)),),
    },
    "dkdv": {
        "wgmma": (Row(64, Tile(64, 64, 4)), Row(96, Tile(64, 32, 4)), Row(128, Tile(64, 16, 4))),
        "mma": (Row(80, Tile(64, 16, 4)), Row(96, Tile(16, 32, 4)), Row(128, Tile(32, 32, 4))),
    },
}


@dataclass(frozen=True)
class RelativeConfig:
    """Tiles of block_m queries and grid_rows x grid_columns keys. even: no tile of keys reaches beyond the grid. loop,
    tail: as of `AttentionBackwardConfig`, along the queries. parts: (D0, D1) of the head dimension."""

    block_m: int
    grid_rows: int
    grid_columns: int
    even: bool
    loop: bool
    tail: int
    parts: tuple[int, int]
    num_warps: int
    num_stages: int


@functools.cache
def attention_relative(
    kernel: str, m: int, height: int, width: int, head_dim: int, itemsize: int, arch: str, tf32: bool, in_windows: bool
) -> RelativeConfig:
    """Configure a kernel, "fwd", "dq" or "dkdv", for m queries and a grid of height x width keys."""
    instructions = _instructions(itemsize, arch, tf32)
    table = *_ROWS[kernel].get(instructions, ()), *_PLAIN.get(instructions, _PLAIN["16-bit"])
    own, loop, num_warps, _ = next(row.tile for row in table if head_dim <= row.head_dim and m <= row.longest)
    spills = (kernel == "fwd" and head_dim <= 32) or (kernel == "dq" and head_dim > 96)
    if in_windows and arch == "sm_80" and spills:
        loop //= 2
    # outside of the first tier: on AMD smaller tiles may get no matrix instructions, elsewhere wider ones spill
    if arch.startswith("gfx") and itemsize > 2:
        own, loop, num_warps = 32, 32, 4
    elif arch not in FIRST_TIER and instructions == "mma" and kernel == "dq" and head_dim > 64:
        loop = 16
    block_m, block_n = (loop, own) if kernel == "dkdv" else (own, loop)
    columns = grid_columns(width, block_n)
    rows = block_n // columns
    even = width % columns == 0 and height % rows == 0
    tail = min(max(next_power_of_2((m - 1) % block_m + 1), 16), block_m)
    stages = 3 if itemsize == 2 and arch in FIRST_TIER else 2
    return RelativeConfig(
        block_m, rows, columns, even, m > block_m, tail, _parts(head_dim, instructions), num_warps, stages
    )


def grid_columns(width: int, most: int) -> int:
    """Return how many columns of the grid a tile has, a power of two of at most `most`: the largest one that pads the
    width by at most a quarter of what is unavoidable, so that 14 takes 16, 40 takes 3 x 16, and 64 itself."""
    smallest = min(next_power_of_2(width), 8)
    powers = [smallest << i for i in range(8) if smallest << i <= most]
    padded = {columns: -(-width // columns) * columns for columns in powers}
    return max(columns for columns in powers if padded[columns] <= 1.25 * padded[smallest])
