"""Measure what a call of an op adds to the ATen functions that do the work: one small image, inference, on the CPU.

    python -m benchmarks.host.dispatch benchmarks/results/cpu/dispatch.json

An op and the bare ATen calls are timed in turns on one thread, each over many calls a round. Noise only ever adds, so
the difference of the two least rounds is the cost. `python -m benchmarks.report.results` makes a table of the file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.columns import make
from benchmarks.harness.provenance import commit, write_json
from benchmarks.harness.record import environment
from benchmarks.harness.timing import least_microseconds
from fastvit import ops
from fastvit.study.accuracy import formulas as eager

N, D, HEADS = 17, 64, 2

Case = tuple[Callable[[], object], Callable[[], object]]  # the op, and the ATen calls that compute its result


def _parameters(*sizes: tuple[int, ...]) -> list[nn.Parameter]:
    """Return random parameters. Matrices are divided by the root of their inputs, because large scores round
    visibly."""
    return [nn.Parameter(torch.randn(*size) / math.prod(size[1:]) ** 0.5) for size in sizes]


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.native_layer_norm(x, (D,), weight, bias, 1e-6)[0]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _norms_and_layers() -> dict[str, Case]:
    x, branch = torch.randn(1, N, D), torch.randn(1, N, D)
    norm = _parameters((D,), (D,))
    weight, bias, layer_scale = _parameters((D, D), (D,), (D,))
    fc1 = _parameters((4 * D, D), (4 * D,))

    def add_layer_norm() -> tuple[Tensor, Tensor]:
        total = x + branch
        return total, _layer_norm(total, *norm)

    return {
        "layer_norm": (lambda: ops.layer_norm(x, norm[0], norm[1]), lambda: _layer_norm(x, *norm)),
        "rms_norm": (lambda: ops.rms_norm(x, norm[0]), lambda: F.rms_norm(x, (D,), norm[0], 1e-6)),
        "add_layer_norm": (lambda: ops.add_layer_norm(x, branch, *norm), add_layer_norm),
        "linear": (lambda: ops.linear(x, *fc1), lambda: F.linear(x, *fc1)),
        "linear, layer_scale and residual": (
            lambda: ops.linear(x, weight, bias, layer_scale=layer_scale, residual=branch),
            lambda: F.linear(x, weight, bias).mul_(layer_scale).add_(branch),
        ),
    }


def _heads() -> dict[str, Case]:
    d = D // HEADS
    q, qkv = torch.randn(1, N, HEADS, d), torch.randn(1, N, 3, HEADS, d)
    grid = qkv[:, 1:].unflatten(1, (4, 4))
    ends, angles = torch.tensor([0, 8, N]), torch.randn(N - 1, d)
    positions = ops.Rotary(angles.sin(), angles.cos(), 1)
    weight, bias = _parameters((d,), (d,))
    norm = ops.Norm(weight, bias)

    def rotary(q: Tensor) -> Tensor:
        first, second = q[:, 1:].chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1) * positions.sin[:, None]
        return torch.cat((q[:, :1], torch.addcmul(turned, q[:, 1:], positions.cos[:, None])), dim=1)

    return {
        "attention": (lambda: ops.attention(q, q, q), lambda: _attention(q, q, q)),
        "attention_qkvpacked": (lambda: ops.attention_qkvpacked(qkv), lambda: _attention(*qkv.unbind(2))),
        "attention_varlen": (
            lambda: ops.attention_varlen(q[0], q[0], q[0], ends),
            lambda: torch.cat([_attention(part, part, part) for part in (q[:, :8], q[:, 8:])], 1)[0],
        ),
        "attention_varlen_qkvpacked": (
            lambda: ops.attention_varlen_qkvpacked(qkv[0], ends),
            lambda: torch.cat([_attention(*part.unbind(2)) for part in (qkv[:, :8], qkv[:, 8:])], 1)[0],
        ),
        "attention_windows": (  # a grid of one window
            lambda: ops.attention_windows(grid, (4, 4)),
            lambda: _attention(*grid.flatten(1, 2).unbind(2)).unflatten(1, (4, 4)),
        ),
        "rotary": (lambda: ops.rotary(q, positions), lambda: rotary(q)),
        "rotary_qkvpacked": (
            lambda: ops.rotary_qkvpacked(qkv, positions),
            lambda: torch.stack((rotary(qkv[:, :, 0]), rotary(qkv[:, :, 1]), qkv[:, :, 2]), dim=2),
        ),
        "qk_norm": (
            lambda: ops.qk_norm(q, q, norm, norm),
            lambda: tuple(torch.native_layer_norm(q, weight.shape, weight, bias, 1e-6)[0] for _ in "qk"),
        ),
    }


def _parts_of_a_model() -> dict[str, Case]:
    x, image = torch.randn(1, N, D), torch.randn(1, 3, 16, 16)
    norm, qkv, proj = _parameters((D,), (D,)), _parameters((3 * D, D), (3 * D,)), _parameters((D, D), (D,))
    fc1, fc2 = _parameters((4 * D, D), (4 * D,)), _parameters((D, 4 * D), (D,))
    weight, bias, pos_embed, prefix = _parameters((D, 3, 4, 4), (D,), (16, D), (1, D))

    def mlp(x: Tensor) -> Tensor:
        return F.linear(torch._C._nn.gelu_(F.linear(x, *fc1)), *fc2)  # type: ignore[attr-defined]

    def attention_half() -> Tensor:
        q, k, v = F.linear(_layer_norm(x, *norm), *qkv).view(1, N, 3, HEADS, -1).unbind(2)
        return F.linear(_attention(q, k, v).flatten(2), *proj).add_(x)

    return {
        "layer_norm_linear": (
            lambda: ops.layer_norm_linear(x, *norm, *fc1),
            lambda: F.linear(_layer_norm(x, *norm), *fc1),
        ),
        "layer_norm_attention": (
            lambda: ops.layer_norm_attention(x, norm[0], norm[1], qkv[0], qkv[1], proj[0], proj[1], HEADS, residual=x),
            attention_half,
        ),
        "mlp": (lambda: ops.mlp(x, *fc1, *fc2, residual=x), lambda: mlp(x).add_(x)),
        "layer_norm_mlp": (
            lambda: ops.layer_norm_mlp(x, *norm, *fc1, *fc2, residual=x),
            lambda: mlp(_layer_norm(x, *norm)).add_(x),
        ),
        "patch_embed": (
            lambda: ops.patch_embed(image, weight, bias, pos_embed=pos_embed, prefix=prefix),
            lambda: eager.patch_embed(image, weight, bias, pos_embed=pos_embed, prefix=prefix),
        ),
    }


@torch.inference_mode()
def measure(rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Return by name the microseconds of the op ("fused") and of the ATen calls ("aten"), the least of the rounds."""
    torch.manual_seed(0)
    found = {}
    for name, (op, aten) in (_norms_and_layers() | _heads() | _parts_of_a_model()).items():
        torch.testing.assert_close(op(), aten())
        found[name] = least_microseconds({"fused": op, "aten": aten}, rounds, calls)
    return found


def render(path: Path) -> list[str]:
    """Return the table of a result file."""
    results = json.loads(path.read_text())
    where = results["environment"]
    rows = [
        (name, *(f"{us:.1f}" for us in (row["aten"], row["fused"], row["fused"] - row["aten"])))
        for name, row in results["microseconds"].items()
    ]
    return [
        *make(("op", "ATen calls\nus", "op\nus", "added\nus"), rows),
        "",
        "One image of 17 tokens, D = 64, inference, one thread: the op, and the ATen calls of eager code",
        "that give the same.",
        f"{where['device']}, torch {where['torch']}, commit {results['commit'][:10]}",
    ]


def main(path: Path) -> None:
    torch.set_num_threads(1)
    where = environment(torch.device("cpu"), torch.float32)
    write_json(path, {"commit": commit(), "environment": where, "microseconds": measure(rounds=200, calls=100)})
    print(*render(path), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
