"""Bytes that every kernel moves against the least possible, counted in Triton's interpreter: one table, and JSON.

    python -m benchmarks.codegen.traffic                     # every case, two minutes
    python -m benchmarks.codegen.traffic --op attention --json traffic.json

`loaded` and `stored` are bytes of unmasked lanes: what the programs ask of the caches. `least`: every element that
the launch needs loaded once, every result stored once. `x least` = (loaded + stored) / least. `x tiled` is against the
least of the launch's tiling: every program loads an element that it needs once; above 1 a program loads something
twice, or lanes load what nobody needs. Matmuls are not computed: no address depends on a value.

Cases have real N, d and D and the launch configurations of sm_90. Where the real case has too many rows, it is one
part of a GPU: as many rows and multiprocessors as the label says, so a persistent program has its true share of rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from torch import Tensor

from benchmarks.codegen.traffic_counter import Argument, Launch, Traffic, count
from fastvit import ops
from fastvit.kernels import _configs
from fastvit.ops import _library

Step = tuple[Callable[[], Any], tuple[Tensor, ...]]  # forward, and what it is differentiated by


@dataclass(frozen=True)
class Case:
    """sms: multiprocessors of the part of the GPU; rows: real rows / rows here, for the configs of GEMMs."""

    op: str
    label: str
    build: Callable[[torch.dtype], Step]
    sms: int = 132
    rows: int = 1
    dtype: torch.dtype = torch.bfloat16


def _leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def layer_norm(M: int, D: int, *, add: bool = False) -> Callable[[torch.dtype], Step]:
    def build(dtype: torch.dtype) -> Step:
        x, branch = (_leaf(M, D, dtype=dtype) for _ in range(2))
        w, b, scale = (_leaf(D, dtype=dtype) for _ in range(3))
        if add:
            return lambda: ops.add_layer_norm(x, branch, w, b, layer_scale=scale), (x, branch, w, b, scale)
        return lambda: ops.layer_norm(x, w, b), (x, w, b)

    return build


def attention(N: int, H: int, d: int) -> Callable[[torch.dtype], Step]:
    def build(dtype: torch.dtype) -> Step:
        qkv = _leaf(1, N, 3, H, d, dtype=dtype)
        return lambda: ops.attention_qkvpacked(qkv), (qkv,)

    return build


def mlp(M: int, D: int) -> Callable[[torch.dtype], Step]:
    def build(dtype: torch.dtype) -> Step:
        x = _leaf(M, D, dtype=dtype)
        shapes = ((D,), (D,), (4 * D, D), (4 * D,), (D, 4 * D), (D,))
        parameters = tuple(_leaf(*shape, dtype=dtype) for shape in shapes)
        return lambda: ops.layer_norm_mlp(x, *parameters, residual=x), (x, *parameters)

    return build


def patch_embed(B: int, px: int, patch: int, D: int) -> Callable[[torch.dtype], Step]:
    def build(dtype: torch.dtype) -> Step:
        image = torch.zeros(B, 3, px, px, dtype=dtype)
        w, b = _leaf(D, 3, patch, patch, dtype=dtype), _leaf(D, dtype=dtype)
        position, prefix = _leaf((px // patch) ** 2, D, dtype=dtype), _leaf(1, D, dtype=dtype)
        leaves = (w, b, position, prefix)
        return lambda: ops.patch_embed(image, w, b, pos_embed=position, prefix=prefix), leaves

    return build


def dropout(M: int, D: int) -> Callable[[torch.dtype], Step]:
    def build(dtype: torch.dtype) -> Step:
        x = _leaf(M, D, dtype=dtype)
        return lambda: ops.dropout(x, 0.1), (x,)

    return build


SHARE = 382  # rows of a 132nd of 256 x 197
CASES = [
    *(Case("layer_norm", f"256x197 rows, 1/132; D={D}", layer_norm(SHARE, D), sms=1) for D in (384, 768, 1664)),
    Case("layer_norm", "197 rows, D=768", layer_norm(197, 768)),
    Case("add_layer_norm", "256x197 rows, 1/132; D=768", layer_norm(SHARE, 768, add=True), sms=1),
    *(Case("attention", f"N={N}, H={H}, d=64", attention(N, H, 64)) for N, H in ((50, 3), (197, 3), (257, 2))),
    Case("attention", "N=257, H=2, d=80", attention(257, 2, 80)),
    Case("attention", "N=577, H=1, d=64", attention(577, 1, 64)),
    Case("attention", "N=1025, H=1, d=64", attention(1025, 1, 64)),
    Case("layer_norm_mlp", "256x197 rows, 1/128; D=768", mlp(394, 768), sms=1, rows=128),
    Case("patch_embed", "224/16, batch 5 of 256, D=768", patch_embed(5, 224, 16, 768), sms=3),
    Case("patch_embed", "224/16, batch 1, D=768", patch_embed(1, 224, 16, 768)),
    Case("patch_embed", "518/14, batch 1 of 16, D=1024", patch_embed(1, 518, 14, 1024), sms=8),
    Case("dropout", "197 rows, D=768", dropout(197, 768)),
]


@contextlib.contextmanager
def _part_of_gpu(case: Case) -> Iterator[None]:
    """The launchers see the case's multiprocessors, and configs of GEMMs are those of the real number of rows."""
    gemm = _configs.gemm
    with (
        _library.use_backend("triton"),
        mock.patch.object(_library, "multiprocessors", return_value=case.sms),
        mock.patch.object(_configs, "gemm", lambda m, *rest: gemm(m * case.rows, *rest)),
    ):
        yield


def measure(case: Case) -> dict[str, Traffic]:
    """The traffic of the forward and of the backward pass."""
    forward, leaves = case.build(case.dtype)
    with _part_of_gpu(case):
        with count(compute=False) as ahead:
            out = forward()
        outputs = out if isinstance(out, tuple) else (out,)
        with count(compute=False) as back:
            torch.autograd.grad(outputs, leaves, [torch.zeros_like(t) for t in outputs])
    return {"forward": ahead, "backward": back}


# ---- why a launch moves more than the least ----

_TILE = {  # what the programs that share an argument differ in
    "layer_norm_fwd_kernel": dict.fromkeys(("w", "b", "layer_scale"), "program"),
    "layer_norm_bwd_kernel": dict.fromkeys(("w", "b", "layer_scale"), "program"),
    "attention_short_fwd_kernel": dict.fromkeys("kv", "query tile"),
    "attention_fwd_kernel": dict.fromkeys("kv", "query tile"),
    "attention_bwd_dq_kernel": dict.fromkeys("kv", "query tile"),
    "attention_bwd_dkdv_kernel": dict.fromkeys(("q", "do", "lse2", "delta"), "key tile"),
    "linear_fwd_kernel": {"x": "column tile", "w": "row tile", "bias": "row tile", "layer_scale": "row tile"},
    "linear_dact_kernel": {"dy": "column tile", "w": "row tile"},
    "patch_embed_fwd_kernel": {
        "image": "feature tile", "weight": "token tile", "bias": "token tile", "pos": "token tile"
    },
    "patch_embed_bwd_weight_kernel": {"dout": "tile of pixels", "image": "feature tile"},
    "patch_embed_bwd_image_kernel": {"dout": "tile of pixels", "weight": "token tile"},
    "dropout_kernel": {"seed": "program", "layer_scale": "row tile"},
}  # fmt: skip
_AGAIN = {  # what makes one program load an element again
    ("patch_embed_fwd_kernel", "image"): "lanes without a patch load the first one, unmasked",
    ("patch_embed_bwd_weight_kernel", "image"): "lanes without a patch load the first one, unmasked",
    ("layer_norm_bwd_kernel", "b"): "by each row tile of a program",
    ("layer_norm_bwd_kernel", "layer_scale"): "by each row tile of a program",
}
UNEXPLAINED = "unexplained"


def _reasons(launch: Launch, argument: Argument) -> Iterator[str]:
    name = argument.name.removesuffix("_ptr")
    if argument.readers > 1.005:
        tile = _TILE.get(launch.kernel, {}).get(name)
        yield f"{name} x{argument.readers:.3g}: " + (f"once for each {tile}, from the cache" if tile else UNEXPLAINED)
    if argument.reloads > 1.005:
        yield f"{name} x{argument.reloads:.3g}: " + _AGAIN.get((launch.kernel, name), UNEXPLAINED)


def why(launch: Launch) -> str:
    """What accounts for the launch's excess over its least, the largest part first; parts under 1 % left out."""
    excess = {name: a.loaded - a.loaded_once for name, a in launch.arguments.items()}
    large = [name for name in sorted(excess, key=lambda n: -excess[n]) if excess[name] > 0.01 * launch.least]
    reasons = [reason for name in large for reason in _reasons(launch, launch.arguments[name])]
    reasons += [f"{n} stored again: {UNEXPLAINED}" for n, a in launch.arguments.items() if a.stored > a.stored_once]
    return "; ".join(reasons)


# ---- goals ----


def goal(op: str, step: str, label: str, least: float, tiled: float) -> str:
    """How an operation stands to its goal: LayerNorm 1.05 of the least, patch embedding and attention's forward at
    short N 1.15 of the least for their tiling."""
    if op.endswith("layer_norm"):
        return f"<= 1.05 of least: {'met' if least <= 1.05 else 'MISSED'}"
    short = any(label.startswith(f"N={n},") for n in (50, 197, 257))
    if op == "patch_embed" or (op == "attention" and step == "forward" and short):
        return f"<= 1.15 of tiled: {'met' if tiled <= 1.15 else 'MISSED'}"
    return ""


def rows(case: Case) -> Iterator[dict[str, Any]]:
    """A row for every kernel, and one for the pass where it has several or a goal."""
    for step, traffic in measure(case).items():
        kernels: dict[str, list[Launch]] = {}
        for launch in traffic.launches:
            kernels.setdefault(launch.kernel, []).append(launch)
        for name, launches in kernels.items():
            yield _row(case, step, name, launches, sum(launch.least for launch in launches))
        yield _row(case, step, "", traffic.launches, traffic.least)


def _row(case: Case, step: str, kernel: str, launches: list[Launch], least: int) -> dict[str, Any]:
    loaded, stored = (sum(getattr(launch, what) for launch in launches) for what in ("loaded", "stored"))
    tiled = (loaded + stored) / sum(launch.least_tiled for launch in launches)
    ratio = (loaded + stored) / least
    row: dict[str, Any] = {
        "op": case.op, "case": case.label, "dtype": str(case.dtype).removeprefix("torch."), "step": step,
        "kernel": kernel, "launches": len(launches), "programs": sum(launch.programs for launch in launches),
        "loaded": loaded, "stored": stored, "least": least, "of_least": ratio, "of_tiled": tiled,
    }  # fmt: skip
    if not kernel:
        return row | {"goal": goal(case.op, step, case.label, ratio, tiled)}
    arguments = [
        {"launch": i, **vars(argument)} for i, launch in enumerate(launches) for argument in launch.arguments.values()
    ]
    return row | {"why": " | ".join(filter(None, dict.fromkeys(map(why, launches)))), "arguments": arguments}


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        f"{'kernel':<30} {'launches':>8} {'programs':>8} {'loaded':>8} {'stored':>8} {'least':>8} "
        f"{'x least':>8} {'x tiled':>8}  why / goal      (KB)"
    ]
    for i, row in enumerate(found):
        if i == 0 or (row["op"], row["case"], row["step"]) != tuple(found[i - 1][k] for k in ("op", "case", "step")):
            lines += ["", f"{row['op']}, {row['step']}: {row['case']}, {row['dtype']}"]
        sizes = " ".join(f"{row[k] / 1024:>8,.0f}" for k in ("loaded", "stored", "least"))
        lines.append(
            f"{row['kernel'] or '  all of it':<30} {row['launches']:>8} {row['programs']:>8} {sizes} "
            f"{row['of_least']:>8.3f} {row['of_tiled']:>8.3f}  {row.get('why', row.get('goal'))}".rstrip()
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", choices=sorted({case.op for case in CASES}), help="only the cases of this op")
    parser.add_argument("--json", type=Path, help="also write the rows, with every argument, to this file")
    chosen = parser.parse_args(arguments)
    found = [row for case in CASES if chosen.op in (None, case.op) for row in rows(case)]
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1))
    print(table(found))
    return int(any(UNEXPLAINED in row.get("why", "") for row in found))


if __name__ == "__main__":
    sys.exit(main())
