"""A transformer block: LayerNorm, attention, LayerNorm, MLP, with both residuals. head_dim 64, or 80 for ViT-H."""

from collections.abc import Callable

from benchmarks.harness import providers as eager
from benchmarks.harness.cases import Case, Draw, Runner
from benchmarks.harness.record import Record
from fastvit import layers, reference


def build(provider: str, draw: Draw, B: int, N: int, D: int, H: int) -> Runner:
    kind = layers.Block if provider == "fused" else reference.Block
    block = draw.module(lambda: kind(D, H, qkv_bias=True))
    if provider == "sdpa":
        eager.use_sdpa(block)
    return Runner.of(block, draw.normal(B, N, D))


def _case(B: int, N: int, D: int, H: int) -> Case:
    check = {"B": min(B, 2)} if B * N > 10_000 else {}
    return Case("block", {"B": B, "N": N, "D": D, "H": H}, build, check=check)


def cases(grid: str) -> list[Case]:
    if grid == "quick":
        return [_case(1, 50, 192, 3)]
    if grid == "cpu":
        return [*(_case(1, N, 768, 12) for N in (50, 197, 257, 577, 1025)), _case(8, 197, 384, 6)]
    tokens = {197: (1, 32, 256), 257: (1, 64), 1370: (1, 16), 4097: (1, 4)}
    widths = ((384, 6), (768, 12), (1024, 16), (1280, 16))
    return [_case(B, N, D, H) for D, H in widths for N, batches in tokens.items() for B in batches]


def bench_block(measure: Callable[[Case, str], Record], case: Case, mode: str) -> None:
    measure(case, mode)
