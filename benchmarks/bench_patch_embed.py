"""Patch embedding: images to tokens, with positions and the CLS token in place."""

from collections.abc import Callable

from benchmarks.harness import providers as eager
from benchmarks.harness.cases import Case, Draw, Runner
from benchmarks.harness.photographs import SOURCE, photographs
from benchmarks.harness.record import Record
from fastvit import ops

PROVIDERS = ("eager", "compile", "fused")


def build(provider: str, draw: Draw, B: int, px: int, patch: int, D: int) -> Runner:
    image = draw.constant(photographs(B, px))
    weight, bias = draw.normal(D, 3, patch, patch, std=(3 * patch * patch) ** -0.5), draw.normal(D, std=0.1)
    position, prefix = draw.normal((px // patch) ** 2, D), draw.normal(1, D)
    parameters = (weight, bias, position, prefix)
    if provider == "fused":
        fused = ops.patch_embed
        return Runner(lambda: fused(image, weight, bias, pos_embed=position, prefix=prefix), (image,), parameters)
    return Runner(lambda: eager.patch_embed(image, *parameters), (image,), parameters)


def _case(B: int, px: int, patch: int, D: int) -> Case:
    shape = {"B": B, "px": px, "patch": patch, "D": D}
    return Case("patch_embed", shape, build, PROVIDERS, note=f"patch_embed runs on {SOURCE}")


def cases(grid: str) -> list[Case]:
    if grid == "quick":
        return [_case(1, 64, 16, 192)]
    if grid == "cpu":
        return [_case(1, 224, 16, 768), _case(8, 224, 16, 768), _case(1, 224, 14, 768), _case(32, 32, 4, 192)]
    sizes = {(224, 16): (1, 32, 256), (224, 14): (1, 32, 256), (518, 14): (1, 16, 64), (1024, 16): (1, 4, 16)}
    widths = (384, 768, 1024, 1280)
    return [_case(B, px, patch, D) for D in widths for (px, patch), batches in sizes.items() for B in batches]


def bench_patch_embed(measure: Callable[[Case, str], Record], case: Case, mode: str) -> None:
    measure(case, mode)
