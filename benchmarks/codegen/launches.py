"""Record the kernels that workloads launch, with all launch parameters, and compile them for a target.

The public ops run forward and backward at the shapes of real models, and their launches are recorded
(fastvit/warmup.py), so that the list always agrees with the code.

    for launch in record(workloads("kernels", ops=("layer_norm",)), target="sm_90", dtypes=["bf16"]):
        print(launch.name, launch.workload, launch.compile().registers)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.codegen.aot import Compiled, compile_launch
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload
from fastvit import warmup
from fastvit.warmup import in_library

# "tf32" and "amp" are float32 tensors: with matmul precision "high", and under autocast to bfloat16.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16} | dict.fromkeys(("fp32", "tf32", "amp"), torch.float32)


@dataclass(frozen=True)
class Launch(warmup.Launch):
    """One kernel as one workload launches it on one target."""

    dtype: str
    workload: str  # the first workload with this launch
    granule: int  # bytes that are contiguous and aligned in its tensors, at most 16

    def compile(self) -> Compiled:
        return compile_launch(self, self.granule, self.dtype)


class Recorder(warmup.Recorder):
    """A recorder that also keeps the workload of each launch."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.dtype, self.workload = "bf16", ""
        self.granule = 16

    def launch(self, *fields: Any) -> Launch:
        return Launch(*fields, self.dtype, self.workload, self.granule)  # type: ignore[call-arg]


@contextlib.contextmanager
def recording(target: str, multiprocessors: int | None = None) -> Iterator[Recorder]:
    """Record launches within the context, into the recorder that this yields."""
    recorder = Recorder(target)
    autocast = in_library(  # torch's own refuses the meta device
        autocast_dtype=lambda x: torch.bfloat16 if recorder.dtype == "amp" else None
    )
    with autocast, warmup.recording(recorder, multiprocessors):
        yield recorder


def _granule(workload: Workload, dtype: torch.dtype) -> int:
    """Return how many bytes, at most 16, are contiguous and aligned in all of its tensors. Sizes are multiples of 8
    elements, except for the width of a patch, half a head, and odd hidden sizes."""
    sizes = workload.sizes
    itemsize = 1 if sizes.get("image") == "uint8" else dtype.itemsize
    relative = "relative" in (sizes.get("mask"), sizes.get("added"))
    if relative and ((side := sizes.get("window") or math.isqrt(sizes["N"])) & (side - 1) or side < 32):
        # columns of the grid that a tile pads are loaded one by one, once a program; so are the rows of a tile, which
        # are few
        return dtype.itemsize
    half = sizes["d"] // 2 if sizes.get("spelling") == "halves" else 8
    return math.gcd(*(elements * itemsize for elements in (half, sizes.get("patch", 8), sizes.get("hidden", 8))), 16)


def record(
    workloads: Iterable[Workload], target: str, dtypes: Iterable[str] = tuple(DTYPES), *,
    multiprocessors: int | None = None, infers: bool = False,
) -> list[Launch]:  # fmt: skip
    """Return every distinct launch of the workloads: kernel, types, alignments, constants and options. They run forward
    and backward, and with `infers` also forward alone."""
    before = torch.get_float32_matmul_precision()
    with recording(target, multiprocessors) as recorder:
        try:
            for dtype in dtypes:
                recorder.dtype = dtype
                torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
                for workload in workloads:
                    recorder.workload = f"{workload.op} {workload}"
                    recorder.granule = _granule(workload, DTYPES[dtype])
                    runner = workload.runner("fastvit", Draw(DTYPES[dtype], "meta"))
                    runner.gradients()
                    if infers:
                        runner.infer()
        finally:
            torch.set_float32_matmul_precision(before)
    return list(recorder.launches.values())


MANY = 10  # options


def representatives(recorded: Iterable[Launch]) -> list[Launch]:
    """Return of each kernel the launch that uses most of its options, and of one with many options also the launch
    that uses fewest. An option is an argument that may be None, or a flag."""
    by_kernel: dict[str, list[Launch]] = {}
    for launch in recorded:
        by_kernel.setdefault(launch.name, []).append(launch)
    chosen = []
    for own in by_kernel.values():
        values = [launch.constexprs for launch in own]
        options = {key for each in values for key, value in each.items() if value is None or isinstance(value, bool)}
        used = [sum(each.get(key, True) not in (None, False) for key in options) for each in values]
        chosen.append(own[used.index(max(used))])
        if len(options) > MANY:
            chosen.append(own[used.index(min(used))])
    return chosen
