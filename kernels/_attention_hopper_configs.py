"""Where attention takes its kernels for Hopper, and their launch configurations.

Time on an H200 in bfloat16, as shares of that of the kernels that run elsewhere, by heads or tiles of queries for each
multiprocessor (benchmarks/results/nvidia_h200/attention_gluon.txt):

    short, d = 64     N 197: 23 heads 0.76; 5.8: 0.82; 2.9: 0.88; 1.5: 1.03. N 257: 16 heads 0.75; 3.9: 0.85; 1: 1.06
    long, d = 64      N 1,025: 17 tiles 0.87; 2.2: 1.00; 0.5: 1.04. N 4,097: 16 tiles 0.82; 2: 0.79.
                      N 577: 23 tiles 1.03; 1.5: 1.31
    long, d = 128     N 1,025: 35 tiles 0.68; 4.4: 0.76; 1.1: 0.90. N 257: 23 tiles 0.95; 1.5: 1.14. N 197: 16: 0.81
    backward, d = 64  N 197: 23 heads 0.74; 2.9: 0.75; 1.5: 0.87; 0.1: 1.36. N 100, 145 and 196: 0.66, 0.82, 0.74
"""

import functools
import math
from typing import NamedTuple

from fastvit.kernels._attention_configs import key_tails

ROWS = 64  # queries of a group of warps
BLOCK_N = 128

SHORT = range(129, 273)  # lengths, at d = 64, whose keys are in shared memory at once
BACKWARD = range(97, 225)  # lengths, at d = 64, whose head is there: 230,076 bytes of 232,448 at 224
# The least heads for each multiprocessor, and what share of their rounds of heads must be full
SHORT_HEADS = 2.0, 0.8
BACKWARD_HEADS = 1.4, 0.7
# Of the backward kernel's threads: with keys, with dQ. With 168 and 152 the keys' loop spills nothing, but dQ's spills
# more, and 0.74 is 0.88
REGISTERS, DQ_REGISTERS = 160, 168


class Long(NamedTuple):
    """Where `long` is taken: a head dimension, the shortest length, the least number of tiles of queries for each
    multiprocessor; and its groups of warps and slots for tiles of keys."""

    head_dim: int
    shortest: int
    least_tiles: float
    groups: int
    slots: int


LONG = Long(64, 1000, 2.0, 3, 3), Long(128, 1000, 1.0, 2, 2), Long(128, BLOCK_N + 1, 8.0, 2, 2)  # the first that fits


class HopperConfig(NamedTuple):
    """keys: parts of all keys (short), or of the last tile of keys (long). tiles: of queries, of a head. groups, slots:
    of long; 0: short."""

    keys: tuple[int, ...]
    tiles: int
    groups: int
    slots: int


@functools.cache
def attention_hopper(n: int, head_dim: int, heads_per_sm: float) -> HopperConfig | None:
    """Configure attention_hopper_short.py or attention_hopper_long.py for 16 bits on sm_90; None where neither is
    faster. heads_per_sm: of all samples, for each multiprocessor."""
    if head_dim == 64 and n in SHORT:
        return HopperConfig(_parts(n), -(-n // ROWS), 0, 0) if _fill(heads_per_sm, *SHORT_HEADS) else None
    row = next((row for row in LONG if row.head_dim == head_dim and row.shortest <= n), None)
    if row is None or heads_per_sm * (tiles := -(-n // (ROWS * row.groups))) < row.least_tiles:
        return None
    return HopperConfig(key_tails((n - 1) % BLOCK_N + 1), tiles, row.groups, row.slots)


@functools.cache
def attention_bwd_hopper(n: int, head_dim: int, heads_per_sm: float) -> tuple[int, int] | None:
    """Configure attention_hopper_bwd.py for 16 bits on sm_90: return how many whole tiles of queries a head has, and
    the width of a narrow one after them or 0; None where it is not faster."""
    if head_dim != 64 or n not in BACKWARD or not _fill(heads_per_sm, *BACKWARD_HEADS):
        return None
    last = (n - 1) % ROWS + 1
    tail = 16 if last <= 16 else 32 if last <= 32 else 0
    return -(-n // ROWS) - (tail > 0), tail


def _fill(heads_per_sm: float, least: float, share: float) -> bool:
    return heads_per_sm >= max(least, share * math.ceil(heads_per_sm))


def _parts(n: int) -> tuple[int, ...]:
    """Split n keys into at most three powers of two, of which only the last may hold more than there are."""
    full, rest = divmod(n, BLOCK_N)
    parts = (BLOCK_N,) * full
    return parts + tuple(part for part in key_tails(rest) if part) if rest else parts
