"""How memory grows with tokens: a training step of attention and of a block, from N = 197 to 4097.

Eager keeps N x N probabilities for backward; fused keeps O(N). The exponents are fitted under the table.
Time is that of very few rounds here. Agreement with float64 is checked at the same N, on one head.
"""

from collections.abc import Callable

from benchmarks import bench_attention, bench_block
from benchmarks.harness.cases import Case, Draw, Runner
from benchmarks.harness.record import Record

TOKENS = (197, 577, 1025, 2305, 4097)


def build_block(provider: str, draw: Draw, B: int, N: int, H: int) -> Runner:
    return bench_block.build(provider, draw, B, N, 64 * H, H)


def build_attention(provider: str, draw: Draw, B: int, N: int, H: int) -> Runner:
    return bench_attention.build(provider, draw, B, N, H, 64)


def cases(grid: str) -> list[Case]:
    tokens, heads = ((17, 50, 197), 3) if grid == "quick" else (TOKENS, 12)
    build = {"memory, attention": build_attention, "memory, block": build_block}
    return [
        Case(op, {"B": 1, "N": N, "H": heads}, make, check={"H": 1}, max_rounds=3 if N < 2000 else 1)
        for op, make in build.items()
        for N in tokens
    ]


def bench_memory(measure: Callable[[Case, str], Record], case: Case) -> None:
    measure(case, "training")
