"""Count the bytes that every kernel moves, against the least possible, in Triton's interpreter.

    python -m benchmarks.codegen.traffic                     # every case, two minutes
    python -m benchmarks.codegen.traffic --op attention

Bytes are those of unmasked lanes: what the programs ask of the caches. The least possible: every element that the
launch needs is loaded once, every result stored once. The least for the tiling: every program loads each element that
it needs once; anything beyond that is loaded twice by a program, or not needed. Matmuls are not computed, because no
address depends on a value.

The workloads have real N, d and D and the launch configurations of sm_90. Where the real case has too many rows, a part
of the rows runs on the same part of a GPU, so that a persistent program has its real share of rows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from benchmarks.codegen.traffic_counter import Argument, CountedLaunch, Traffic, count
from benchmarks.gpu.tuner import using
from benchmarks.harness.columns import make
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload, workloads
from fastvit.kernels import _configs
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices

SMS = 132  # of an H100, whose launch configurations are counted


@contextlib.contextmanager
def _part_of_gpu(parts: int) -> Iterator[None]:
    """Within the context, launchers see the multiprocessors of one of `parts` parts of the GPU, and GEMMs are
    configured for the rows of the whole."""
    gemm = _configs.gemm
    with (
        backends.use_backend("triton", strict=True),
        mock.patch.object(devices, "multiprocessors", return_value=round(SMS / parts)),
        mock.patch.object(_configs, "gemm", lambda m, *rest: gemm(m * parts, *rest)),
        using({}),  # configurations that were looked up before are computed again
    ):
        yield


def measure(workload: Workload) -> dict[str, Traffic]:
    """Return the traffic of the forward and of the backward pass, in bfloat16."""
    runner = workload.runner("fastvit", Draw(torch.bfloat16, "cpu"))
    with _part_of_gpu(workload.parts):
        with count(compute=False) as ahead:
            outputs = runner.outputs()
        with count(compute=False) as back:
            torch.autograd.grad(outputs, runner.leaves, [torch.zeros_like(t) for t in outputs])
    return {"forward": ahead, "backward": back}


# ---- why a launch moves more than the least ----

_OF_HEADS = {
    **dict.fromkeys(("sin", "cos"), "program of their tokens"),
    **{f"{x}_{of}": "program" for x in "qk" for of in ("weight", "bias")},
}
_OF_MASK = "head or sample that shares it, and each tile of queries that share a row"
_TILE = {  # by kernel and argument: what is loaded once more for each ...
    "layer_norm_fwd_kernel": dict.fromkeys(("w", "b", "layer_scale"), "program"),
    "layer_norm_bwd_kernel": dict.fromkeys(("w", "b", "layer_scale"), "program"),
    "attention_fwd_kernel": {**dict.fromkeys("kv", "query tile"), "mask": _OF_MASK},
    "attention_bwd_dq_kernel": {**dict.fromkeys("kv", "query tile"), "mask": _OF_MASK},
    "attention_bwd_dkdv_kernel": {**dict.fromkeys(("q", "do", "statistics"), "key tile"), "mask": _OF_MASK},
    "attention_bwd_mask_kernel": {
        **dict.fromkeys(("q", "do", "statistics"), "key tile"),
        **dict.fromkeys("kv", "query tile"),
        "mask": _OF_MASK,
        "seed": "program",
    },
    **dict.fromkeys(
        ("attention_relative_fwd_kernel", "attention_relative_bwd_dq_kernel"), dict.fromkeys("kv", "query tile")
    ),
    "attention_relative_bwd_dkdv_kernel": dict.fromkeys(("q", "do", "statistics", "rows", "columns"), "key tile"),
    "linear_fwd_kernel": {"x": "column tile", "w": "row tile", "bias": "row tile", "layer_scale": "row tile"},
    "linear_dact_kernel": {"dy": "column tile", "w": "row tile"},
    "gated_fwd_kernel": {"x": "column tile", **dict.fromkeys(("gate", "value", "gate_bias", "value_bias"), "row tile")},
    "gated_dact_kernel": {"dy": "column tile", "w": "row tile"},
    "patch_embed_fwd_kernel": {"image": "feature tile", **dict.fromkeys(("weight", "bias", "pos"), "token tile")},
    "patch_embed_bwd_weight_kernel": {"dout": "tile of pixels", "image": "feature tile"},
    "patch_embed_bwd_image_kernel": {"dout": "tile of pixels", "weight": "token tile"},
    "rotary_kernel": _OF_HEADS,
    "qk_norm_fwd_kernel": _OF_HEADS,
    "qk_norm_bwd_kernel": _OF_HEADS,
    "dropout_kernel": {"seed": "program", "layer_scale": "row tile"},
}
_AGAIN = {  # by kernel and argument: why one program loads an element again
    ("patch_embed_fwd_kernel", "image"): "lanes without a patch load the first one, unmasked",
    ("patch_embed_bwd_weight_kernel", "image"): "lanes without a patch load the first one, unmasked",
    ("attention_bwd_dkdv_kernel", "mask"): "a row of all queries, by each query tile of a program",
    ("attention_bwd_dkdv_kernel", "statistics"): "by several threads of a tile, so that each loads one number",
    ("attention_bwd_mask_kernel", "mask"): "by each sample and head that share it",
    **dict.fromkeys(
        [(f"attention_relative_{kernel}_kernel", "columns") for kernel in ("fwd", "bwd_dq")],
        "for each grid row of a tile",
    ),
    ("linear_fwd_kernel", "x"): "by each column tile of a program of a persistent grid",
    ("linear_fwd_kernel", "w"): "by each row tile of a program of a persistent grid",
    ("layer_norm_bwd_kernel", "b"): "by each row tile of a program",
    ("layer_norm_bwd_kernel", "layer_scale"): "by each row tile of a program",
    **{
        (kernel, table): "of a head, by each sample of a program"
        for kernel in ("rotary_kernel", "qk_norm_fwd_kernel", "qk_norm_bwd_kernel")
        for table in ("sin", "cos")
    },
}
UNEXPLAINED = "unexplained"


def _reasons(launch: CountedLaunch, argument: Argument) -> Iterator[str]:
    name = argument.name.removesuffix("_ptr")
    if argument.readers > 1.005:
        tile = _TILE.get(launch.kernel, {}).get(name)
        yield f"{name} x{argument.readers:.3g}: " + (f"once for each {tile}, from the cache" if tile else UNEXPLAINED)
    if argument.reloads > 1.005:
        yield f"{name} x{argument.reloads:.3g}: " + _AGAIN.get((launch.kernel, name), UNEXPLAINED)


def why(launch: CountedLaunch) -> str:
    """Return the reasons for the launch's excess over its least, the largest first, without those under 1 %."""
    excess = {name: a.loaded - a.loaded_once for name, a in launch.arguments.items()}
    large = [name for name in sorted(excess, key=lambda n: -excess[n]) if excess[name] > 0.01 * launch.least]
    reasons = [reason for name in large for reason in _reasons(launch, launch.arguments[name])]
    reasons += [f"{n} stored again: {UNEXPLAINED}" for n, a in launch.arguments.items() if a.stored > a.stored_once]
    return "; ".join(reasons)


def passes(workload: Workload) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield title and table of the forward and of the backward pass, with a row per kernel and one for all of them."""
    parts = f", one of {workload.parts} parts of the GPU and of the rows" if workload.parts > 1 else ""
    for step, traffic in measure(workload).items():
        rows = []
        for kernel in dict.fromkeys(launch.kernel for launch in traffic.launches):
            launches = [launch for launch in traffic.launches if launch.kernel == kernel]
            reasons = "; ".join(filter(None, dict.fromkeys(map(why, launches))))
            rows.append(_row(kernel, reasons, launches, sum(launch.least for launch in launches)))
        rows.append(_row("all of it", "", traffic.launches, traffic.least))
        yield f"{workload.op}, {step}: {workload}{parts}", rows


def _row(kernel: str, reasons: str, launches: list[CountedLaunch], least: int) -> list[str]:
    moved = sum(launch.loaded + launch.stored for launch in launches)
    tiled = sum(launch.least_tiled for launch in launches)
    kilobytes = (f"{n / 1024:,.0f}" for n in (moved, least, tiled))
    return [kernel, reasons, *kilobytes, f"{moved / least:.3f}", f"{moved / tiled:.3f}"]


LEGEND = """\
KB moved: loaded and stored by unmasked lanes. KB least: every element loaded once and every result stored once. KB
tiled: loaded once by every program that needs it. moved / least and moved / tiled are of the figures in the row."""
_COLUMNS = ("kernel", "why", "moved\nKB", "least\nKB", "tiled\nKB", "moved\n/ least", "moved\n/ tiled")


def table(title: str, rows: list[list[str]]) -> str:
    return "\n".join(["", title, *make(_COLUMNS, rows, left=2, wrap=1)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", action="append", default=[], help="only the workloads of this op")
    chosen = parser.parse_args(arguments)
    unexplained = False
    print(LEGEND)
    for workload in workloads("traffic", ops=tuple(chosen.op)):
        for title, rows in passes(workload):
            print(table(title, rows), flush=True)
            unexplained |= any(UNEXPLAINED in row[1] for row in rows)
    return int(unexplained)


if __name__ == "__main__":
    sys.exit(main())
