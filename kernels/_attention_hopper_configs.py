"""Where attention takes its kernels for Hopper, and their launch configurations.

Times on an H200 in bfloat16, over those of attention.py (benchmarks/results/nvidia_h200, hopper_trials), of the kernels
that these were made from; a second number is that of plain stores:

    short, d = 64    B256 N197 H12: 0.68, 0.89; B32: 0.85, 0.97; B16: -, 1.15; B1: 1.22. B256 N145: -, 0.90.
                     B128 N257 H16: -, 0.98; B8: -, 1.14
    long, d = 64     B32 N1025 H12: 0.86; B4: 1.00; B1: 1.05. B8 N4097 H12: 0.82; B1: 0.79. B64 N577 H12: 1.03; B8: 1.06
    long, d = 128    B32 N1025 H16: 0.69; B4: 0.76; B1: 0.91. B64 N257 H16: 0.95; B4: 1.14. B64 N197 H16: 0.81
"""

import math
from typing import NamedTuple

from fastvit.kernels import _tuned
from fastvit.kernels._attention_configs import key_tails

ROWS = 64  # queries of a group of warps
BLOCK_N = 128

SHORT = range(129, 273)  # lengths, at d = 64, whose keys are in shared memory at once
LEAST_HEADS = 2.0  # for each multiprocessor, from which `short` is taken
BUSY = 0.8  # and what share of the multiprocessors' rounds of heads must be full


class Long(NamedTuple):
    """Where `long` is taken: a head dimension, the shortest length, the least number of tiles of queries for each
    multiprocessor; and its groups of warps and slots for tiles of keys."""

    head_dim: int
    shortest: int
    least_tiles: float
    groups: int
    slots: int


LONG = Long(64, 1000, 2.0, 3, 3), Long(128, 1000, 1.0, 2, 2), Long(128, BLOCK_N + 1, 4.0, 2, 2)  # the first that fits


class HopperConfig(NamedTuple):
    """keys: parts of all keys (short), or of the last tile of keys (long). tiles: of queries, of a head. groups, slots:
    of long; 0: short."""

    keys: tuple[int, ...]
    tiles: int
    groups: int
    slots: int


@_tuned.cached
def attention_hopper(n: int, head_dim: int, heads_per_sm: float) -> HopperConfig | None:
    """Configure attention_hopper_short.py or attention_hopper_long.py for 16 bits on sm_90; None where neither is
    faster. heads_per_sm: of all samples, for each multiprocessor."""
    if head_dim == 64 and n in SHORT:
        is_enough = heads_per_sm >= max(LEAST_HEADS, BUSY * math.ceil(heads_per_sm))
        return HopperConfig(_parts(n), -(-n // ROWS), 0, 0) if is_enough else None
    row = next((row for row in LONG if row.head_dim == head_dim and row.shortest <= n), None)
    if row is None or heads_per_sm * (tiles := -(-n // (ROWS * row.groups))) < row.least_tiles:
        return None
    return HopperConfig(key_tails((n - 1) % BLOCK_N + 1), tiles, row.groups, row.slots)


def _parts(n: int) -> tuple[int, ...]:
    """Split n keys into at most three powers of two, of which only the last may hold more than there are."""
    full, rest = divmod(n, BLOCK_N)
    parts = (BLOCK_N,) * full
    return parts + tuple(part for part in key_tails(rest) if part) if rest else parts
