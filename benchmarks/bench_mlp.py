"""The MLP and its parts: fc1 + GELU, both layers, and both with the LayerNorm before and the residual after them."""

from collections.abc import Callable

from torch import Tensor

from benchmarks.harness import providers as eager
from benchmarks.harness.cases import Case, Draw, Runner
from benchmarks.harness.record import Record
from fastvit import ops

PROVIDERS = ("eager", "compile", "fused")


def _layers(draw: Draw, D: int) -> tuple[Tensor, ...]:
    hidden = 4 * D
    return (
        draw.normal(hidden, D, std=D**-0.5),
        draw.normal(hidden, std=0.1),
        draw.normal(D, hidden, std=hidden**-0.5),
        draw.normal(D, std=0.1),
    )


def build_linear(provider: str, draw: Draw, M: int, D: int) -> Runner:
    x, (weight, bias, *_) = draw.normal(M, D), _layers(draw, D)
    if provider == "fused":
        return Runner(lambda: ops.linear(x, weight, bias, activation="gelu"), (x,), (weight, bias))
    return Runner(lambda: eager.linear_gelu(x, weight, bias), (x,), (weight, bias))


def build_mlp(provider: str, draw: Draw, M: int, D: int) -> Runner:
    x, parameters = draw.normal(M, D), _layers(draw, D)
    function = ops.mlp if provider == "fused" else eager.mlp
    return Runner(lambda: function(x, *parameters), (x,), parameters)


def build_layer_norm_mlp(provider: str, draw: Draw, M: int, D: int) -> Runner:
    x = draw.normal(M, D)
    parameters = (draw.normal(D, std=0.1, mean=1.0), draw.normal(D, std=0.1), *_layers(draw, D))
    if provider == "fused":
        return Runner(lambda: ops.layer_norm_mlp(x, *parameters, residual=x), (x,), parameters)
    return Runner(lambda: eager.layer_norm_mlp(x, *parameters), (x,), parameters)


BUILD = {"linear gelu": build_linear, "mlp": build_mlp, "layer_norm_mlp": build_layer_norm_mlp}


def _cases(M: int, D: int, *names: str) -> list[Case]:
    return [Case(name, {"M": M, "D": D}, BUILD[name], PROVIDERS) for name in names or BUILD]


def cases(grid: str) -> list[Case]:
    if grid == "quick":
        return _cases(50, 192)
    if grid == "cpu":
        return [*_cases(197, 768), *_cases(197, 384, "mlp")]
    shapes = [(M, D) for D in (384, 768, 1024, 1280) for M in (197, 1370, 4097, 32 * 197, 256 * 197)]
    return [case for name in BUILD for M, D in shapes for case in _cases(M, D, name)]


def bench_mlp(measure: Callable[[Case, str], Record], case: Case, mode: str) -> None:
    measure(case, mode)
