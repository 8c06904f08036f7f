"""Softmax attention on the packed output of the qkv projection, read by stride."""

from collections.abc import Callable

from benchmarks.harness import providers as eager
from benchmarks.harness.cases import Case, Draw, Runner
from benchmarks.harness.record import Record
from fastvit import ops


def build(provider: str, draw: Draw, B: int, N: int, H: int, d: int) -> Runner:
    qkv = draw.normal(B, N, 3, H, d)
    function = {"eager": eager.attention, "sdpa": eager.attention_sdpa, "fused": ops.attention_qkvpacked}
    return Runner(lambda: function[provider](qkv), (qkv,))


def _case(B: int, N: int, H: int, d: int = 64) -> Case:
    check = {"B": min(B, 2), "H": 1 if N > 4000 else H}
    return Case("attention", {"B": B, "N": N, "H": H, "d": d}, build, check={} if N * B < 10_000 else check)


def cases(grid: str) -> list[Case]:
    if grid == "quick":
        return [_case(1, 50, 3)]
    if grid == "cpu":
        return [
            *(_case(B, N, 12) for B, N in ((1, 197), (64, 197), (1, 257), (1, 577), (1, 1025), (8, 1025))),
            _case(1, 257, 16, 80),
        ]
    tokens = {197: (1, 32, 256), 257: (1, 128), 577: (1, 64), 1025: (1, 32), 1370: (1, 16), 4097: (1, 8), 16385: (1, 2)}
    cases = [_case(B, N, 16) for N, batches in tokens.items() for B in batches]
    return cases + [_case(B, N, 16, d) for d in (72, 80, 88, 96, 128) for N, B in ((257, 128), (1025, 32))]


def bench_attention(measure: Callable[[Case, str], Record], case: Case, mode: str) -> None:
    measure(case, mode)
