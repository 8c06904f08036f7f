"""LayerNorm, and LayerNorm of a residual sum with LayerScale. Neither has an SDPA variant."""

from collections.abc import Callable

from benchmarks.harness import providers as eager
from benchmarks.harness.cases import Case, Draw, Runner
from benchmarks.harness.record import Record
from fastvit import ops

PROVIDERS = ("eager", "compile", "fused")


def build(provider: str, draw: Draw, M: int, D: int) -> Runner:
    x = draw.normal(M, D)
    weight, bias = draw.normal(D, std=0.1, mean=1.0), draw.normal(D, std=0.1)
    function = {"eager": eager.layer_norm, "fused": ops.layer_norm}[provider]
    return Runner(lambda: function(x, weight, bias), (x,), (weight, bias))


def build_add(provider: str, draw: Draw, M: int, D: int) -> Runner:
    residual, branch = draw.normal(M, D), draw.normal(M, D)
    weight, bias = draw.normal(D, std=0.1, mean=1.0), draw.normal(D, std=0.1)
    scale = draw.normal(D)

    def fused() -> tuple:
        return ops.add_layer_norm(residual, branch, weight, bias, layer_scale=scale)

    def plain() -> tuple:
        return eager.add_layer_norm(residual, branch, weight, bias, scale)

    return Runner(fused if provider == "fused" else plain, (residual, branch), (weight, bias, scale))


def _cases(M: int, D: int) -> list[Case]:
    shape = {"M": M, "D": D}
    return [Case("layer_norm", shape, build, PROVIDERS), Case("add_layer_norm", shape, build_add, PROVIDERS)]


def cases(grid: str) -> list[Case]:
    if grid == "quick":
        return _cases(50, 192)
    if grid == "cpu":
        plain, added = zip(*(_cases(8 * 197, D) for D in (192, 768, 1280)), strict=True)
        return [*plain, added[1]]
    widths = (192, 384, 768, 1024, 1152, 1280, 1408, 1536, 1664)
    plain, added = zip(*(_cases(M, D) for D in widths for M in (197, 256 * 197)), strict=True)
    return [*plain, *added]


def bench_layer_norm(measure: Callable[[Case, str], Record], case: Case, mode: str) -> None:
    measure(case, mode)
