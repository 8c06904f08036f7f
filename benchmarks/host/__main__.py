"""Measure the host's time until a call is queued: eager PyTorch, SDPA and fastvit, at batch 1.

    python -m benchmarks.host

It needs a GPU or the pretended device (tests/pretended_cuda), with the CUDA builds of PyTorch and Triton as they are on
a GPU, where launches do nothing. A launch takes CUDA about 2 us and the pretended device 0.1, whoever launches; its
cuBLAS chooses no algorithm. So a GPU adds to every row, in proportion to its launches. Noise only ever adds, so the
lowest rounds count.
"""

from __future__ import annotations

import os
import sys
import time
import timeit
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton

import fastvit
from benchmarks.harness.columns import make, terminal_width
from benchmarks.harness.draw import Draw
from benchmarks.harness.provenance import commit
from benchmarks.harness.timing import Steps, orders
from benchmarks.harness.workloads import Workload
from fastvit.cli import terminal
from fastvit.cuda_graphs import forward
from fastvit.ops.runtime.launch import launch, launching
from fastvit.study.machine import cpu_name

PROVIDERS = ("eager", "sdpa", "fastvit")
_X = {"B": 1, "N": 197, "D": 768}
OPS = (
    Workload("layer_norm", _X),
    Workload("linear", {**_X, "out": 3072, "activation": "gelu"}),
    Workload("attention", {"B": 1, "N": 197, "H": 12, "d": 64}),
    Workload("layer_norm_mlp", _X),
)
BLOCK = Workload("block", {**_X, "H": 12})
MODEL = Workload("model", {"name": "vit_small_patch16_224", "B": 1, "px": 224})
MODES = {"forward": ("inference", torch.bfloat16), "both passes": ("training", torch.bfloat16)}
AUTOCAST = {"both passes, autocast": ("training", torch.float32)}  # float32 parameters, autocast to bfloat16
_CALLS = {BLOCK.op: 5, MODEL.op: 1}  # others: 20. CUDA queues about 1,000 launches, then the host waits
_PASSES, _ROUNDS, _LOWEST, _LAUNCHES = 4, 50, 10, 1000
_DEVICE = torch.device("cuda")


class Row(NamedTuple):
    """Steps by provider, and how many calls make a round."""

    what: str
    mode: str
    steps: Steps
    calls: int


def rows() -> Iterator[Row]:
    """Yield the ops, the block and a model as a program calls them."""
    for workload in (*OPS, BLOCK, MODEL):
        for title, (mode, dtype) in (MODES | AUTOCAST if workload is BLOCK else MODES).items():
            names = [name for name in PROVIDERS if name in workload.providers]
            steps = {name: workload.step(name, mode, Draw(dtype, _DEVICE))[0] for name in names}
            if dtype is torch.float32:
                steps = {name: torch.autocast("cuda", torch.bfloat16)(step) for name, step in steps.items()}
            yield Row(f"{workload.op} {workload}".removeprefix("model "), title, steps, _CALLS.get(workload.op, 20))


def rows_of_replays() -> Iterator[Row]:
    """Yield ViT-B/16 after `fastvit.graphs`."""
    model = fastvit.create_model("vit_base_patch16_224", device="meta").to_empty(device=_DEVICE).bfloat16()
    images = torch.zeros(1, 3, 224, 224, dtype=torch.bfloat16, device=_DEVICE)
    gradient, parameters = torch.zeros(1, 1000, dtype=torch.bfloat16, device=_DEVICE), [*model.parameters()]

    def train() -> None:
        model(images).backward(gradient)
        for p in parameters:
            p.grad = None

    fastvit.graphs(model)
    for step, title in ((torch.no_grad()(partial(model, images)), "forward"), (train, "both passes")):
        # the pretended device computes no sums by which changed tensors are found
        with mock.patch.object(forward, "changes", return_value=set()) if is_pretended() else nullcontext():
            for _ in range(3):
                step()
        yield Row("fastvit.graphs(ViT-B/16) B1", title, {"fastvit": step}, 5)


def is_pretended() -> bool:
    return "(pretended)" in torch.cuda.get_device_name()


def measure(every: Sequence[Row]) -> list[dict[str, float]]:
    """Return for each row, by provider, the microseconds of the host for one call: the mean of the lowest rounds.

    The clock stops when the last call of a round is queued, whatever the GPU still has to do. Providers take turns in
    random order. A row's rounds are spread over several passes, because a shared machine is slow for seconds.
    """
    samples: list[dict[str, list[float]]] = [{name: [] for name in row.steps} for row in every]
    for row, microseconds in [*zip(every, samples, strict=True)] * _PASSES:
        for name in (name for names in orders(row.steps, _ROUNDS) for name in names):
            step = row.steps[name]
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(row.calls):
                step()
            microseconds[name].append(1e6 * (time.perf_counter() - start) / row.calls)
    return [{name: fmean(sorted(each)[:_LOWEST]) for name, each in of_row.items()} for of_row in samples]


def cells(row: Row, measured: dict[str, float]) -> tuple[str, ...]:
    each = (f"{measured[name]:,.1f}" if name in measured else "-" for name in PROVIDERS)
    ratios = (f"{measured['fastvit'] / measured[name]:.2f}" if name in measured else "-" for name in PROVIDERS[:2])
    return row.what, row.mode, *each, *ratios


def launches() -> Iterator[tuple[str, ...]]:
    """Yield for every kernel of a block's training step, at a short and at a long sequence, its arguments and the
    microseconds of one launch by Triton and by fastvit."""
    calls: dict[str, Any] = {}
    block = fastvit.Block(768, 12, qkv_bias=True).to(_DEVICE, torch.bfloat16)
    with launching(lambda *call: calls.update({call[0].__name__: call})):
        for tokens in (197, 1025):
            block(torch.randn(1, tokens, 768, dtype=torch.bfloat16, device=_DEVICE)).sum().backward()
    for name, (kernel, programs, tensors, numbers, constants) in calls.items():
        ways = (
            partial(kernel[(programs,)], *tensors, *numbers, **constants),
            partial(launch, kernel, programs, tensors, numbers, constants),
        )
        rounds = (timeit.repeat(way, torch.cuda.synchronize, number=10, repeat=_LAUNCHES) for way in ways)
        yield name, str(len(kernel.arg_names)), *(f"{1e6 * min(seconds) / 10:.1f}" for seconds in rounds)


def main() -> int:
    if not torch.cuda.is_available():
        sys.stderr.write(
            "benchmarks.host needs a GPU, or the pretended device: "
            "python tests/pretended_cuda/run.py -m benchmarks.host\n"
        )
        return 1
    torch.set_num_threads(1)
    if is_pretended():  # autograd's thread would wait for another core to wake: 40 us of a virtual machine
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with terminal.progress(3, "measuring") as step:
        step("first calls")
        every = [*rows(), *rows_of_replays()]
        step("ops, a block and models")
        measured = measure(every)
        step("launches")
        by_launch = [*launches()]
    columns = "us of the host", "", "eager", "SDPA", "fastvit", "fastvit\n/ eager", "fastvit\n/ SDPA"
    width = terminal_width()
    print(*make(columns, map(cells, every, measured), left=2, width=width), "", sep="\n")
    print(*make(("us of a launch", "arguments", "Triton's way", "fastvit's"), by_launch, width=width), "", sep="\n")
    print(f"torch {torch.__version__}, triton {triton.__version__}, commit {commit()[:10]}")
    print(f"{torch.cuda.get_device_name()}, {cpu_name()}, one core, bfloat16")
    if is_pretended():
        print("The device is pretended: launches do nothing, and cuBLAS chooses no algorithm")
    return 0


if __name__ == "__main__":
    sys.exit(terminal.guarded(main, name="benchmarks.host"))
