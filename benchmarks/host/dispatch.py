"""Measure what a call of an op adds to the ATen functions that do the work: one small image, inference, on the CPU.

    python -m benchmarks.host.dispatch benchmarks/results/cpu/dispatch.json

An op and the bare ATen calls are timed in turns on one thread, each over many calls a round. Noise only ever adds, so
the difference of the two least rounds is the cost. `python -m benchmarks.report.results` makes a table of the file.
"""

from __future__ import annotations

import json
import math
import sys
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.columns import make
from benchmarks.harness.provenance import commit, write_json
from benchmarks.harness.record import environment
from fastvit import ops
from fastvit.study.accuracy import formulas as eager

N, D, HEADS = 17, 64, 2

Case = tuple[Callable[[], object], Callable[[], object]]


def _parameters(*sizes: tuple[int, ...]) -> list[nn.Parameter]:
    """Return random parameters. Matrices are divided by the root of their inputs, because large scores round
    visibly."""
    return [nn.Parameter(torch.randn(*size) / math.prod(size[1:]) ** 0.5) for size in sizes]


def cases() -> dict[str, Case]:
    """Return by name the op, and the ATen calls that compute its result."""
    torch.manual_seed(0)
    x, branch = torch.randn(1, N, D), torch.randn(1, N, D)
    q, qkv = torch.randn(1, N, HEADS, D // HEADS), torch.randn(1, N, 3, HEADS, D // HEADS)
    norm_weight, norm_bias = norm = _parameters((D,), (D,))
    weight, bias, layer_scale = _parameters((D, D), (D,), (D,))
    qkv_weight, qkv_bias = _parameters((3 * D, D), (3 * D,))
    fc1, fc2 = _parameters((4 * D, D), (4 * D,)), _parameters((D, 4 * D), (D,))
    head_weight, head_bias = _parameters((D // HEADS,), (D // HEADS,))
    of_head = ops.Norm(head_weight, head_bias)
    image, ends = torch.randn(1, 3, 16, 16), torch.tensor([0, 8, N])
    patch = _parameters((D, 3, 4, 4), (D,), (16, D), (1, D))  # weight, bias, positions, prefix

    angles = torch.randn(N - 1, D // HEADS)
    positions = ops.Rotary(angles.sin(), angles.cos(), 1)

    def rotary(q: Tensor) -> Tensor:
        first, second = q[:, 1:].chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1) * positions.sin[:, None]
        return torch.cat((q[:, :1], torch.addcmul(turned, q[:, 1:], positions.cos[:, None])), dim=1)

    def layer_norm(x: Tensor) -> Tensor:
        return torch.native_layer_norm(x, (D,), norm_weight, norm_bias, 1e-6)[0]

    def mlp(x: Tensor) -> Tensor:
        return F.linear(torch._C._nn.gelu_(F.linear(x, *fc1)), *fc2)  # type: ignore[attr-defined]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    def attention_half() -> Tensor:
        q, k, v = F.linear(layer_norm(x), qkv_weight, qkv_bias).view(1, N, 3, HEADS, -1).unbind(2)
        return F.linear(attention(q, k, v).flatten(2), weight, bias).add_(x)

    def add_layer_norm() -> tuple[Tensor, Tensor]:
        total = x + branch
        return total, layer_norm(total)

    return {
        "layer_norm": (lambda: ops.layer_norm(x, norm_weight, norm_bias), lambda: layer_norm(x)),
        "rms_norm": (lambda: ops.rms_norm(x, norm_weight), lambda: F.rms_norm(x, (D,), norm_weight, 1e-6)),
        "add_layer_norm": (lambda: ops.add_layer_norm(x, branch, *norm), add_layer_norm),
        "linear": (lambda: ops.linear(x, *fc1), lambda: F.linear(x, *fc1)),
        "linear, layer_scale and residual": (
            lambda: ops.linear(x, weight, bias, layer_scale=layer_scale, residual=branch),
            lambda: F.linear(x, weight, bias).mul_(layer_scale).add_(branch),
        ),
        "attention": (lambda: ops.attention(q, q, q), lambda: attention(q, q, q)),
        "attention_qkvpacked": (lambda: ops.attention_qkvpacked(qkv), lambda: attention(*qkv.unbind(2))),
        "attention_varlen": (
            lambda: ops.attention_varlen(q[0], q[0], q[0], ends),
            lambda: torch.cat([attention(part, part, part) for part in (q[:, :8], q[:, 8:])], 1)[0],
        ),
        "rotary": (lambda: ops.rotary(q, positions), lambda: rotary(q)),
        "rotary_qkvpacked": (
            lambda: ops.rotary_qkvpacked(qkv, positions),
            lambda: torch.stack((rotary(qkv[:, :, 0]), rotary(qkv[:, :, 1]), qkv[:, :, 2]), dim=2),
        ),
        "qk_norm": (
            lambda: ops.qk_norm(q, q, of_head, of_head),
            lambda: tuple(torch.native_layer_norm(q, head_weight.shape, head_weight, head_bias, 1e-6)[0] for _ in "qk"),
        ),
        "layer_norm_linear": (lambda: ops.layer_norm_linear(x, *norm, *fc1), lambda: F.linear(layer_norm(x), *fc1)),
        "layer_norm_attention": (
            lambda: ops.layer_norm_attention(
                x, norm_weight, norm_bias, qkv_weight, qkv_bias, weight, bias, HEADS, residual=x
            ),
            attention_half,
        ),
        "mlp": (lambda: ops.mlp(x, *fc1, *fc2, residual=x), lambda: mlp(x).add_(x)),
        "layer_norm_mlp": (
            lambda: ops.layer_norm_mlp(x, *norm, *fc1, *fc2, residual=x),
            lambda: mlp(layer_norm(x)).add_(x),
        ),
        "patch_embed": (
            lambda: ops.patch_embed(image, *patch[:2], pos_embed=patch[2], prefix=patch[3]),
            lambda: eager.patch_embed(image, *patch[:2], pos_embed=patch[2], prefix=patch[3]),
        ),
    }


@torch.inference_mode()
def measure(rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Return by name the microseconds of the op ("fused") and of the ATen calls ("aten"), the least of the rounds."""
    found = {}
    for name, pair in cases().items():
        torch.testing.assert_close(*(call() for call in pair))
        seconds = [[timeit.timeit(call, number=calls) / calls for call in pair] for _ in range(rounds)]
        fused_us, aten_us = (1e6 * min(column) for column in zip(*seconds, strict=True))
        found[name] = {"fused": fused_us, "aten": aten_us}
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
