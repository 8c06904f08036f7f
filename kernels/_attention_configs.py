"""Launch configurations of attention; those of other kernels are in _configs.py.

A program owns a tile of one sequence (queries or keys) and loops along the other: `own` x `loop` scores at a time. The
tables are keyed by the instructions that matmuls compile to on the target. The rows of "wgmma" up to d = 128 were the
fastest ones on an H200, in bfloat16 without a mask (benchmarks/NOTES.md); all others hold the widest tiles that spill
no registers, and were not chosen by time. Everything else (float32, AMD, head dimensions over 128) takes a plain tile
that fits everywhere.

`kind` is "" for plain attention, "windows" (of a grid, with a mask or without), "mask", "lengths" (packed sequences),
"groups" (several heads share keys), "causal" or "keys" (more or fewer of them than queries). All but "" have no
backward kernel for short sequences. `own`: how long the side is of which a program owns a tile; 0: as long as the one
it loops along.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from fastvit.kernels._configs import FIRST_TIER, next_power_of_2


class Tile(NamedTuple):
    own: int
    loop: int
    num_warps: int
    stages: int | None = None  # of the loop; None: as `_stages` says


class Row(NamedTuple):
    """The tile up to a head dimension and a length. The first row of a table that fits counts."""

    head_dim: int
    tile: Tile
    longest: float = math.inf


_Rows = tuple[Row, ...]
_MASKED = "mask", "windows"  # kinds that take registers for masks

_FORWARD: dict[str, _Rows] = {
    "wgmma": (
        Row(64, Tile(64, 32, 4), 288), Row(64, Tile(128, 64, 8)), Row(96, Tile(64, 32, 4), 400),
        Row(96, Tile(128, 64, 4)), Row(128, Tile(64, 32, 4)), Row(256, Tile(128, 32, 8)),
    ),
    "mma": (Row(80, Tile(128, 128, 8)), Row(128, Tile(128, 64, 8))),
}  # fmt: skip
_DQ: dict[str, _Rows] = {
    "wgmma": (Row(64, Tile(64, 32, 4), 1100), Row(64, Tile(128, 64, 8)), Row(256, Tile(64, 32, 4))),
    "mma": (Row(80, Tile(128, 64, 8)), Row(128, Tile(128, 32, 8))),
}
_DKDV: dict[str, _Rows] = {
    "wgmma": (
        Row(64, Tile(64, 32, 4, 4)), Row(96, Tile(64, 64, 4)), Row(128, Tile(64, 32, 4)), Row(256, Tile(64, 32, 8)),
    ),
    "mma": (Row(64, Tile(128, 64, 8)), Row(96, Tile(128, 32, 8)), Row(128, Tile(128, 16, 8))),
}  # fmt: skip
_DKDV_MASKED: dict[str, _Rows] = {
    "mma": (Row(32, Tile(128, 64, 8)), Row(96, Tile(64, 32, 4)), Row(128, Tile(32, 32, 4)))
}
# of windows, which are short
_FORWARD_WINDOWS = _FORWARD | {"mma": (Row(64, Tile(64, 64, 4)), Row(128, Tile(64, 32, 4)))}
_DQ_WINDOWS = _DQ | {"mma": (Row(128, Tile(64, 32, 4)),)}
_DKDV_WINDOWS = _DKDV | {"mma": (Row(32, Tile(64, 32, 4)), Row(128, Tile(32, 32, 4)))}
_DMASK: dict[str, _Rows] = {
    "wgmma": (Row(64, Tile(64, 64, 4)), Row(128, Tile(64, 32, 4))),
    "mma": (Row(96, Tile(64, 32, 4)), Row(128, Tile(64, 16, 4))),
}
_PLAIN: dict[str, _Rows] = {
    "16-bit": (Row(128, Tile(64, 32, 4)), Row(256, Tile(16, 16, 4))),
    "float32": (Row(128, Tile(32, 32, 8)), Row(256, Tile(16, 16, 8))),
    "tf32": (Row(64, Tile(32, 32, 4)), Row(256, Tile(16, 16, 4))),
}
# (shortest, longest, warps): lengths at which a whole head of at most 64 dimensions fits in one program of sm_90. That
# takes a third less traffic than two kernels, but all registers: with dropout only the first row fits. In between and
# beyond, it was slower at few heads or at many (results/nvidia_h200/attention_short.txt): 65 tokens, 3,072 heads:
# 175 us, two kernels 147; 197 tokens, 12 heads: 21, two kernels 15.
_SHORT_BACKWARD = ((1, 64, 4), (97, 128, 8))


def _instructions(itemsize: int, arch: str, tf32: bool) -> str:
    """Return what matmuls compile to, which is a key of the tables."""
    if itemsize > 2:
        return "tf32" if tf32 else "float32"
    if arch.startswith("gfx"):
        return "16-bit"
    return "wgmma" if arch == "sm_90" else "mma"


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Return (D0, D1), powers of two with D0 + D1 >= head_dim and little padding: 80 = 64 + 16. D1 is 0 if one part is
    enough."""
    lower = 1 << head_dim.bit_length() - 1
    rest = max(next_power_of_2(head_dim - lower), 16) if head_dim > lower else 0
    return (lower, rest) if rest < lower else (2 * lower, 0)


def _parts(head_dim: int, instructions: str) -> tuple[int, int]:
    """Split the head dimension, and a single wide part into two halves unless matmuls are wgmma: others keep their
    operands in registers, and halves need fewer at a time."""
    parts = split_head_dim(head_dim)
    return (parts[0] // 2, parts[0] // 2) if parts[1] == 0 and parts[0] > 64 and instructions != "wgmma" else parts


def _tile(
    rows: dict[str, _Rows], instructions: str, n: int, head_dim: int, has_dropout: bool, arch: str, kind: str = "",
    length: int = 0, causal: bool = False,
) -> Tile:  # fmt: skip
    table = *rows.get(instructions, ()), *_PLAIN.get(instructions, _PLAIN["16-bit"])
    own, loop, num_warps, stages = next(row.tile for row in table if head_dim <= row.head_dim and n <= row.longest)
    wide = head_dim > 64 if instructions == "mma" else head_dim > 80
    if kind in _MASKED or (has_dropout and head_dim > 64) or (causal and wide):  # all take registers
        loop = max(loop // 2, 32 if instructions == "wgmma" else 16)
    length = length or n
    # the last tile would be half empty, as at N = 257
    if own == 128 and -(-length // 64) * 64 * 1.1 < -(-length // 128) * 128:
        own, num_warps = 64, 4
    num_warps = min(num_warps, 4) if arch.startswith("gfx") else num_warps  # AMD: warps of 64 threads
    return Tile(own, loop, num_warps, stages)


def _with_loop(n: int, loop: int) -> int:
    """Return a width of the loop's tiles, at most `loop`, with which the loop runs, as long as n > 16.

    In a forward kernel without a loop, ptxas 12.8 (of triton 3.6 and 3.7) wrongly computes where the second part of the
    head dimension lies in shared memory: it adds the low half of a 64-bit address to both halves, if the upper one is
    known to be zero. On an H200 that was nonsense, or an illegal access, at d = 40, 48, 72, 80, 88 and 96. The report
    of compiled kernels finds it in any kernel (benchmarks/codegen/wrong_sums.py)."""
    while n <= loop and loop > 16:
        loop //= 2
    return loop


def _last(n: int, block: int) -> int:
    """Return how many of n rows are in the last tile: 1 to block."""
    return (n - 1) % block + 1


def key_tails(keys: int) -> tuple[int, int]:
    """Split the keys after the full tiles into one tile or two, the second 0 if one is enough: powers of two, at least
    16, of which the first is the larger one. Only the last one may hold more than there are keys."""
    total = -(-keys // 16) * 16
    while total.bit_count() > 2:
        total += 16
    first = 1 << total.bit_length() - 1
    return first, total - first


@dataclass(frozen=True)
class AttentionForwardConfig:
    """Score tiles [block_m queries, block_n keys]. Full ones come if `loop`; the rest of the keys is in one tile or
    two, as wide as `tails` says. parts: (D0, D1) of the head dimension."""

    block_m: int
    block_n: int
    loop: bool
    tails: tuple[int, int]
    parts: tuple[int, int]
    num_warps: int
    num_stages: int


@functools.cache
def attention_fwd(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool = False, kind: str = "",
    own: int = 0, causal: bool = False,
) -> AttentionForwardConfig:  # fmt: skip
    """Configure attention_fwd_kernel for n keys, and `own` queries."""
    instructions = _instructions(itemsize, arch, tf32)
    rows = _FORWARD_WINDOWS if kind == "windows" else _FORWARD
    block_m, block_n, num_warps, stages = _tile(rows, instructions, n, head_dim, has_dropout, arch, kind, own, causal)
    if kind in _MASKED and instructions == "mma" and head_dim > 64:
        block_n = min(block_n, 32)
    if kind == "windows" and instructions == "mma" and has_dropout:
        block_n = min(block_n, 16)
    if kind in _MASKED and instructions == "wgmma" and head_dim <= 64 and block_m == 128:
        block_n = 64  # N = 1025 on an H200: padding 405 us, learnt biases 560; with 32 keys 503 and 507
    parts = _parts(head_dim, instructions)
    if instructions == "wgmma" and parts[1]:
        block_n = _with_loop(n, block_n)
    tails = key_tails(_last(n, block_n))
    stages = stages or _stages(itemsize, arch)
    return AttentionForwardConfig(block_m, block_n, n > block_n, tails, parts, num_warps, stages)


@dataclass(frozen=True)
class AttentionBackwardConfig:
    """Score tiles [block_m queries, block_n keys]. The last one is `tail` wide; full tiles come before it if `loop`.
    parts: (D0, D1) of the head dimension. max_registers: of a thread."""

    block_m: int
    block_n: int
    loop: bool
    tail: int
    parts: tuple[int, int]
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@functools.cache
def attention_bwd_dq(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool, kind: str = "", own: int = 0,
    causal: bool = False,
) -> AttentionBackwardConfig:  # fmt: skip
    """Configure attention_bwd_dq_kernel, whose programs own queries and loop along the keys."""
    instructions = _instructions(itemsize, arch, tf32)
    rows = _DQ_WINDOWS if kind == "windows" else _DQ
    block_m, block_n, num_warps, stages = _tile(rows, instructions, n, head_dim, has_dropout, arch, kind, own, causal)
    loop, tail = _loop(n, block_n)
    # With a wide last tile, a program takes a few registers too many for two programs on an SM; ptxas can save them.
    limited = instructions == "wgmma" and (block_m, block_n, num_warps, tail) == (128, 64, 8, 64) and head_dim <= 64
    limited = limited and not (has_dropout or kind)
    parts, stages = _parts(head_dim, instructions), stages or _stages(itemsize, arch)
    return AttentionBackwardConfig(block_m, block_n, loop, tail, parts, num_warps, stages, 128 if limited else None)


@functools.cache
def attention_bwd_dkdv(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool, kind: str = "", own: int = 0,
    causal: bool = False,
) -> AttentionBackwardConfig:  # fmt: skip
    """Configure attention_bwd_dkdv_kernel, whose programs own keys and loop along the queries."""
    instructions = _instructions(itemsize, arch, tf32)
    rows = _DKDV_MASKED if kind == "mask" and instructions in _DKDV_MASKED and head_dim <= 128 else _DKDV
    rows = _DKDV_WINDOWS if kind == "windows" else rows
    block_n, block_m, num_warps, stages = _tile(rows, instructions, n, head_dim, has_dropout, arch, kind, own, causal)
    if kind in _MASKED and instructions == "wgmma" and head_dim > 96:
        block_m = min(block_m, 16)
    if kind in _MASKED and causal and instructions == "mma" and head_dim > 64:
        block_n = min(block_n, 32 if head_dim <= 80 else 16)
    if kind == "windows" and instructions == "mma" and has_dropout:
        block_n = min(block_n, 32)
    if kind == "windows" and head_dim > 64:
        block_m = min(block_m, 16)
        if instructions == "wgmma" and head_dim > 96:
            num_warps = 8
    if kind == "groups":  # the kernel loops over heads, around the loop over queries
        block_m = max(block_m // (2 if head_dim <= 80 and not has_dropout else 4), 16)
        if instructions == "16-bit":
            stages = 1  # Triton 3.7 cannot compile AMD's pipeline within a loop for d = 40, 72, 80 and over 128
        if head_dim > 96:
            block_n, num_warps = min(block_n, 64 if head_dim <= 192 else 32), 4  # 64 spill 1,032 bytes at d = 256
    if instructions == "float32" and head_dim > 96 and arch.startswith("gfx"):
        block_m = min(block_m, 16)  # 32 spill 360 bytes, and take 82 slots a score instead of 75
    parts, max_registers = _parts(head_dim, instructions), None
    stages = stages or _stages(itemsize, arch)
    loop, tail = _loop(n, block_m)
    # Four programs on an SM instead of three: 0.91 to 0.97 of the time up to 1,025 tokens on an H200 (NOTES.md).
    # Next to a wider last tile, ptxas would wait for every wgmma.
    if instructions == "wgmma" and parts == (64, 0) and not (kind or has_dropout) and tail == 16:
        stages, max_registers = 3, 128
    return AttentionBackwardConfig(block_m, block_n, loop, tail, parts, num_warps, stages, max_registers)


def _stages(itemsize: int, arch: str) -> int:
    """Return the stages of a loop. With 2 it waits for its loads right after issuing them; with 3 the loads of another
    tile are in flight while it waits."""
    return 3 if itemsize == 2 and arch in FIRST_TIER else 2


def _loop(n: int, block: int) -> tuple[bool, int]:
    """Return whether full tiles come before the last one, and the width of the last one."""
    return n > block, max(next_power_of_2(_last(n, block)), 16)


@functools.cache
def attention_bwd_short(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool, kind: str = ""
) -> AttentionBackwardConfig | None:
    """Configure attention_bwd_short_kernel, whose programs take a whole head; None where its tiles do not fit."""
    if kind or itemsize > 2 or arch != "sm_90":
        return None
    for shortest, longest, num_warps in _SHORT_BACKWARD:
        if head_dim <= 64 and shortest <= n <= longest and not (has_dropout and longest > 64):
            return AttentionBackwardConfig(longest, 64, True, 0, split_head_dim(head_dim), num_warps, 3)
    return None


@functools.cache
def attention_bwd_mask(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool, kind: str = "mask"
) -> AttentionBackwardConfig:
    """Configure attention_bwd_mask_kernel, whose programs own a tile of the mask's gradient."""
    instructions = _instructions(itemsize, arch, tf32)
    block_m, block_n, num_warps, _ = _tile(_DMASK, instructions, n, head_dim, has_dropout, arch)
    if kind == "windows":
        block_n = min(block_n, 32 if instructions == "wgmma" else 16)
        if instructions == "float32" and head_dim > 64:
            num_warps = 4  # 8 spill 368 bytes at d = 128, and take 630 slots a score instead of 470
    parts, stages = _parts(head_dim, instructions), _stages(itemsize, arch)
    if itemsize > 2 and sum(parts) > 192 and arch.startswith("gfx"):
        stages = 1  # 2 take 65 KiB of shared memory, of 64
    return AttentionBackwardConfig(block_m, block_n, False, 0, parts, num_warps, stages)


@functools.cache
def mask_share(tiles: int, sharing: int, multiprocessors: int) -> int:
    """Return how many heads one program adds up, of the `sharing` heads that a tile of a mask's gradient sums.

    A multiprocessor has room for two programs. If the tiles alone would not fill the GPU, several programs share a
    tile: the number that takes the least time, in at most four rounds of programs. Writing and reading a partial sum
    counts as one more head.
    """
    at_once = 2 * multiprocessors
    if tiles >= at_once:
        return sharing

    def heads_in_turn(share: int) -> int:
        programs = -(-sharing // share) * tiles
        return -(-programs // at_once) * (share + 1)

    most = min(4 * at_once // tiles, sharing)
    return min((-(-sharing // splits) for splits in range(1, most + 1)), key=heads_in_turn)
