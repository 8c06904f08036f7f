"""Launch configurations of attention with decomposed relative positions. They hold the widest tiles that spill no
registers, and were not chosen by time."""

from dataclasses import dataclass

from fastvit.kernels import _tuned
from fastvit.kernels._attention_configs import _instructions, _parts
from fastvit.kernels._configs import FIRST_TIER, next_power_of_2

# By the instructions that matmuls compile to, and up to a head dimension: queries and keys of a tile, and warps
_TILES = {
    "fwd": {
        "wgmma": ((80, (64, 64, 4)), (128, (64, 32, 4))),
        "mma": ((80, (64, 64, 4)), (128, (64, 32, 4))),
    },
    "dq": {
        "wgmma": ((80, (64, 32, 4)), (128, (64, 32, 4))),
        "mma": ((80, (64, 32, 4)), (128, (64, 32, 4))),
    },
    "dkdv": {
        "wgmma": ((80, (32, 64, 4)), (128, (32, 64, 4))),
        "mma": ((80, (32, 64, 4)), (128, (32, 32, 4))),
    },
}
_PLAIN = {
    "float32": ((128, (32, 32, 8)), (256, (16, 16, 8))),
    "tf32": ((64, (32, 32, 4)), (256, (16, 16, 4))),
}
_OTHERS = ((128, (64, 32, 4)), (256, (16, 16, 4)))


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


@_tuned.cached
def attention_relative(
    kernel: str, m: int, height: int, width: int, head_dim: int, itemsize: int, arch: str, tf32: bool
) -> RelativeConfig:
    """Configure a kernel, "fwd", "dq" or "dkdv", for m queries and a grid of height x width keys."""
    instructions = _instructions(itemsize, arch, tf32)
    found = *_TILES[kernel].get(instructions, ()), *_PLAIN.get(instructions, _OTHERS)
    block_m, block_n, num_warps = next(tile for most, tile in found if head_dim <= most)
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
