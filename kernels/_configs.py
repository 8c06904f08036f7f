"""Launch configurations: pure functions of shapes, dtype and target, so that a result never depends on a timing.

`arch` is "sm_90", "sm_80", "gfx942", ...; sizes are in elements, `itemsize` in bytes.
"""

from dataclasses import dataclass


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class RowConfig:
    """A kernel whose program owns whole rows: [block_rows, block_dim] in registers."""

    block_rows: int
    block_dim: int  # power of two >= D
    num_warps: int


MAX_ROW = 65536  # elements of a row that a program can hold in registers


def layer_norm(dim: int, *, backward: bool = False) -> RowConfig:
    """Narrow rows share a program, wide rows get more warps. The forward gives a thread 16 elements, two 16-byte
    accesses of bfloat16; the backward, with three tensors and three sums in registers, 8."""
    block_dim = max(next_power_of_2(dim), 16)
    threads = 32 * min(max(block_dim // 256, 8) if backward else max(block_dim // 512, 4), 32)
    return RowConfig(max((8 if backward else 16) * threads // block_dim, 1), block_dim, threads // 32)


PROGRAMS_PER_SM = 2  # of a persistent grid that keeps partial sums


@dataclass(frozen=True)
class ColumnSumConfig:
    """Sum over the rows of a [P, D] float32 table."""

    block_rows: int = 32
    block_dim: int = 32
    num_warps: int = 4


COLUMN_SUM = ColumnSumConfig()


@dataclass(frozen=True)
class DropoutConfig:
    """Four runs of `block` consecutive elements a program; part of what decides the mask, so the same for all dtypes."""

    block: int = 1024
    num_warps: int = 4


DROPOUT = DropoutConfig()
