"""Whole models from the zoo on photographs, and at CIFAR's size on the same, scaled down."""

from collections.abc import Callable

from benchmarks.harness import providers as eager
from benchmarks.harness.cases import Case, Draw, Runner
from benchmarks.harness.photographs import SOURCE, photographs
from benchmarks.harness.record import Record
from fastvit import reference, zoo
from fastvit.vit import VisionTransformer


def build(provider: str, draw: Draw, model: str, B: int, px: int, **options: int) -> Runner:
    kind = VisionTransformer if provider == "fused" else reference.VisionTransformer
    vit = draw.module(lambda: kind(**{**zoo.config(model), "img_size": px, **options}))
    if provider == "sdpa":
        eager.use_sdpa(vit)
    return Runner.of(vit, draw.constant(photographs(B, px)))


def _case(model: str, B: int, px: int, **options: int) -> Case:
    def make(provider: str, draw: Draw, **shape: int) -> Runner:
        return build(provider, draw, model, **{**options, **shape})

    check = {"B": 1, "depth": 2} if px > 1000 else {"B": 1 if px > 500 else min(B, 2)}  # eager in float64 must fit
    name = " ".join([model, *(f"{key}={value}" for key, value in options.items())])
    return Case("model", {"B": B, "px": px}, make, name=name, check=check, note=f"models run on {SOURCE}")


def cases(grid: str) -> list[Case]:
    if grid == "quick":
        return [_case("vit_cifar_small", 1, 32, depth=2)]
    if grid == "cpu":
        vit = [_case(f"vit_{size}_patch16_224", 1, 224) for size in ("tiny", "small", "base")]
        return [*vit, _case("vit_cifar_small", 8, 32), _case("vit_cifar_base", 1, 32)]
    cases = [_case(f"vit_cifar_{size}", B, 32) for size in ("small", "base", "large") for B in (1, 256)]
    for size in ("tiny", "small", "base", "large"):
        cases += [_case(f"vit_{size}_patch16_224", B, 224) for B in (1, 32, 256)]
    cases += [_case("vit_huge_patch14_224", B, 224) for B in (1, 32, 128)]
    for name in ("vit_small_patch16_224", "vit_base_patch16_224", "vit_large_patch16_224", "vit_huge_patch14_224"):
        cases += [_case(name, B, 518, patch_size=14) for B in (1, 16)]
        cases += [_case(name, B, 1024, patch_size=16) for B in (1, 4)]
    return cases


def bench_model(measure: Callable[[Case, str], Record], case: Case, mode: str) -> None:
    measure(case, mode)
