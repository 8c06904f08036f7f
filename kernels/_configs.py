"""Launch configurations: pure functions of shapes, dtype and target, so that a result never depends on a timing.

`arch` is "sm_90", "sm_80", "gfx942", ...; sizes are in elements, `itemsize` in bytes. Choices measured on a GPU
(tuned_<gpu>.json, see _tuned.py) replace these tables'. Attention's are in _attention_configs.py.
"""

from dataclasses import dataclass

from fastvit.kernels import _tuned

FIRST_TIER = ("sm_80", "sm_87", "sm_90")  # with room in the shared memory for a third stage of every loop


def register_limit(max_registers: int | None) -> dict[str, int]:
    """The launch option."""
    return {} if max_registers is None else {"maxnreg": max_registers}


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class RowConfig:
    """A kernel whose program owns whole rows: [block_rows, block_dim] in registers."""

    block_rows: int
    block_dim: int  # power of two >= D
    num_warps: int


MAX_ROW = 65536  # elements of a row that a program can hold in registers


@dataclass(frozen=True)
class LayerNormConfig(RowConfig):
    """A persistent grid, whose programs load num_stages - 1 tiles ahead."""

    programs_per_sm: int
    num_stages: int

    @property
    def registers(self) -> int:
        """How many a thread can have while the grid's programs share the 65,536 of an SM."""
        return 65536 // (32 * self.num_warps * self.programs_per_sm)


def layer_norm(dim: int, *, backward: bool = False, arch: str = "") -> LayerNormConfig:
    """Narrow rows share a program, wide rows get more warps. The forward gives a thread 16 elements, two 16-byte
    accesses of bfloat16, and an SM as many programs as its latency wants; the backward, with three tensors and three
    sums in registers, 8 elements, and as many programs as these leave room for. With few of them tiles are loaded
    ahead, as long as two of each tensor fit the shared memory."""
    block_dim = max(next_power_of_2(dim), 16)
    if tuned := _tuned.choice(arch, "layer_norm", dim, backward):
        block_rows, num_warps, *grid = tuned
        return LayerNormConfig(block_rows, block_dim, num_warps, *grid)
    threads = 32 * min(max(block_dim // 256, 8) if backward else max(block_dim // 512, 4), 32)
    block_rows = max((8 if backward else 16) * threads // block_dim, 1)
    stages = 3 if backward and block_dim <= 2048 and arch in FIRST_TIER else 1
    return LayerNormConfig(block_rows, block_dim, threads // 32, 2 if backward else 8, stages)


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


@dataclass(frozen=True)
class HeadsConfig:
    """A step takes block_n tokens of a head, as pairs of `half` elements, a power of two >= d / 2; a persistent grid,
    whose programs load num_stages - 1 steps ahead."""

    block_n: int
    half: int
    num_warps: int
    programs_per_sm: int
    num_stages: int
    max_registers: int | None  # a thread; NVIDIA only

    def programs(self, steps: int, multiprocessors: float) -> int:
        """About four steps each, or more, since a program loads tables and weights, and leaves sums of its own."""
        return max(min(-(-steps // 4), int(self.programs_per_sm * multiprocessors)), 1)


def of_heads(head_dim: int, arch: str) -> HeadsConfig:
    """Of rotary positions, and of the norms of q and k. A thread has 8 elements of each half, two 16-byte accesses of
    bfloat16, and in the norms' backward pass as many of the tables, the weights and the sums: 12 warps fill an SM's
    registers, if the compiler is told so. At odd multiples of 8, whose halves are of 8-byte accesses anyway, it has 4.
    Programs are small, for small batches, but have more threads than a half has elements: else Triton takes the layout
    of the weights for the tile's."""
    half = next_power_of_2(head_dim // 2)
    num_warps = max(half // 16, 2)
    block_n = 32 * num_warps * (4 if head_dim % 16 else 8) // half
    stages, limit = (3, 168) if arch in FIRST_TIER else (1, None)
    return HeadsConfig(block_n, half, num_warps, 12 // num_warps, stages, limit)


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


def gated_gemm(m: int, n: int, k: int, itemsize: int, arch: str) -> GemmConfig:
    """Two products [m, k] @ [k, n] of the same rows: block_n columns of each, so that the accumulators, and what a step
    loads, are those of a plain tile of twice the width."""
    group_m = 1 if 2 * n * k * itemsize <= 16 << 20 else 8
    stages = 2 if arch.startswith("gfx") else 3
    if itemsize > 2:
        return GemmConfig(64, 32, 16, group_m, 8, 3)
    if -(-m // 128) * -(-n // 64) < 128:
        return GemmConfig(64, 32, 64, group_m, 4, stages)
    return GemmConfig(128, 64, 64, group_m, 8, stages, max_registers=128 if arch == "sm_90" else None)


@_tuned.cached
def use_triton_gemm(m: int, n: int, k: int, itemsize: int, backward: bool, arch: str = "") -> bool:
    """Whether a matmul [m, k] @ [k, n] with an epilogue runs as our kernel instead of the vendor library's matmul and
    one elementwise pass: where the epilogue saves traffic that counts (16-bit) and the compiler finds rows aligned,
    which it looks for in 16 elements only: of 8, tiles would move 2 bytes at a time. Plain matmuls never do. backward:
    the epilogue is the gradient of an activation."""
    if tuned := _tuned.choice(arch, "use_triton_gemm", _tuned.bucket(m), n, k, itemsize, backward):
        return bool(tuned[0])
    return itemsize == 2 and n % 16 == 0 and k % 16 == 0


@dataclass(frozen=True)
class ActivationBackwardConfig:
    """A program takes steps x block_m rows and block_n columns, 8 elements a thread at a time."""

    block_m: int = 4
    block_n: int = 256
    steps: int = 16
    num_warps: int = 4


def activation_backward(n: int, itemsize: int, arch: str = "") -> ActivationBackwardConfig:
    """Of rows of n elements."""
    tuned = _tuned.choice(arch, "activation_backward", n, itemsize)
    return ActivationBackwardConfig(*tuned or ())


# ---- patch embedding ----


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
    block, num_warps = (128, 8) if large else (64, 4 if itemsize == 2 else 8)
    deep = loaded == 2 and arch == "sm_90" and (split or k % 64 == 0)
    stages = 2 if arch.startswith("gfx") else 3 if deep or loaded > 2 else 4
    block_k = 64 if deep else 16 if itemsize == 4 else 32
    key = (m, n, _tuned.bucket(k)) if split else (_tuned.bucket(m), n, k)
    tile = _tuned.choice(arch, "patch_embed", *key, itemsize, loaded, split)
    tile = tile or (block, block, block_k, num_warps, stages)
    splits = max(min(2 * multiprocessors // (-(-m // tile[0]) * -(-n // tile[1])), longest), 1)
    return PatchEmbedConfig(*tile, splits)
