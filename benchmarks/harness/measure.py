"""Measure one case in one mode: agreement by the rule of `fastvit.study.accuracy.rule`, then memory, then time in
interleaved rounds. The result is a Record."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from benchmarks.harness.clock import HOST_BOUND, Clock, Quantiles
from benchmarks.harness.conditions import Conditions
from benchmarks.harness.draw import Draw
from benchmarks.harness.graphs import capture_all
from benchmarks.harness.providers import FIRST_CALLS, OPS
from benchmarks.harness.record import Provider, Record, environment
from benchmarks.harness.sdpa_backend import BY_NAME, SdpaBackend, kernel_of, with_kernel
from benchmarks.harness.timing import (
    Ceilings,
    interleave,
    measure_ceilings,
    measured,
    paired_interval,
    per_call,
    plan_rounds,
    warm,
)
from benchmarks.harness.workloads import Workload
from fastvit.study.accuracy import rule
from fastvit.study.accuracy.rule import DRAWS, GRADIENT, OUTPUT, Compared, pooled_ratios
from fastvit.study.memory.peak import peak_bytes, saved_bytes

Step = Callable[[], object]
Measure = Callable[[Workload, str], Record]  # the fixture that benchmarks call
ROUNDS = 7  # at least: the range of seven ratios holds the median with 98 % probability, that of five with 94 %


class Replay:
    """A timer that gives pytest-benchmark the samples that were measured already."""

    def __init__(self) -> None:
        self._times: Iterator[float] = iter(())

    def __call__(self) -> float:
        return next(self._times)

    def play(self, benchmark: BenchmarkFixture, samples: Sequence[float]) -> None:
        self._times = itertools.chain(*((0.0, seconds) for seconds in samples))
        benchmark.pedantic(lambda: None, rounds=len(samples))


@dataclass
class Session:
    """The settings of a run, and what it has measured so far."""

    device: torch.device
    dtype: torch.dtype
    grid: str  # a use of workloads
    providers: tuple[str, ...]
    clock: Clock
    replay: Replay
    seconds: float  # of timed rounds, for each case
    records: list[Record] = field(default_factory=list)

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        return self._limits()

    @functools.cached_property
    def conditions(self) -> Conditions:
        """The conditions of the run, to be read at its end: the limits are measured again."""
        return Conditions(self.ceilings, self._limits())

    def _limits(self) -> Ceilings:
        return measure_ceilings(self.clock, self.dtype, quick=self.grid == "quick")


def measure(benchmark: BenchmarkFixture, session: Session, workload: Workload, mode: str) -> Record:
    """Fill `benchmark` with fastvit's samples, or the last provider's without fastvit, and record all providers'.

    Raises:
        AssertionError: before any timing, if fastvit is less accurate than the rule allows.
    """
    gc.collect()
    gc.freeze()  # what is there now, thousands of modules' objects, makes no later collection slow
    names = [name for name in session.providers if name in workload.providers]
    cost = workload.cost(mode, session.dtype)
    ceilings = session.ceilings  # measured before the first case
    record = Record(workload.op, str(workload), mode, workload.sizes, workload.check, *cost, note=OPS[workload.op].note)
    compared = [name for name in names if name not in BY_NAME]
    ratios = agreement(workload, mode, compared, session.dtype, session.device)
    record.providers = {name: Provider(error_ratio=ratios.get(name)) for name in names}
    steps: dict[str, Step] = {}
    seconds: dict[str, float] = {}
    for name, provider in record.providers.items():
        try:
            with kernel_of(name):
                step, seconds[name] = _first_calls(session, workload, name, record)
            if not provider.remark:
                steps[name] = step
        except RuntimeError as error:
            too_large = isinstance(error, torch.OutOfMemoryError)
            if name == "fastvit" or not (too_large or name in BY_NAME):
                raise
            provider.skipped = f"{'does not fit' if too_large else 'does not run'}: {str(error).splitlines()[0]}"
    if workload.max_rounds == 1:  # time is not studied; pytest-benchmark wants at least one round
        steps = dict([*steps.items()][-1:])
    elif session.device.type == "cuda":
        _time_calls(steps, session.device, record)
        steps.pop("graphs", None)  # the GPU's time is fastvit's
        steps = {name: with_kernel(name, step) for name, step in steps.items()}
        replays, remarks = capture_all(steps)
        steps |= replays
        for name, remark in remarks.items():
            record.providers[name].remark = remark
    rounds = plan_rounds(sum(seconds[name] for name in steps), session.seconds, least=ROUNDS, most=workload.max_rounds)
    samples = interleave(session.clock, steps, 1 if benchmark.disabled else rounds)
    session.replay.play(benchmark, samples[[*steps][-1]])
    for name, values in samples.items():
        if good := measured(values):
            record.providers[name].time = Quantiles.of(good)
            record.providers[name].over_fastvit = _over_fastvit(samples, name)
        else:
            record.providers[name].remark += HOST_BOUND
    benchmark.group = f"{workload.op}, {mode}"
    benchmark.extra_info.update(record.as_dict(environment(session.device, session.dtype), ceilings))
    session.records.append(record)
    return record


def agreement(
    workload: Workload, mode: str, providers: Sequence[str], dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Return each provider's error ratio over all outputs or all gradients of one draw. Where fastvit misses the rule
    on that draw, with graphs or without, its ratio is that of several draws together.

    Raises:
        AssertionError: fastvit misses the rule on several draws, too.
    """
    kind, factor = ("output", OUTPUT) if mode == "inference" else ("d", GRADIENT)

    def run(provider: str, number: int, compute: torch.dtype | None = None) -> tuple[Tensor, ...]:
        draw = Draw(dtype, device, compute, number)
        runner = workload.runner(provider, draw, check=True).train(False)  # providers draw different masks for dropout
        gradients: tuple[Tensor, ...] = ()
        for _ in range(FIRST_CALLS.get(provider, 1)):  # the last call of "graphs" is a replay
            if mode == "inference":
                result = runner.infer()
            else:
                outputs = runner.outputs()
                gradients = gradients or draw.cotangents(outputs)
                result = torch.autograd.grad(outputs, runner.leaves, gradients)
        return result

    measures = functools.cache(lambda number: (run("eager", number), run("eager", number, torch.float64)))

    def compared(provider: str, number: int) -> Iterator[Compared]:
        eager, exact = measures(number)
        return rule.compared(kind, eager if provider == "eager" else run(provider, number), eager, exact)

    ratios = {}
    for provider in providers:
        own = provider in ("fastvit", "graphs")
        draws = DRAWS if own else 1
        ratios[provider] = ratio = max(pooled_ratios(functools.partial(compared, provider), draws).values())
        assert not own or ratio <= factor, (
            f"{workload.op} {workload}, {mode}: {provider} is not timed, its error ratio {ratio:.2f} is over {factor}: "
            "error / (error of eager + ulp), against float64"
        )
    return ratios


def _first_calls(session: Session, workload: Workload, name: str, record: Record) -> tuple[Step, float]:
    """Warm a provider up and record its memory, and the kernel of SDPA. Returns its step, and about the seconds that
    one takes. For "graphs" only the remark is recorded, if there are none: what graphs hold is no part of a step."""
    provider = record.providers[name]
    step, runner = workload.step(name, record.mode, Draw(session.dtype, session.device))
    for _ in range(FIRST_CALLS.get(name, 0)):
        step()  # no estimate of a round
    seconds = warm(step, session.clock)
    if (report := runner.report) is not None:
        if report.reasons or not report.graphs:
            provider.remark = f"not timed, it runs as without graphs: {'; '.join(report.reasons)}"
        return step, seconds
    provider.peak_bytes = peak_bytes(step, session.device)
    if record.mode == "training":
        provider.saved_bytes = saved_bytes(runner.outputs, runner.parameters)
    if name == "sdpa":
        with SdpaBackend() as backend:
            workload.runner(name, Draw(session.dtype, session.device), check=True).outputs()
        record.sdpa_backend = backend.name
    return step, seconds


def _time_calls(steps: Mapping[str, Step], device: torch.device, record: Record) -> None:
    called = per_call(steps, device, seconds=0.05, rounds=ROUNDS, within=kernel_of)  # entered once a loop
    for name, values in called.items():
        record.providers[name].called = Quantiles.of(values)
        record.providers[name].called_over_fastvit = _over_fastvit(called, name)


def _over_fastvit(samples: Mapping[str, Sequence[float]], name: str) -> tuple[float, float] | None:
    return paired_interval(samples[name], samples["fastvit"]) if name != "fastvit" and "fastvit" in samples else None
