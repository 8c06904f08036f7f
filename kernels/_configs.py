"""Launch configurations: pure functions of shapes, dtype and target, so that a result never depends on a timing.

`arch` is "sm_90", "sm_80", "gfx942", ...; sizes are in elements, `itemsize` in bytes. Choices measured on a GPU
(tuned_<gpu>.json, see _tuned.py) replace these tables' once `load_tuned` was called for it.
"""

from dataclasses import dataclass
from functools import cache

from fastvit.kernels import _tuned


def load_tuned(arch: str, gpu: str) -> None:
    """Takes over what was measured on GPUs of this name. The ops call it when they first meet the device."""
    _tuned.load(arch, gpu)
    for function in (attention_fwd, attention_bwd_dq, attention_bwd_dkdv, attention_bwd_short):
        function.cache_clear()


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class RowConfig:
    """A kernel whose program owns whole rows: [block_rows, block_dim] in registers."""

    block_rows: int
    block_dim: int  # power of two >= D
    num_warps: int


MAX_ROW = 65536  # elements of a row that a program can hold in registers


def layer_norm(dim: int, *, backward: bool = False, arch: str = "") -> RowConfig:
    """Narrow rows share a program, wide rows get more warps. The forward gives a thread 16 elements, two 16-byte
    accesses of bfloat16; the backward, with three tensors and three sums in registers, 8."""
    block_dim = max(next_power_of_2(dim), 16)
    if tuned := _tuned.choice(arch, "layer_norm", dim, backward):
        return RowConfig(tuned[0], block_dim, tuned[1])
    threads = 32 * min(max(block_dim // 256, 8) if backward else max(block_dim // 512, 4), 32)
    return RowConfig(max((8 if backward else 16) * threads // block_dim, 1), block_dim, threads // 32)


PROGRAMS_PER_SM = 2  # of a persistent grid that keeps partial sums
FORWARD_PROGRAMS_PER_SM = 8  # of one that keeps parameters only, for as many warps as an SM's latency wants


@dataclass(frozen=True)
class ColumnSumConfig:
    """Sum over the rows of a [P, D] float32 table."""

    block_rows: int = 32
    block_dim: int = 32
    num_warps: int = 4


def column_sum(p: int, dim: int, arch: str = "") -> ColumnSumConfig:
    """Sums over p rows."""
    tuned = _tuned.choice(arch, "column_sum", _tuned.bucket(p), dim)
    return ColumnSumConfig(*tuned or ())


def dropout(dim: int) -> RowConfig:
    """A program owns block_rows x 4 * block_dim elements, 32 a thread. The mask depends on it, so the dtype must not
    enter here."""
    block_dim = min(max(next_power_of_2(dim) // 4, 16), 256)
    return RowConfig(1024 // block_dim, block_dim, 4)


# ---- linear ----


@dataclass(frozen=True)
class GemmConfig:
    """Output tile [block_m, block_n]; group_m row tiles are computed side by side."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # a thread; NVIDIA only


def gemm(m: int, n: int, k: int, itemsize: int, arch: str) -> GemmConfig:
    """[m, k] @ [k, n]. 128 x 128 x 64 with 3 stages takes 96 KiB of shared memory; with 128 registers a thread two
    programs share an SM of sm_90, one's epilogue behind the other's matmuls. It needs 64 bytes of L2 a clock, though,
    and twice the width 48: where a long k makes the epilogue small beside it, one wide program is faster. Few tiles are
    made smaller, so that they fill the GPU. Column tiles run first while B stays in the L2 cache anyway."""
    if tuned := _tuned.choice(arch, "gemm", _tuned.bucket(m), n, k, itemsize):
        return GemmConfig(*tuned[:6], max_registers=tuned[6] or None)
    group_m = 1 if n * k * itemsize <= 16 << 20 else 8
    if itemsize > 2:  # float32 by FMA: operands from registers
        return GemmConfig(64, 64, 16, group_m, 8, 3)
    if -(-m // 128) * -(-n // 128) < 128:
        return GemmConfig(64, 64, 64, group_m, 4, 2 if arch.startswith("gfx") else 4)
    if arch.startswith("gfx"):  # 64 KiB of shared memory
        return GemmConfig(128, 128, 64, group_m, 8, 2)
    if arch != "sm_90":
        return GemmConfig(128, 128, 64, group_m, 8, 3)
    if k >= 1536 and n % 256 == 0:
        return GemmConfig(128, 256, 64, group_m, 8, 4)
    return GemmConfig(128, 128, 64, group_m, 8, 3, max_registers=128)


def use_triton_gemm(n: int, k: int, itemsize: int, arch: str = "") -> bool:
    """Whether a matmul with an epilogue runs as our kernel instead of the vendor library's matmul and one elementwise
    pass: where the epilogue saves traffic that counts (16-bit) and rows allow 16-byte accesses. Plain matmuls never do.
    """
    if tuned := _tuned.choice(arch, "use_triton_gemm", n, k, itemsize):
        return bool(tuned[0])
    return itemsize == 2 and n % 8 == 0 and k % 8 == 0


@dataclass(frozen=True)
class ActivationBackwardConfig:
    """A program takes steps x block_m rows and block_n columns, 16 elements a thread at a time."""

    block_m: int = 8
    block_n: int = 256
    steps: int = 8
    num_warps: int = 4


def activation_backward(n: int, itemsize: int, arch: str = "") -> ActivationBackwardConfig:
    """Of rows of n elements."""
    tuned = _tuned.choice(arch, "activation_backward", n, itemsize)
    return ActivationBackwardConfig(*tuned or ())


# ---- attention ----


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """(D0, D1), powers of two with D0 + D1 >= head_dim and little waste: 80 = 64 + 16; D1 is 0 where one part does."""
    lower = 1 << head_dim.bit_length() - 1
    rest = max(next_power_of_2(head_dim - lower), 16) if head_dim > lower else 0
    return (lower, rest) if rest < lower else (2 * lower, 0)


_Tiles = tuple[tuple[int, tuple[int, int, int]], ...]  # up to which D0 + D1 -> block_m, block_n, num_warps


def _instructions(itemsize: int, has_dropout: bool, arch: str, tf32: bool) -> str:
    if itemsize > 2:
        return "tf32" if tf32 else "fma"
    if arch.startswith("gfx"):
        return "amd"
    if arch not in ("sm_90", "sm_100", "sm_103"):
        return "mma"
    return "wgmma dropout" if has_dropout else "wgmma"


# ---- attention forward ----


@dataclass(frozen=True)
class AttentionForwardConfig:
    """Score tile [block_m queries, block_n keys], and `chunks`: the narrower tiles behind the last full one. block_n is
    0 for the short kernel, whose chunks cover all keys at once. parts: the head dimension's, (D0, D1)."""

    block_m: int
    block_n: int
    chunks: tuple[int, ...]
    parts: tuple[int, int]
    num_warps: int
    num_stages: int


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
    "mma": ((64, (128, 128, 8)), (96, (128, 64, 8)), (128, (128, 32, 8)), (256, (16, 64, 4))),
    "mma dropout": ((64, (128, 64, 8)), (128, (128, 32, 8)), (256, (16, 64, 4))),
    "amd": ((64, (128, 64, 4)), (128, (64, 64, 4)), (256, (64, 32, 4))),
    "tf32": ((128, (128, 32, 8)), (256, (32, 32, 8))),
    "fma": ((64, (64, 32, 8)), (96, (32, 32, 8)), (256, (32, 16, 8))),
    "fma dropout": ((96, (32, 32, 8)), (256, (32, 16, 8))),
}
# By instructions: up to which D0 + D1 -> the longest sequence whose scores fit into registers, 64 rows to 4 warps.
_FWD_SHORT: dict[str, tuple[tuple[int, int], ...]] = {
    "wgmma": ((64, 288), (96, 208)),
    "mma": ((64, 208),),
    "amd": ((64, 288), (96, 208)),
}


@cache
def attention_fwd(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool = False
) -> AttentionForwardConfig:
    instructions = _instructions(itemsize, False, arch, tf32)
    parts = split_head_dim(head_dim)
    width = sum(parts)
    tiles = _FWD.get(f"{instructions} dropout", ()) if has_dropout else ()
    block_m, block_n, num_warps = next(tile for limit, tile in tiles or _FWD[instructions] if width <= limit)
    stages = 1 if instructions == "amd" and width > 128 else 2  # 64 KiB of shared memory
    if n <= next((longest for limit, longest in _FWD_SHORT.get(instructions, ()) if width <= limit), 0):
        block_m, block_n, num_warps, stages = 64, 0, 4, 2
    if tuned := _tuned.choice(arch, "attention_fwd", n, head_dim, itemsize, has_dropout, tf32):
        block_m, block_n, num_warps, stages = tuned
    if block_n == 0:
        return AttentionForwardConfig(block_m, 0, key_chunks(n, 128, 3), parts, num_warps, stages)
    if parts[0] > 64 and parts[1] == 0 and instructions in ("mma", "tf32", "fma"):
        parts = (width // 2, width // 2)  # operands that come from registers: one half at a time
    return AttentionForwardConfig(block_m, block_n, key_chunks(n % block_n, block_n, 2), parts, num_warps, stages)


# ---- attention backward ----


@dataclass(frozen=True)
class AttentionBackwardConfig:
    """Score tile [block_m queries, block_n keys]; `tail` is the narrower last tile of the loop, 0 where all are full.
    parts: the head dimension's, (D0, D1)."""

    block_m: int
    block_n: int
    tail: int
    parts: tuple[int, int]
    num_warps: int
    num_stages: int
    reload: bool = False  # the tile that stays is loaded again in every step instead of kept in registers


# By instructions: up to which head_dim -> block_m, block_n, num_warps. The largest tiles that spill no registers.
_Tiles = tuple[tuple[int, tuple[int, int, int]], ...]
_BWD_DQ: dict[str, _Tiles] = {
    "wgmma": ((96, (64, 64, 4)), (192, (128, 64, 8)), (256, (128, 32, 8))),
    "wgmma dropout": ((192, (128, 64, 8)), (256, (128, 32, 8))),
    "mma": ((32, (64, 64, 4)), (64, (128, 32, 8)), (88, (64, 16, 4)), (128, (128, 32, 8)), (256, (16, 16, 4))),
    "amd": ((128, (64, 32, 4)), (256, (32, 16, 4))),
    "tf32": ((128, (32, 32, 4)), (256, (16, 16, 4))),
    "fma": ((128, (32, 32, 8)), (256, (16, 16, 8))),
}
_BWD_DKDV: dict[str, _Tiles] = {
    "wgmma": (
        (64, (64, 64, 4)),
        (80, (64, 128, 8)),
        (96, (32, 64, 4)),
        (128, (32, 128, 8)),
        (192, (16, 128, 8)),
        (256, (32, 64, 8)),
    ),
    "wgmma sm_100": ((32, (64, 64, 4)), (80, (64, 128, 8))),  # wider ones as on sm_90
    "wgmma dropout": ((96, (32, 64, 4)), (128, (32, 128, 8)), (192, (16, 128, 8)), (256, (16, 64, 8))),
    "mma": (
        (32, (64, 64, 4)),
        (64, (32, 64, 4)),
        (72, (16, 128, 8)),
        (80, (32, 128, 8)),
        (128, (16, 128, 8)),
        (192, (16, 16, 4)),
        (256, (16, 16, 8)),
    ),
    "amd": ((128, (32, 64, 4)), (256, (16, 32, 4))),
    "tf32": ((128, (32, 32, 4)), (192, (16, 16, 4)), (256, (16, 16, 8))),
    "fma": ((96, (32, 32, 8)), (128, (16, 32, 8)), (256, (16, 16, 8))),
}


def _attention_bwd(
    tables: dict[str, _Tiles],
    loop: int,
    n: int,
    head_dim: int,
    itemsize: int,
    has_dropout: bool,
    arch: str,
    tf32: bool,
    tuned: tuple[int, ...] | None,
) -> AttentionBackwardConfig:
    if itemsize > 2:
        instructions = "tf32" if tf32 else "fma"
    elif arch.startswith("gfx"):
        instructions = "amd"
    elif arch.startswith(("sm_90", "sm_10")):  # operands from shared memory; the others' come from registers
        instructions = "wgmma dropout" if has_dropout else "wgmma"
    else:
        instructions = "mma"
    parts = split_head_dim(head_dim)
    if parts[1] == 0 and parts[0] > (128 if instructions.startswith("wgmma") else 64):
        parts = (parts[0] // 2, parts[0] // 2)  # fewer operands at a time
    elif instructions == "tf32" and parts[0] == 64 and parts[1]:
        parts = (64, 64)  # mma of unlike parts spills
    stages = 1 if arch.startswith("gfx") else 2
    special = tables.get(f"{instructions} sm_100", ()) if arch.startswith("sm_10") else ()
    tile = tuned or (*next(tile for limit, tile in special + tables[instructions] if head_dim <= limit), stages)
    rest = n % tile[loop]
    tail = max(next_power_of_2(rest), 16) if rest else 0
    return AttentionBackwardConfig(*tile[:2], tail, parts, *tile[2:], reload=itemsize > 2)


@cache
def attention_bwd_dq(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool
) -> AttentionBackwardConfig:
    tuned = _tuned.choice(arch, "attention_bwd_dq", n, head_dim, itemsize, has_dropout, tf32)
    return _attention_bwd(_BWD_DQ, 1, n, head_dim, itemsize, has_dropout, arch, tf32, tuned)


@cache
def attention_bwd_dkdv(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool
) -> AttentionBackwardConfig:
    tuned = _tuned.choice(arch, "attention_bwd_dkdv", n, head_dim, itemsize, has_dropout, tf32)
    return _attention_bwd(_BWD_DKDV, 0, n, head_dim, itemsize, has_dropout, arch, tf32, tuned)


@cache
def attention_bwd_short(
    n: int, head_dim: int, itemsize: int, has_dropout: bool, arch: str, tf32: bool
) -> AttentionBackwardConfig | None:
    """For the kernel that takes a whole head, where its tiles fit; else None. It takes a quarter fewer instructions and
    a third less traffic than the split kernels, but all registers: other targets and dtypes than these spill."""
    parts = split_head_dim(head_dim)
    if tuned := _tuned.choice(arch, "attention_bwd_short", n, head_dim, itemsize, has_dropout, tf32):
        return AttentionBackwardConfig(*tuned[:2], 0, parts, *tuned[2:]) if tuned[0] else None
    if itemsize > 2 or arch != "sm_90":
        return None
    if n <= 64 and sum(parts) <= 64:
        return AttentionBackwardConfig(64, 64, 0, parts, 4, 2)
    if n <= 128 and sum(parts) <= (64 if has_dropout else 128):
        return AttentionBackwardConfig(128, 64, 0, parts, 8, 2)
    if n <= 256 and sum(parts) <= 64 and not has_dropout:
        return AttentionBackwardConfig(256, 64, 0, parts, 8, 2)
    return None


@dataclass(frozen=True)
class PatchEmbedConfig:
    """An output tile of block_m x block_n, summed block_k at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1  # of the sum, each with a partial result


def patch_embed(
    m: int, n: int, k: int, *, itemsize: int, loaded: int, arch: str, multiprocessors: int, split: bool = False
) -> PatchEmbedConfig:
    """The implicit GEMMs of patch embedding: an m x n result from sums over k. itemsize: of what is multiplied;
    loaded: of the widest tensor that it is converted from.

    16-bit operands take tiles that leave room for two programs on an SM, one of which runs its epilogue under the
    other's matmuls: at most 96 KB of shared memory on Hopper, 64 KB elsewhere. Results of too few such tiles for the
    GPU, and float32, whose matmul is not one of tensor cores, take smaller ones. With `split`, k is cut until every SM
    has two programs, but not below 256.
    """
    longest = max(k // 256, 1) if split else 1
    large = itemsize == 2 and min(m, n) > 64 and -(-m // 128) * -(-n // 128) * longest >= multiprocessors
    block, num_warps = (128, 8) if large else (64, 4)
    deep = loaded <= 2 and arch in ("sm_90", "sm_100", "sm_103") and (split or k % 64 == 0)
    stages = 2 if arch.startswith("gfx") else 3 if deep or loaded > 2 else 4
    # the conversion of bytes to float32 in the weight's gradient spills with more than 16
    block_k = 64 if deep else 16 if itemsize == 4 and split else 32
    tile = block, block, block_k, num_warps, stages
    key = (m, n, _tuned.bucket(k)) if split else (_tuned.bucket(m), n, k)
    tile = _tuned.choice(arch, "patch_embed", *key, itemsize, loaded, split) or tile
    splits = max(min(2 * multiprocessors // (-(-m // tile[0]) * -(-n // tile[1])), longest), 1)
    return PatchEmbedConfig(*tile, splits)
