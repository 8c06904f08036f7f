"""Measures one case in one mode: agreement, then memory, then interleaved time; the result is a Record."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.agreement import agreement
from benchmarks.harness.draw import Draw
from benchmarks.harness.graphs import capture_all
from benchmarks.harness.providers import COMPILED, OPS
from benchmarks.harness.record import Provider, Record, environment
from benchmarks.harness.schedule import Schedule
from benchmarks.harness.sdpa_backend import SdpaBackend
from benchmarks.harness.timing import (
    HOST_BOUND,
    Ceilings,
    Clock,
    Quantiles,
    measure_ceilings,
    measured,
    per_call,
    plan_rounds,
    warm,
)
from benchmarks.harness.workloads import Workload
from fastvit.study._peak import peak_bytes, saved_bytes

Measure = Callable[[Workload, str], Record]  # the fixture that every benchmark is one call of


def bench_op(measure: Measure, workload: Workload, mode: str) -> None:
    """What every bench_*.py runs."""
    measure(workload, mode)


@dataclass
class Session:
    """The choices of a run, and what it has measured so far."""

    device: torch.device
    dtype: torch.dtype
    grid: tuple[str, ...]  # uses of workloads
    providers: tuple[str, ...]
    clock: Clock
    schedule: Schedule
    records: list[Record] = field(default_factory=list)
    costs: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        return measure_ceilings(self.clock, self.dtype)

    def cost(self, workload: Workload, mode: str) -> tuple[int, int]:
        key = workload.id, mode
        if key not in self.costs:
            self.costs[key] = cost(workload, mode, self.dtype)
        return self.costs[key]

    def work(self, workload: Workload, mode: str) -> float:
        """Seconds of one step of eager at the machine's limits."""
        return self.ceilings.least_seconds(*self.cost(workload, mode))


def cost(workload: Workload, mode: str, dtype: torch.dtype) -> tuple[int, int]:
    """FLOPs that eager needs, and the bytes that must move: both from shapes alone, on the meta device."""
    draw = Draw(dtype, "meta")
    runner = workload.runner("eager", draw)
    with FlopCounterMode(display=False) as counter:
        outputs = runner.outputs()
        if mode == "training":
            torch.autograd.backward(outputs, draw.cotangents(outputs))  # the counter's hooks refuse grad()
    into, out, leaves = (
        sum(t.nbytes for t in tensors) for tensors in ((*runner.inputs, *runner.parameters), outputs, runner.leaves)
    )
    # backward reads inputs and parameters again and the outputs' gradients, and writes the leaves'
    moved = into + out if mode == "inference" else 2 * into + 2 * out + leaves
    return counter.get_total_flops(), moved


def measure(benchmark: BenchmarkFixture, session: Session, workload: Workload, mode: str) -> Record:
    """Fills `benchmark` with fused's samples (or the last provider's, if fused was not asked for), records everybody's.

    Raises AssertionError before any timing if fused is less accurate than the rule allows.
    """
    names = [name for name in session.providers if name in workload.providers]
    flops, moved = session.cost(workload, mode)
    record = Record(
        workload.op, str(workload), mode, workload.sizes, workload.check, flops, moved, note=OPS[workload.op].note
    )
    ratios = agreement(workload, mode, names, session.dtype, session.device)

    steps: dict[str, Callable[[], object]] = {}
    seconds: dict[str, float] = {}
    for name in names:
        provider = record.providers[name] = Provider(error_ratio=ratios[name])
        try:
            steps[name], runner = workload.step(name, mode, Draw(session.dtype, session.device))
            if name in COMPILED:
                steps[name]()  # compiles: no estimate of a round
            seconds[name] = warm(steps[name], session.clock)
            provider.peak_bytes = peak_bytes(steps[name], session.device)
            if mode == "training":
                provider.saved_bytes = saved_bytes(runner.outputs, runner.parameters)
            if name == "sdpa":
                with SdpaBackend() as backend:
                    workload.runner(name, Draw(session.dtype, session.device), check=True).outputs()
                record.sdpa_backend = backend.name
        except torch.OutOfMemoryError as error:
            if name == "fused":
                raise
            steps.pop(name, None)
            provider.skipped = f"does not fit: {str(error).splitlines()[0]}"

    if workload.max_rounds == 1:  # no study of time; one round is the least that pytest-benchmark wants
        steps = dict([*steps.items()][-1:])
    elif session.device.type == "cuda":
        for name, step in steps.items():
            record.providers[name].called = Quantiles.of(per_call(step, session.device))
        for name, replay in capture_all(steps).items():
            if isinstance(replay, str):
                record.providers[name].remark = f"no graph: {replay}; "
            else:
                steps[name] = replay
    samples = interleave(
        benchmark, session.clock, steps, seconds, budget=session.schedule.budget(), most=workload.max_rounds
    )
    for name, values in samples.items():
        if good := measured(values):
            record.providers[name].time = Quantiles.of(good)
        else:
            record.providers[name].remark += HOST_BOUND
    where = environment(session.device, session.dtype)
    benchmark.group = f"{workload.op}, {mode}"
    benchmark.extra_info.update(record.as_dict(where, session.ceilings))
    session.records.append(record)
    return record


def interleave(
    benchmark: BenchmarkFixture,
    clock: Clock,
    steps: dict[str, Callable[[], object]],
    seconds: dict[str, float],
    *,
    budget: float,
    most: int,
) -> dict[str, list[float]]:
    """Rounds of every provider in turn, A B C A B C, as many as the budget of seconds allows; the last provider is
    pytest-benchmark's, which owns the loop. seconds: an estimate for each; the result: every sample of each."""
    *others, subject = steps
    samples: dict[str, list[float]] = {name: [] for name in steps}

    def the_others() -> None:
        for name in others:
            samples[name].append(clock.time(steps[name]))
        clock.prepare()

    rounds = plan_rounds(sum(seconds[name] for name in steps), budget, most=most)
    gc.collect()
    gc.disable()  # for all alike
    try:
        benchmark.pedantic(steps[subject], setup=the_others, rounds=rounds)
    finally:
        gc.enable()
    if benchmark.stats is None:  # --benchmark-disable: one run, not timed by the plugin
        samples[subject].append(clock.time(steps[subject]))
    else:
        samples[subject].extend(benchmark.stats.stats.data)
    return samples
