"""Measure the host's time until a call is queued: eager PyTorch, SDPA and fastvit, at batch 1.

    python -m benchmarks.host

Without a GPU, PyTorch's kernels only allocate their results (stand_ins.cpp, compiled once into ~/.cache/fastvit), and
Triton's driver launches nothing (benchmarks/codegen/stub_driver.py). What is left is the work of Python and PyTorch. A
GPU adds to every kernel, whoever launches it, CUDA's own 2 us, and to PyTorch's matmuls the choice of an algorithm.
Noise only ever adds, so the lowest rounds count.
"""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
import triton

import fastvit
from benchmarks.codegen.stub_driver import stub_gpu
from benchmarks.harness.columns import make
from benchmarks.harness.draw import Draw
from benchmarks.harness.provenance import commit
from benchmarks.harness.timing import Steps, orders
from benchmarks.harness.workloads import Workload
from benchmarks.host.stand_ins import real_work, stand_ins
from fastvit.graphed import forward, recorder
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
_PASSES, _ROUNDS, _LOWEST = 4, 50, 10


class Row(NamedTuple):
    """Steps by provider, and how many calls make a round."""

    what: str
    mode: str
    steps: Steps
    calls: int


def rows(device: torch.device) -> Iterator[Row]:
    """Yield the ops and the block as a program calls them. On a GPU also a model; its convolution has no stand-in."""
    for workload in (*OPS, BLOCK, *([MODEL] if device.type == "cuda" else [])):
        for title, (mode, dtype) in (MODES | AUTOCAST if workload is BLOCK else MODES).items():
            names = [name for name in PROVIDERS if name in workload.providers]
            steps = {name: workload.step(name, mode, Draw(dtype, device))[0] for name in names}
            if dtype is torch.float32:
                steps = {name: torch.autocast(device.type, torch.bfloat16)(step) for name, step in steps.items()}
            yield Row(f"{workload.op} {workload}", title, steps, _CALLS.get(workload.op, 20))


def rows_of_replays(device: torch.device) -> Iterator[Row]:
    """Yield ViT-B/16 after `fastvit.graphs`. Without a GPU nothing is captured, and a replay does nothing."""
    model = fastvit.create_model("vit_base_patch16_224", device="meta").to_empty(device=device).bfloat16()
    images = torch.zeros(1, 3, 224, 224, dtype=torch.bfloat16, device=device)
    gradient, parameters = torch.zeros(1, 1000, dtype=torch.bfloat16, device=device), [*model.parameters()]

    def train() -> None:
        model(images).backward(gradient)
        for p in parameters:
            p.grad = None

    if device.type == "cpu":
        recorder.Recorder = _NoRecorder  # type: ignore[misc]
        forward.changes = lambda *_: set()  # stand-ins compute nothing: sums of unchanged tensors differ
    fastvit.graphs(model)
    for step, title in ((torch.no_grad()(partial(model, images)), "forward"), (train, "both passes")):
        for _ in range(3):
            step()
        yield Row("fastvit.graphs(ViT-B/16) B1", title, {"fastvit": step}, 5)


class _NoRecorder(recorder.Recorder):
    """Runs what it would capture, and replays nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    check = staticmethod(lambda tensors: None)
    host_state = staticmethod(lambda: None)
    watch = staticmethod(lambda function: (function(), "", False))

    def record(self, function: Any) -> Any:
        return function(lambda: None), [lambda: None]

    def begin_replay(self) -> None: ...

    def bytes(self) -> int:
        return 0

    def random_state(self) -> torch.Tensor:
        return torch.empty(0)


def measure(every: Sequence[Row], device: torch.device) -> list[dict[str, float]]:
    """Return for each row, by provider, the microseconds of the host for one call: the mean of the lowest rounds.

    The clock stops when the last call of a round is queued, whatever the GPU still has to do. Providers take turns in
    random order. A row's rounds are spread over several passes, because a shared machine is slow for seconds.
    """
    samples: list[dict[str, list[float]]] = [{name: [] for name in row.steps} for row in every]
    for row, microseconds in [*zip(every, samples, strict=True)] * _PASSES:
        for name in (name for names in orders(row.steps, _ROUNDS) for name in names):
            step = row.steps[name]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(row.calls):
                step()
            microseconds[name].append(1e6 * (time.perf_counter() - start) / row.calls)
    return [{name: fmean(sorted(each)[:_LOWEST]) for name, each in of_row.items()} for of_row in samples]


def cells(row: Row, measured: dict[str, float]) -> tuple[str, ...]:
    each = (f"{measured[name]:,.1f}" if name in measured else "-" for name in PROVIDERS)
    ratios = (f"{measured['fastvit'] / measured[name]:.2f}" if name in measured else "-" for name in PROVIDERS[:2])
    return row.what, row.mode, *each, *ratios


def launches(rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield for every kernel of a block's training step, at a short and at a long sequence, its arguments and the
    microseconds of one launch by Triton and by fastvit. Within `stub_gpu`."""
    calls: dict[str, Any] = {}
    block = fastvit.Block(768, 12, qkv_bias=True).to(torch.bfloat16)
    with launching(lambda *call: calls.update({call[0].__name__: call})):
        for tokens in (197, 1025):
            block(torch.randn(1, tokens, 768, dtype=torch.bfloat16)).sum().backward()
    for name, (kernel, programs, tensors, numbers, constants) in calls.items():
        ways = (
            partial(kernel[(programs,)], *tensors, *numbers, **constants),
            partial(launch, kernel, programs, tensors, numbers, constants),
        )
        seconds = (min(timeit.repeat(way, number=10, repeat=rounds)) / 10 for way in ways)
        yield name, str(len(kernel.arg_names)), *(f"{1e6 * least:.1f}" for least in seconds)


def table(device: torch.device) -> list[str]:
    """Measure all rows.

    Raises:
        RuntimeError: without a GPU, if a function of PyTorch in them still computes.
    """
    every = [*rows(device), *rows_of_replays(device)]
    if device.type == "cpu" and (real := real_work(step for row in every for step in row.steps.values())):
        raise RuntimeError(f"no stand-in for {', '.join(sorted(real))}: add it to stand_ins.cpp")
    columns = "us of the host", "", "eager", "SDPA", "fastvit", "fastvit\n/ eager", "fastvit\n/ SDPA"
    return make(columns, map(cells, every, measure(every, device)), left=2)


def main() -> int:
    versions = f"torch {torch.__version__}, triton {triton.__version__}, commit {commit()[:10]}"
    where = f"{cpu_name()}, one thread, bfloat16, {versions}"
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        print(*table(torch.device("cuda")), f"\n{torch.cuda.get_device_name()}, {where}", sep="\n")
        return 0
    with stub_gpu(records=False):
        with stand_ins():
            print(*table(torch.device("cpu")), "", sep="\n")
        columns = "us of a launch", "arguments", "Triton's way", "fastvit's"
        print(*make(columns, launches(1000)), f"\n{where}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
