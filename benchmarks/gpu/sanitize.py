"""Every kernel once, at small awkward shapes, under compute-sanitizer.

    python -m benchmarks.gpu.sanitize --tool memcheck            # or racecheck, initcheck, synccheck
    python -m benchmarks.gpu.sanitize --tool racecheck --op attention

Exit status: 0 without findings, 1 with some, 77 where the machine has no compute-sanitizer. On a machine without a GPU
`--rehearse` runs the same cases in the interpreter, where benchmarks/codegen/traffic_counter.py finds accesses outside
the arguments and elements that two programs store.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv and __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from torch import Tensor

from fastvit import ops
from fastvit.ops import _library

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SKIPPED = 77
KERNELS = "(attention|layer_norm|linear|act_bwd|patch_embed|column_sum|dropout)_"
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")

Make = Callable[..., Tensor]


def _differentiate(out: Any, *leaves: Tensor) -> None:
    outputs = out if isinstance(out, tuple) else (out,)
    torch.autograd.grad(outputs, leaves, [torch.randn_like(t) for t in outputs])


def _attention(make: Make) -> None:
    for N, d, dropout_p in ((50, 64, 0.0), (197, 64, 0.0), (300, 64, 0.0), (130, 80, 0.0), (70, 64, 0.1)):
        qkv = make(2, N, 3, 2, d)
        _differentiate(ops.attention_qkvpacked(qkv, dropout_p=dropout_p), qkv)


def _layer_norm(make: Make) -> None:
    x, branch, w, b, scale = make(37, 200), make(37, 200), make(200), make(200), make(200)
    _differentiate(ops.layer_norm(x, w, b), x, w, b)
    row_scale = torch.ones(37, device=x.device)
    out = ops.add_layer_norm(x, branch, w, b, layer_scale=scale, row_scale=row_scale)
    _differentiate(out, x, branch, w, b, scale)


def _linear(make: Make) -> None:
    x, w, b, scale, residual = make(70, 72), make(136, 72), make(136), make(136), make(70, 136)
    _differentiate(ops.linear(x, w, b, activation="gelu"), x, w, b)
    out = ops.linear(x, w, b, layer_scale=scale, residual=residual)
    _differentiate(out, x, w, b, scale, residual)


def _mlp(make: Make) -> None:
    x, w1, b1, w2, b2 = make(70, 72), make(136, 72), make(136), make(72, 136), make(72)
    norm = make(72), make(72)
    for recompute in ("none", "activation", "all"):
        _differentiate(ops.mlp(x, w1, b1, w2, b2, residual=x, recompute=recompute), x, w1, b1, w2, b2)
    _differentiate(ops.mlp(x, w1, b1, w2, b2, dropout_p=0.1), x, w1, b1, w2, b2)
    _differentiate(ops.layer_norm_mlp(x, *norm, w1, b1, w2, b2, residual=x), x, *norm, w1, b1, w2, b2)


def _patch_embed(make: Make) -> None:
    for patch, size in ((16, 48), (14, 42)):
        image, w, b = make(3, 3, size, size), make(72, 3, patch, patch), make(72)
        position, prefix = make(9, 72), make(2, 72)
        _differentiate(ops.patch_embed(image, w, b, pos_embed=position, prefix=prefix), image, w, b, position, prefix)
    pixels = (torch.rand(3, 3, 48, 48, device=w.device) * 255).to(torch.uint8)
    weight = make(72, 3, 16, 16)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    _differentiate(ops.patch_embed(pixels, weight, b, mean=mean, std=std), weight, b)


def _dropout(make: Make) -> None:
    x = make(37, 200)
    _differentiate(ops.dropout(x, 0.1), x)


CASES: dict[str, Callable[[Make], None]] = {
    "attention": _attention,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "mlp": _mlp,
    "patch_embed": _patch_embed,
    "dropout": _dropout,
}


def run(op: str, device: torch.device, *dtypes: torch.dtype) -> None:
    """The op's cases, forward and backward."""
    for dtype in dtypes:

        def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device=device).mul_(0.5).to(dtype).requires_grad_()

        with _library.use_backend("triton"):
            CASES[op](make)
    if device.type == "cuda":
        torch.cuda.synchronize()


def rehearse(op: str) -> list[str]:
    """In the interpreter, without matmuls; the kernels that ran. Raises for an access out of bounds and for a race."""
    from benchmarks.codegen.traffic_counter import count

    with count(compute=False) as traffic:
        run(op, torch.device("cpu"), torch.bfloat16)
    return [launch.kernel for launch in traffic.launches]


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(_PLACES))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, default="memcheck")
    parser.add_argument("--op", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--rehearse", action="store_true", help="in the interpreter, without the tool")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # already under the tool
    chosen = parser.parse_args(arguments)
    names = chosen.op or list(CASES)
    torch.manual_seed(0)
    if chosen.rehearse:
        for op in names:
            kernels = rehearse(op)
            print(f"{op}: {len(kernels)} launches of {len(set(kernels))} kernels, in bounds and without races")
        return 0
    if chosen.inside:
        for op in names:
            run(op, torch.device("cuda"), torch.bfloat16, torch.float32)
        return 0
    tool = sanitizer()
    if tool is None:
        print(f"SKIPPED: no compute-sanitizer on this machine (PATH, {', '.join(_PLACES)})")
        return SKIPPED
    command = [
        tool, "--tool", chosen.tool, "--error-exitcode", "1", "--kernel-regex", f"kns={KERNELS}",
        sys.executable, "-m", "benchmarks.gpu.sanitize", "--inside", *(f"--op={op}" for op in names),
    ]  # fmt: skip
    # every tensor gets an allocation of its own, so that memcheck sees its end
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=environment, check=False)
    print(f"{chosen.tool}, {', '.join(names)}: {'no findings' if done.returncode == 0 else 'FINDINGS'}")
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
