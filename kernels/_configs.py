"""Launch configurations: pure functions of shapes, dtype and target, so that a result never depends on a timing.

`arch` is "sm_90", "sm_80", "gfx942", ...; sizes are in elements, `itemsize` in bytes. Attention: _attention_configs.py.
"""

import functools
from dataclasses import dataclass

FIRST_TIER = ("sm_80", "sm_87", "sm_90")  # their shared memory has room for a third stage of every loop


def register_limit(max_registers: int | None) -> dict[str, int]:
    """Return the launch option that limits the registers of a thread; none for None."""
    return {} if max_registers is None else {"maxnreg": max_registers}


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class RowConfig:
    """For kernels whose programs own whole rows: [block_rows, block_dim] in registers."""

    block_rows: int
    block_dim: int  # power of two >= D
    num_warps: int


MAX_ROW = 65536  # elements of a row that a program can hold in registers


@dataclass(frozen=True)
class LayerNormConfig(RowConfig):
    """A persistent grid whose programs load num_stages - 1 tiles ahead."""

    programs_per_sm: int
    num_stages: int

    @property
    def registers(self) -> int:
        """Registers that a thread can have while the programs of the grid share the 65,536 of an SM."""
        return 65536 // (32 * self.num_warps * self.programs_per_sm)


def layer_norm(dim: int, *, backward: bool = False, arch: str = "") -> LayerNormConfig:
    """Configure layer_norm_fwd_kernel or layer_norm_bwd_kernel.

    Narrow rows share a program, wide rows get more warps. Programs load tiles ahead, as long as the tiles fit in shared
    memory: then few programs hide the latency, and a thread has 32 elements in the forward kernel and, with three
    tensors and three sums in registers, 16 in the backward kernel. The first and third rule are the fastest of some 40
    choices on an H200 at D = 384, 768, 1024 and 1280 (benchmarks/NOTES.md); the others count registers."""
    block_dim = max(next_power_of_2(dim), 16)
    first_tier = arch in FIRST_TIER
    if backward and first_tier and block_dim <= 2048:
        num_warps, elements, grid = max(block_dim // 256, 2), 16, (2, 4 if block_dim <= 1024 else 3)
    elif backward:
        num_warps, elements, grid = min(max(block_dim // 256, 8), 32), 8, (2, 1)
    elif first_tier and 1024 <= block_dim <= 2048:
        num_warps, elements, grid = 4, 32, (4, 3)
    else:
        num_warps, elements, grid = min(max(block_dim // 512, 4), 32), 16, (8, 1)
    return LayerNormConfig(max(elements * 32 * num_warps // block_dim, 1), block_dim, num_warps, *grid)


# column_sum_kernel, of any size
COLUMN_SUM = {"BLOCK_P": 32, "BLOCK_D": 32, "num_warps": 4}


def dropout(dim: int) -> RowConfig:
    """Configure dropout_kernel: a program owns block_rows x 4 * block_dim elements, 32 per thread. The mask depends on
    the configuration, so the dtype must not."""
    block_dim = min(max(next_power_of_2(dim) // 4, 16), 256)
    return RowConfig(1024 // block_dim, block_dim, 4)


@dataclass(frozen=True)
class HeadsConfig:
    """For kernels that work head by head (_rotation.py). A step takes block_n tokens of a head, as `half` pairs of
    elements, a power of two >= d / 2. The grid is persistent, and its programs load num_stages - 1 steps ahead."""

    block_n: int
    half: int
    num_warps: int
    programs_per_sm: int
    num_stages: int
    max_registers: int | None  # a thread; NVIDIA only

    def programs(self, steps: int, multiprocessors: float) -> int:
        """Return the size of the grid. A program takes about four steps or more, because it loads tables and weights
        and stores partial sums."""
        return max(min(-(-steps // 4), int(self.programs_per_sm * multiprocessors)), 1)


def heads(head_dim: int, arch: str) -> HeadsConfig:
    """Configure rotary_kernel and the kernels of qk_norm.

    A thread has 8 elements of each half, two 16-byte accesses of bfloat16, and in the backward pass of the norms as
    many of the tables, the weights and the sums: 12 warps fill the registers of an SM, if the compiler is given that
    limit. At odd multiples of 8, whose halves are loaded 8 bytes at a time anyway, a thread has 4. Programs are small,
    for small batches, but have more threads than a half has elements: otherwise Triton gives the tile the layout of the
    weights."""
    half = next_power_of_2(head_dim // 2)
    num_warps = max(half // 16, 2)
    block_n = 32 * num_warps * (4 if head_dim % 16 else 8) // half
    stages, limit = (3, 168) if arch in FIRST_TIER else (1, None)
    return HeadsConfig(block_n, half, num_warps, 12 // num_warps, stages, limit)


# ---- linear ----


@dataclass(frozen=True)
class GemmConfig:
    """Output tile [block_m, block_n], summed block_k at a time; programs that run together share group_m row tiles."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # a thread; NVIDIA only
    programs_per_sm: int = 0  # of a persistent grid, with operands by TMA; 0: one program a tile


_ROUND = 2 * 132  # tiles at a time: two programs on each SM of an H100 or H200


def _tiles(m: int, n: int) -> int:
    """Return the number of 128 x 128 tiles of an [m, n] matrix."""
    return -(-m // 128) * -(-n // 128)


def gemm(m: int, n: int, k: int, itemsize: int, arch: str, described: bool = False) -> GemmConfig:
    """Configure the kernels of linear.py for [m, k] @ [k, n].

    128 x 128 x 64 with 3 stages takes 96 KiB of shared memory. With 128 registers a thread, two programs share an SM of
    sm_90, and the epilogue of one overlaps the matmuls of the other: no other tile was faster on an H200 (NOTES.md). If
    there are few tiles, they are made smaller to fill the GPU. group_m is 1 where B fits in the L2 cache anyway.

    described: the kernel is linear_fwd_kernel, and TMA can copy its operands. Then a persistent grid of two programs an
    SM takes 0.75 to 0.84 of the time of one program a tile, if each has four tiles or more, and 0.95 to 0.98 if it has
    one or two."""
    group_m = 1 if n * k * itemsize <= 16 << 20 else 8
    if itemsize > 2:  # float32 by FMA: operands from registers
        return GemmConfig(64, 64, 16, group_m, 8, 3)
    if _tiles(m, n) < 128:
        return GemmConfig(64, 64, 64, group_m, 4, 2 if arch.startswith("gfx") else 4)
    if arch.startswith("gfx"):  # 64 KiB of shared memory
        return GemmConfig(128, 128, 64, group_m, 8, 2)
    if arch != "sm_90":
        return GemmConfig(128, 128, 64, group_m, 8, 3)
    return GemmConfig(128, 128, 64, group_m, 8, 3, 128, 2 if described and _tiles(m, n) >= _ROUND else 0)


def gated_gemm(m: int, n: int, k: int, itemsize: int, arch: str) -> GemmConfig:
    """Configure the kernels of gated_linear.py for two products [m, k] @ [k, n] of the same rows. block_n columns of
    each are computed, so that accumulators and loads are those of a plain tile of twice the width."""
    group_m = 1 if 2 * n * k * itemsize <= 16 << 20 else 8
    stages = 2 if arch.startswith("gfx") else 3
    if itemsize > 2:
        return GemmConfig(64, 32, 16, group_m, 8, 3)
    if -(-m // 128) * -(-n // 64) < 128:
        return GemmConfig(64, 32, 64, group_m, 4, stages)
    return GemmConfig(128, 64, 64, group_m, 8, stages, max_registers=128 if arch == "sm_90" else None)


@functools.cache
def use_triton_gemm(m: int, n: int, k: int, itemsize: int, backward: bool, arch: str = "") -> bool:
    """Whether a matmul [m, k] @ [k, n] with an epilogue runs as our kernel. The alternative is the vendor library's
    matmul and one elementwise pass.

    Ours runs where the traffic that the epilogue saves matters (16-bit dtypes) and the compiler can tell that rows are
    aligned. It looks for multiples of 16 elements only; at multiples of 8, tiles would move 2 bytes at a time. Matmuls
    without an epilogue never run as our kernel. backward: the epilogue is the gradient of an activation.

    On sm_90 both were measured (an H200, benchmarks/NOTES.md). Time of ours over the alternative's at D = 768, by
    m and the number of 128 x 128 tiles:
        m = 50,432: fc1 0.76, fc2 0.95, proj 0.88 (9,480, 2,364, 2,364 tiles; by TMA); backward 1.14
        m = 6,304:  fc1 0.80 (1,200 tiles, by TMA), fc2 1.97, proj 1.32 (300 tiles); backward 1.05
        m = 197:    fc1 1.00, fc2 1.63, proj 1.03 (48, 12, 12 tiles); backward 0.61
    Fewer kernels also cost the host less, which is all that counts where there are few tiles."""
    if itemsize != 2 or n % 16 != 0 or k % 16 != 0:
        return False
    if arch != "sm_90":
        return True
    tiles = _tiles(m, n)
    if backward:
        return tiles < _ROUND
    return k < 1536 if tiles < 128 else n > k or tiles >= 4 * _ROUND


def takes_turns(m: int, n: int, k: int, scales: bool, arch: str) -> bool:
    """Whether linear_hopper.py multiplies [m, k] @ [k, n] of 16 bits. scales: it also multiplies by LayerScale, or
    samples, for which the vendor library needs passes of their own.

    Where it was measured faster than what runs otherwise, on an H200 (benchmarks/results/nvidia_h200/matmul_gluon.txt),
    at k from 384 to 4,096. Its share of the time, by 128 x 128 tiles: 1,182 and more 0.71 to 0.97; 147 to 600 with
    scales 0.43 to 0.82, without 0.96 to 1.32."""
    return arch == "sm_90" and min(n, k) >= 384 and _tiles(m, n) >= (147 if scales else 1000)


# act_bwd_kernel and gated_act_kernel: a program takes STEPS x BLOCK_M rows, 16 elements a thread and step
ACTIVATION_BACKWARD = {"BLOCK_M": 16, "BLOCK_N": 128, "STEPS": 8, "num_warps": 4}


# ---- patch embedding ----


@dataclass(frozen=True)
class PatchEmbedConfig:
    """Output tile [block_m, block_n], summed block_k at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1  # parts of the sum, with a partial result each


def patch_embed(
    m: int, n: int, k: int, *, itemsize: int, loaded: int, arch: str, multiprocessors: int, split: bool = False
) -> PatchEmbedConfig:
    """Configure the implicit GEMMs of patch embedding: an m x n result from sums over k. itemsize: of the operands of
    the matmul; loaded: itemsize of the widest tensor that they are converted from.

    With 16-bit operands, tiles leave room for two programs on an SM, so that the epilogue of one overlaps the matmuls
    of the other: at most 96 KB of shared memory on Hopper, 64 KB elsewhere. Tiles are smaller if there are too few to
    fill the GPU, and in float32, which does not use tensor cores. With `split`, k is split until every SM has two
    programs, into parts of at least 256.
    """
    longest = max(k // 256, 1) if split else 1
    large = itemsize == 2 and min(m, n) > 64 and -(-m // 128) * -(-n // 128) * longest >= multiprocessors
    block, num_warps = (128, 8) if large else (64, 4 if itemsize == 2 else 8)
    deep = loaded == 2 and arch == "sm_90" and (split or k % 64 == 0)
    stages = 2 if arch.startswith("gfx") else 3 if deep or loaded > 2 else 4
    block_k = 64 if deep else 16 if itemsize == 4 else 32
    # Wide tiles read the image less often: 1.5 times as fast at 256 images of 224 pixels, 1.2 times at 32, on an H200
    wide = large and deep and not split and n % 256 == 0 and -(-m // 128) * (n // 256) >= multiprocessors
    block_m, block_n = block, 256 if wide else block
    splits = max(min(2 * multiprocessors // (-(-m // block_m) * -(-n // block_n)), longest), 1)
    return PatchEmbedConfig(block_m, block_n, block_k, num_warps, stages, splits)
