"""Launch configurations of attention, as _configs.py has them for the other kernels: the widest tiles that spill no
registers, by the instructions that the target's matmuls compile to.
"""

from dataclasses import dataclass

from fastvit.kernels import _tuned
from fastvit.kernels._configs import next_power_of_2


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """(D0, D1), powers of two with D0 + D1 >= head_dim and little waste: 80 = 64 + 16; D1 is 0 where one part does."""
    lower = 1 << head_dim.bit_length() - 1
    rest = max(next_power_of_2(head_dim - lower), 16) if head_dim > lower else 0
    return (lower, rest) if rest < lower else (2 * lower, 0)


_Tiles = tuple[tuple[int, tuple[int, int, int]], ...]  # up to which D0 + D1 -> block_m, block_n, num_warps


_WGMMA = ("sm_90", "sm_10")  # their matmuls take operands from shared memory


def _instructions(itemsize: int, has_dropout: bool, arch: str, tf32: bool) -> str:
    if itemsize > 2:
        return "tf32" if tf32 else "fma"
    if arch.startswith("gfx"):
        return "amd"
    if not arch.startswith(_WGMMA):
        return "mma"
    return "wgmma dropout" if has_dropout else "wgmma"


def _rows(tables: dict[str, _Tiles], instructions: str, arch: str) -> _Tiles:
    """Those of the target's family first."""
    family = next((name for name in ("sm_10", "sm_12", "gfx") if arch.startswith(name)), "none")
    return tables.get(f"{instructions} {family}", ()) + tables[instructions]


def _half_empty(n: int) -> bool:
    """Whether n rows in tiles of 64 instead of 128 are less by a tenth."""
    return -(-n // 64) * 64 * 1.1 < -(-n // 128) * 128


# ---- attention forward ----


@dataclass(frozen=True)
class AttentionForwardConfig:
    """Score tile [block_m queries, block_n keys]; `full`: whether any is full, and `chunks`: the narrower tiles behind
    the last full one. block_n is 0 for the short kernel, whose chunks cover all keys at once. parts: the head
    dimension's, (D0, D1)."""

    block_m: int
    block_n: int
    full: bool
    chunks: tuple[int, ...]
    parts: tuple[int, int]
    num_warps: int
    num_stages: int
    values_step: bool = False  # the loop's values pass through registers before their matmul: STEP of add_values


def key_chunks(n: int, largest: int, count: int) -> tuple[int, ...]:
    """n keys as `count` tiles: falling powers of two, at least 16, then zeros. All but the last one are full."""
    total = -(-n // 16) * 16
    while True:
        chunks, rest = [], total
        while rest:
            chunks.append(min(largest, 1 << rest.bit_length() - 1))
            rest -= chunks[-1]
        if len(chunks) <= count:
            return (*chunks, *[0] * (count - len(chunks)))
        total += 16


# By instructions: the widest tiles that do not spill.
_FWD: dict[str, _Tiles] = {
    "wgmma": ((128, (128, 128, 8)), (256, (128, 64, 8))),
    "wgmma dropout": ((64, (128, 128, 8)), (256, (128, 64, 8))),
    "mma": ((80, (128, 128, 8)), (128, (128, 64, 8)), (256, (16, 64, 4))),
    "mma dropout": ((64, (128, 64, 8)), (128, (128, 32, 8)), (256, (16, 64, 4))),
    "amd": ((128, (128, 64, 4)), (256, (64, 32, 4))),
    "tf32": ((128, (128, 32, 8)), (256, (16, 32, 4))),
    "tf32 gfx": ((96, (128, 32, 8)), (128, (64, 32, 4))),  # wider ones as elsewhere; likewise below
    "fma": ((32, (64, 32, 4)), (64, (64, 32, 8)), (96, (32, 32, 8)), (256, (32, 16, 8))),
    "fma sm_10": ((32, (64, 32, 4)), (64, (64, 32, 8)), (96, (32, 32, 8)), (128, (32, 16, 4))),
    "fma dropout": ((96, (32, 32, 8)), (256, (32, 16, 8))),
}
# By instructions: up to which D0 + D1 -> the longest sequence whose scores fit into registers, 64 rows to 4 warps.
_FWD_SHORT: dict[str, tuple[tuple[int, int], ...]] = {
    "wgmma": ((64, 288), (96, 208)),
    "mma": ((64, 208),),
    "amd": ((64, 288), (96, 208)),
}


@_tuned.cached
def attention_fwd(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool = False
) -> AttentionForwardConfig:
    instructions = _instructions(itemsize, False, arch, tf32)
    parts = split_head_dim(head_dim)
    width = sum(parts)
    special = f"{instructions} dropout"
    rows = _rows(_FWD, special if has_dropout and special in _FWD else instructions, arch)
    block_m, block_n, num_warps = next(tile for limit, tile in rows if width <= limit)
    stages = 1 if instructions == "amd" and width > 128 else 2  # 64 KiB of shared memory
    if block_m == 128 and _half_empty(n):
        block_m, num_warps = 64, 4
    if n <= next((longest for limit, longest in _FWD_SHORT.get(instructions, ()) if width <= limit), 0):
        block_m, block_n, num_warps, stages = 64, 0, 4, 2
    if tuned := _tuned.choice(arch, "attention_fwd", n, head_dim, itemsize, has_dropout, tf32):
        block_m, block_n, num_warps, stages = tuned
    if block_n == 0:
        return AttentionForwardConfig(block_m, 0, False, key_chunks(n, 128, 3), parts, num_warps, stages)
    step = instructions == "tf32" and arch.startswith(_WGMMA) and block_m >= 64  # else they compile to mma
    whole = 32 if instructions == "tf32" and not step else 64
    if parts[0] > whole and parts[1] == 0 and instructions in ("mma", "tf32", "fma"):
        parts = (width // 2, width // 2)  # operands that come from registers: one half at a time
    chunks = key_chunks(n % block_n, block_n, 2)
    return AttentionForwardConfig(block_m, block_n, n >= block_n, chunks, parts, num_warps, stages, step)


# ---- attention backward ----


@dataclass(frozen=True)
class AttentionBackwardConfig:
    """Score tile [block_m queries, block_n keys]; `tail` is the last tile, as a rule narrower, 0 where all are full;
    `full`: some are. parts: the head dimension's, (D0, D1)."""

    block_m: int
    block_n: int
    full: bool
    tail: int
    parts: tuple[int, int]
    num_warps: int
    num_stages: int
    reload: bool = False  # the tile that stays is loaded again in every step instead of kept in registers
    keep_mask: bool = False  # of the rows, from the loads to the stores: two registers fewer on sm_90
    max_registers: int | None = None  # named where the compiler would rather spill a few to fit one more program


# By instructions: up to which head_dim -> block_m, block_n, num_warps.
_BWD_DQ: dict[str, _Tiles] = {
    "wgmma": ((64, (128, 64, 8)), (128, (128, 128, 8)), (192, (128, 64, 8)), (256, (128, 32, 8))),
    "wgmma sm_10": ((96, (128, 64, 8)),),  # 512 columns of tensor memory; likewise below
    "wgmma dropout": ((192, (128, 64, 8)), (256, (128, 32, 8))),
    "mma": ((80, (128, 64, 8)), (128, (128, 32, 8)), (256, (16, 16, 4))),
    "amd": ((96, (128, 32, 4)), (128, (64, 32, 4)), (256, (32, 16, 4))),
    "tf32": ((128, (32, 32, 4)), (256, (16, 16, 4))),
    "fma": ((64, (32, 32, 4)), (128, (32, 32, 8)), (256, (16, 16, 8))),
    "fma gfx": ((128, (32, 32, 4)),),
}
_BWD_DKDV: dict[str, _Tiles] = {
    "wgmma": ((96, (64, 128, 8)), (128, (32, 128, 8)), (192, (16, 128, 8)), (256, (32, 64, 8))),
    "wgmma sm_10": (
        (80, (64, 128, 8)),
        (96, (64, 64, 4)),
        (128, (32, 128, 8)),
        (192, (16, 128, 8)),
        (256, (32, 64, 4)),
    ),
    "wgmma dropout": (
        (64, (64, 128, 8)),
        (96, (32, 64, 4)),
        (128, (32, 128, 8)),
        (192, (16, 128, 8)),
        (256, (16, 64, 8)),
    ),
    "wgmma dropout sm_10": ((96, (32, 64, 4)),),
    "mma sm_12": ((64, (64, 128, 8)), (80, (32, 128, 8)), (96, (16, 128, 8))),
    "mma": ((64, (64, 128, 8)), (96, (32, 128, 8)), (128, (16, 128, 8)), (192, (16, 16, 4)), (256, (16, 16, 8))),
    "amd": ((96, (32, 128, 4)), (128, (32, 64, 4)), (256, (16, 32, 4))),
    "tf32": ((32, (16, 32, 4)), (128, (32, 32, 4)), (192, (16, 16, 4)), (256, (16, 16, 8))),
    "tf32 gfx": ((32, (16, 32, 4)), (128, (32, 32, 4)), (256, (16, 32, 4))),
    "fma": ((128, (32, 32, 8)), (256, (16, 16, 8))),
    "fma gfx": ((128, (32, 32, 4)),),
}


def _attention_bwd(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool, *, dq: bool
) -> AttentionBackwardConfig:
    """Of dQ, or else dK/dV. A program owns a tile of queries, or of keys, and its loop goes along the other. 128 of its
    own halve what is read from L2, which on Hopper is all that it gives at 64; not so where the last tile would be half
    empty."""
    table, tables = ("attention_bwd_dq", _BWD_DQ) if dq else ("attention_bwd_dkdv", _BWD_DKDV)
    own, loop = (0, 1) if dq else (1, 0)  # of block_m and block_n
    instructions = _instructions(itemsize, has_dropout, arch, tf32)
    parts = split_head_dim(head_dim)
    if parts[1] == 0 and parts[0] > (128 if instructions.startswith("wgmma") else 64):
        parts = (parts[0] // 2, parts[0] // 2)  # fewer operands at a time
    elif instructions == "tf32" and parts[0] == 64 and parts[1] > (16 if dq else 0):
        parts = (64, 64)  # mma of unlike parts spills
    stages = 1 if arch.startswith("gfx") else 2
    tile = *next(tile for limit, tile in _rows(tables, instructions, arch) if head_dim <= limit), stages
    hopper, fma = arch == "sm_90" and instructions.startswith("wgmma"), instructions == "fma"
    halves = instructions in ("mma", "amd") or (hopper and head_dim <= 96)
    if halves and _half_empty(n) and tile[own] == 128:
        tile = (64, tile[1], 4, stages) if dq else (tile[0], 64, 4, stages)
    tile = _tuned.choice(arch, table, n, head_dim, itemsize, has_dropout, tf32) or tile
    rest = n % tile[loop]
    tail = max(next_power_of_2(rest), 16) if rest else 0
    # The conditions are those under which some compiler would spill else: benchmarks/NOTES.md, "The full set".
    return AttentionBackwardConfig(
        *tile[:2], n >= tile[loop], tail, parts, *tile[2:],
        reload=(fma and head_dim > 128) or (instructions == "tf32" and (head_dim > 80 or not dq)),
        keep_mask=hopper and dq and head_dim > 96,
        max_registers=255 if fma and head_dim <= (96 if dq else 128) and arch.startswith("sm_") else None,
    )  # fmt: skip


@_tuned.cached
def attention_bwd_dq(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool
) -> AttentionBackwardConfig:
    return _attention_bwd(n, head_dim, itemsize, has_dropout, arch, tf32, dq=True)


@_tuned.cached
def attention_bwd_dkdv(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool
) -> AttentionBackwardConfig:
    return _attention_bwd(n, head_dim, itemsize, has_dropout, arch, tf32, dq=False)


@_tuned.cached
def attention_bwd_short(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool
) -> AttentionBackwardConfig | None:
    """For the kernel that takes a whole head, where its tiles fit; else None. It takes a quarter fewer instructions and
    a third less traffic than the split kernels, but all registers: other targets and dtypes than these spill."""
    parts = split_head_dim(head_dim)
    if tuned := _tuned.choice(arch, "attention_bwd_short", n, head_dim, itemsize, has_dropout, tf32):
        return AttentionBackwardConfig(*tuned[:2], True, 0, parts, *tuned[2:]) if tuned[0] else None
    if itemsize > 2 or arch != "sm_90":
        return None
    if n <= 64 and sum(parts) <= 64:
        return AttentionBackwardConfig(64, 64, True, 0, parts, 4, 2)
    if n <= 128 and sum(parts) <= (64 if has_dropout else 128):
        return AttentionBackwardConfig(128, 64, True, 0, parts, 8, 2)
    if n <= 256 and sum(parts) <= 64 and not has_dropout:
        return AttentionBackwardConfig(256, 64, True, 0, parts, 8, 2)
    return None
