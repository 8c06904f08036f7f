"""The launch tables that can be measured: which workloads ask for each, and the choices that are tried."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload, workloads

Choice = tuple[int, ...]  # in the order of fastvit.kernels._tuned.FIELDS
Run = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Work:
    """One op at one shape. `build(device)` gives the call to time, whose launches ask for choices of `table`."""

    table: str
    label: str
    build: Callable[[torch.device], Run]
    fixed: Mapping[str, Choice] = field(default_factory=dict)  # choices of other tables, at every key


@dataclass(frozen=True)
class Table:
    """name: of a table, measured by an op's workloads. steps: "forward", "backward" or "both", as one call. leaves:
    which of the op's tensors backward differentiates by, all of them if none is named: no GEMM is timed with the kernel
    in question."""

    name: str
    op: str
    steps: tuple[str, ...]
    leaves: tuple[int, ...] = ()
    fixed: Mapping[str, Choice] = field(default_factory=dict)
    suits: Callable[[dict[str, Any]], bool] = lambda sizes: True


_SPLIT = {"attention_bwd_short": (0, 64, 64, 4, 2)}
TABLES = (  # in the order in which they build on each other: a choice between two kernels comes after theirs
    Table("layer_norm", "layer_norm", ("forward", "backward")),
    Table("column_sum", "layer_norm", ("backward",)),
    Table("activation_backward", "linear", ("backward",), (2,), suits=lambda sizes: sizes["B"] == 64),
    Table("attention_fwd", "attention", ("forward",)),
    Table("attention_bwd_dq", "attention", ("backward",), fixed=_SPLIT),
    Table("attention_bwd_dkdv", "attention", ("backward",), fixed=_SPLIT),
    Table("attention_bwd_short", "attention", ("backward",), suits=lambda sizes: sizes["N"] <= 256),
    # forward and backward, since fc1 and the gradient behind it share a choice
    Table("gemm", "mlp", ("both",), fixed={"use_triton_gemm": (1,)}),
    Table("gemm", "linear", ("forward",), fixed={"use_triton_gemm": (1,)}, suits=lambda s: s["D"] == s["out"]),
    Table("use_triton_gemm", "linear", ("forward",), suits=lambda sizes: sizes["B"] != 64),
    Table("use_triton_gemm", "mlp", ("backward",), (2, 3)),  # fc1's bias and fc2's weight: what linear_dact is for
    Table("patch_embed", "patch_embed", ("forward", "backward"), (0, 1)),
)


HEADLINE = ("gemm", "use_triton_gemm")  # tables that are measured before the rows of headline.py
_WIDTHS = (768, 384)  # of the rows' models, the more wanted first


def works(*, tiny: bool = False, headline: bool = False) -> Iterator[Work]:
    """Everything there is to measure; tiny: for the interpreter, whose GEMMs with an epilogue are
    all Triton's. headline: only what
    the rows of headline.py ask for of the tables HEADLINE."""
    for width, table in itertools.product(_WIDTHS if headline and not tiny else (0,), TABLES):
        if (headline and table.name not in HEADLINE) or (tiny and table.name == "use_triton_gemm"):
            continue
        for workload in workloads("rehearse" if tiny else "tune", ops=(table.op,)):
            sizes = workload.sizes
            if width and (sizes["N"] != 197 or min(sizes["D"], sizes.get("out", sizes["D"])) != width):
                continue
            for step in table.steps if table.suits(sizes) else ():
                build = functools.partial(_build, workload, step, table.leaves)
                yield Work(table.name, f"{workload} {step}", build, table.fixed)


def _build(workload: Workload, step: str, leaves: tuple[int, ...], device: torch.device) -> Run:
    runner = workload.runner("fused", Draw(torch.bfloat16, device))
    if step == "forward":
        return runner.infer
    outputs = runner.outputs()
    gradients = tuple(torch.randn_like(out) for out in outputs)
    if step == "both":
        return lambda: runner.gradients(gradients)
    wanted = [runner.leaves[i] for i in leaves] or runner.leaves
    return lambda: torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)


def _with_stages(*tiles: tuple[int, ...]) -> list[Choice]:
    """(block_m, block_n, num_warps, num_stages, ...): a choice for each number of stages."""
    return [(*tile[:3], stages) for tile in tiles for stages in tile[3:]]


_ATTENTION = _with_stages(
    (64, 64, 4, 2, 3, 4), (128, 64, 8, 2, 3, 4), (128, 128, 8, 2, 3, 4), (64, 128, 4, 2, 3), (128, 64, 4, 2, 3),
    (128, 32, 8, 3), (64, 32, 4, 3),
)  # fmt: skip
_ATTENTION_DQ = _with_stages(
    (128, 64, 8, 2, 3, 4), (128, 128, 8, 2, 3), (64, 64, 4, 2, 3, 4), (64, 128, 4, 3), (128, 32, 8, 3), (64, 32, 4, 3)
)
_ATTENTION_DKDV = _with_stages(
    (64, 128, 8, 2, 3, 4), (32, 128, 8, 2, 3), (64, 64, 4, 2, 3, 4), (32, 128, 4, 3), (32, 64, 4, 2, 3)
)
_GEMM = [
    (128, 128, 64, 8, 3, 128), (128, 128, 64, 8, 3, 0), (128, 128, 64, 8, 4, 0), (128, 128, 64, 4, 3, 0),
    (128, 256, 64, 8, 3, 0), (128, 256, 64, 8, 4, 0), (256, 128, 64, 8, 3, 0), (64, 128, 64, 4, 4, 0),
    (64, 64, 64, 4, 4, 0), (128, 64, 64, 4, 4, 0),
]  # fmt: skip
_PATCH: list[Choice] = [
    (128, 128, 64, 8, 3), (128, 128, 32, 8, 4), (64, 64, 64, 4, 3), (64, 64, 32, 4, 4),
    (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 256, 64, 8, 3),
]  # fmt: skip


_LAYER_NORM: list[Choice] = [(rows, warps) for rows in (1, 2, 4, 8, 16) for warps in (1, 2, 4, 8, 16)]
_COLUMN_SUM: list[Choice] = [
    (16, 32, 4), (32, 32, 4), (32, 32, 8), (64, 32, 4), (64, 32, 8), (128, 16, 8), (32, 64, 4), (32, 128, 8)
]  # fmt: skip
_ACTIVATION = [(8, 256, 4), (4, 512, 4), (4, 256, 4), (8, 256, 8), (8, 128, 4), (16, 128, 4)]
_SHORT_FWD = [(1, 64, 128, 4, 2), (1, 128, 128, 8, 2), (1, 64, 128, 8, 2)]
_SHORT_BWD = [(64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 32, 8), (256, 64, 8), (256, 32, 8), (256, 64, 16)]


def candidates(table: str, key: tuple[int, ...]) -> list[Choice]:
    """What is tried besides the shipped choice. What does not compile or fit is found out by compiling."""
    if table == "layer_norm":
        width = max(1 << (key[0] - 1).bit_length(), 16)
        backward = bool(key[1])
        grids = ((2, 3), (3, 3), (2, 4), (3, 1)) if backward else ((8, 1), (4, 3))  # programs an SM, stages
        most = 16 if backward else 32  # elements a thread
        tiles = [(rows, warps) for rows, warps in _LAYER_NORM if 4 <= rows * width // (32 * warps) <= most]
        return [(*tile, *grid) for tile in tiles for grid in grids]
    if table == "activation_backward":
        return [(m, n, steps, warps) for m, n, warps in _ACTIVATION for steps in (4, 8, 16)]
    if table == "attention_fwd":
        return [*_SHORT_FWD * (key[0] <= 288), *((0, *tile) for tile in _ATTENTION)]
    if table == "attention_bwd_short":
        return [(0, 64, 64, 4, 2), *((1, m, n, warps, 3) for m, n, warps in _SHORT_BWD if key[0] <= m <= 2 * key[0])]
    if table == "gemm":
        return [(m, n, k, group, *rest) for m, n, k, *rest in _GEMM for group in (1, 8)]
    fixed: dict[str, list[Choice]] = {
        "column_sum": _COLUMN_SUM, "attention_bwd_dq": _ATTENTION_DQ, "attention_bwd_dkdv": _ATTENTION_DKDV,
        "use_triton_gemm": [(0,), (1,)], "patch_embed": _PATCH,
    }  # fmt: skip
    return fixed[table]
