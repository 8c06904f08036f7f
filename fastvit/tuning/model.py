"""Tunes the launches of a model: times its op calls, and measures their launch tables, the largest share first."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fastvit import _triton
from fastvit.kernels import _tuned
from fastvit.ops.runtime import device as devices
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.study.machine import why_no_gpu
from fastvit.study.sources.model_source import ModelSource
from fastvit.tuning.calls import OpCall, on_meta, record
from fastvit.tuning.candidates import candidates
from fastvit.tuning.launches import Recorder, compile_all, recording
from fastvit.tuning.names import key_in_words
from fastvit.tuning.tuner import Entries, HostBound, Result, Tuner, Work, keys_of, run_candidates, using
from fastvit.vit import VisionTransformer

_CALL_ROUNDS, _STEP_ROUNDS = 3, 9
_META = torch.device("meta")


class Machine(NamedTuple):
    """A GPU, as far as launch choices depend on it.

    Attributes:
        gpu: its name.
        arch: "sm_90" and the like.
        multiprocessors: their number.
        device: torch's.
    """

    gpu: str
    arch: str
    multiprocessors: int
    device: torch.device


REHEARSAL = Machine("interpreter", "sm_90", 4, torch.device("cpu"))


class _TinyViT(ModelSource):
    origin = "fastvit"

    def make(self, provider: str, **options: Any) -> nn.Module:
        return VisionTransformer(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=0)

    def running(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def tiny_model() -> ModelSource:
    """Return the source of a ViT of one block, for rehearsals."""
    return _TinyViT("a tiny ViT", (16, 16), (8, 8))


def gpu_at_hand() -> Machine:
    """Return the current GPU.

    Raises:
        ValueError: no kernel can run on a GPU here, with the reason.
    """
    if why := why_no_gpu():
        raise ValueError(f"no GPU: {why}")
    _triton.check("a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    arch = devices.arch(torch.empty(0, device=device))
    return Machine(properties.name, arch, properties.multi_processor_count, device)


class Skipped(NamedTuple):
    """A call or a choice that was not measured, and the reason.

    Attributes:
        late: True if the time was up.
    """

    label: str
    reason: str
    late: bool = False


class StepTime(NamedTuple):
    """Seconds of a step's fused ops before and after tuning, and the number of its calls that were timed."""

    before: float
    after: float
    calls: int


class ModelTuning:
    """Tunes one model's calls.

    Args:
        calls: as `calls_of` returns them.
        tuner: measures, and writes the table.
        multiprocessors: of the GPU.
    """

    def __init__(self, calls: list[OpCall], tuner: Tuner, multiprocessors: int) -> None:
        self.tuner, self.multiprocessors = tuner, multiprocessors
        self.calls, self.seconds = calls, dict[int, float]()  # by the index of a call
        self._pairs: dict[int, list[float]] = {}  # seconds with shipped and with tuned choices

    def time_calls(self, step: Callable[[str], None] = lambda now: None) -> list[Skipped]:
        """Time every call with the choices in use. Return those that cannot be timed and are not tuned."""
        skipped = []
        for i, call in enumerate(self.calls):
            step(call.name)
            try:
                (self.seconds[i],) = self._timed(call, [self.tuner.entries], _CALL_ROUNDS)
            except (HostBound, KernelUnsupported) as reason:
                skipped.append(Skipped(call.name, str(reason)))
        return skipped

    def _timed(self, call: OpCall, choices: list[Entries], count: int) -> list[float]:
        """Return the median seconds of a call with each set of choices, measured in turn."""
        run = partial(call.run, call.arguments(self.tuner.device))
        for entries in choices:
            with using(entries):
                run()  # compiles
        samples: list[list[float]] = [[] for _ in choices]
        for _ in range(count):
            for entries, found in zip(choices, samples, strict=True):
                with using(entries):
                    found.append(self.tuner.timer(run))
        return [float(np.median(found)) for found in samples]

    def works(self) -> list[Work]:
        """Return the works to measure, each key of a table once.

        A key is measured by the call that takes most of a step among those that look it up. Works come in the order of
        that time, and for one call in the order in which tables build on each other.
        """
        found: dict[tuple[str, tuple[int, ...]], Work] = {}
        share = {i: seconds * sum(self.calls[i].counts.values()) for i, seconds in self.seconds.items()}
        with on_meta(self.tuner.arch, self.multiprocessors):
            for i in sorted(share, key=lambda i: -share[i]):
                for table in _tuned.FIELDS:
                    for key in self._keys(self.calls[i], table):
                        if candidates(table, key) and not self.tuner.has(table, key):
                            work = Work(table, key_in_words(table, key), partial(_build, self.calls[i]))
                            found.setdefault((table, key), work)
        return list(found.values())

    def _keys(self, call: OpCall, table: str) -> list[tuple[int, ...]]:
        """Return the keys of a table that a call looks up. Call it within `on_meta`."""
        try:
            return [key for _, key in keys_of(_build(call, _META), table, self.tuner.entries)]
        except KernelUnsupported:  # with the choices that are fixed for this table
            return []

    def tune(
        self, works: list[Work], until: float = math.inf, step: Callable[[str], None] = lambda now: None
    ) -> Iterator[Result | Skipped]:
        """Measure the works in their order. until: the value of `time.monotonic` at which the rest is skipped."""
        for work in works:
            if time.monotonic() >= until:
                yield Skipped(work.label, "out of time", late=True)
                continue
            step(work.label)
            try:
                yield from self.tuner.tune(work)
            except (HostBound, KernelUnsupported) as reason:
                yield Skipped(work.label, str(reason))

    def step(self, mode: str) -> StepTime:
        """Add up the ops of a step with the shipped choices and with those in use. Only calls whose choices differ are
        timed again."""
        calls = [i for i in self.seconds if self.calls[i].counts[mode]]
        pairs = [(self._pair(i), self.calls[i].counts[mode]) for i in calls]
        before, after = (sum(pair[which] * count for pair, count in pairs) for which in (0, 1))
        return StepTime(before, after, sum(count for _, count in pairs))

    def _pair(self, i: int) -> list[float]:
        """Return the seconds of a call with the shipped choices and with those in use."""
        shipped, tuned = self.tuner.shipped, self.tuner.entries
        if i not in self._pairs:
            self._pairs[i] = [self.seconds[i]] * 2
            with on_meta(self.tuner.arch, self.multiprocessors), using(tuned) as asked:
                _build(self.calls[i], _META)()
            if any(tuned.get((table, key)) != shipped.get((table, key)) for _, table, key in asked):
                with contextlib.suppress(HostBound):
                    self._pairs[i] = self._timed(self.calls[i], [shipped, tuned], _STEP_ROUNDS)
        return self._pairs[i]


def _build(call: OpCall, device: torch.device) -> Callable[[], tuple[torch.Tensor, ...]]:
    return partial(call.run, call.arguments(device))


def compile_calls(calls: list[OpCall], machine: Machine, entries: Entries) -> None:
    """Compile the kernels that the calls launch with these choices, in several processes."""
    recorder = Recorder(machine.arch)
    with using(entries):
        record(calls, recorder, machine.multiprocessors)
    for _ in compile_all(list(recorder.launches.values())):
        pass  # errors show when the kernel is launched


def compile_candidates(machine: Machine) -> Callable[[Work, Entries], None]:
    """Return a function for `Tuner.prepare` that compiles all candidates of a work in several processes."""

    def prepare(work: Work, entries: Entries) -> None:
        recorder = Recorder(machine.arch)
        with recording(recorder, machine.multiprocessors):
            run_candidates(work, entries)
        for _ in compile_all(list(recorder.launches.values())):
            pass  # the tuner reports what does not compile

    return prepare
