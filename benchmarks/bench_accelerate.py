"""ViTs of other libraries, untouched (as `sdpa`, which is what they run) and with `fastvit.accelerate`."""

import importlib.util
from collections.abc import Callable

import fastvit
from benchmarks.harness.cases import Case, Draw, Runner
from benchmarks.harness.families import VIT_B_16, output
from benchmarks.harness.photographs import SOURCE, photographs
from benchmarks.harness.record import Record


def build(provider: str, draw: Draw, library: str, B: int, **options: int) -> Runner:
    model = draw.module(lambda: VIT_B_16[library](**options))
    if provider == "fused":
        fastvit.accelerate(model, strict=True)
    images = draw.constant(photographs(B, 224))
    return Runner(lambda: output(model(images)), (images,), tuple(model.parameters()), model)


def _case(library: str, B: int, **options: int) -> Case:
    def make(provider: str, draw: Draw, **shape: int) -> Runner:
        return build(provider, draw, library, **{**options, **shape})

    return Case(
        "accelerate", {"B": B}, make, ("sdpa", "compile", "fused"), name=f"{library} ViT-B/16 at 224 px",
        check={"B": min(B, 2), "depth": 2}, note=f"models run on {SOURCE}; sdpa: the library's own model",
    )  # fmt: skip


def cases(grid: str) -> list[Case]:
    """On a CPU one library: benchmarks/harness/families.py compares the three there."""
    installed = [name for name in VIT_B_16 if importlib.util.find_spec(name) is not None]
    if grid == "quick":
        return [_case(name, 1, depth=1) for name in installed[:1]]
    if grid == "cpu":
        return [_case(name, 1) for name in installed[:1]]
    return [_case(name, B) for name in installed for B in (1, 32, 256)]


def bench_accelerate(measure: Callable[[Case, str], Record], case: Case, mode: str) -> None:
    measure(case, mode)
