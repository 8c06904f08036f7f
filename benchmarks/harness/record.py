"""The results of one benchmark, as they stand in the table and in `extra_info`, and where they were measured."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from benchmarks.harness.clock import Quantiles
from benchmarks.harness.timing import Ceilings
from fastvit._base.version import version_of
from fastvit.ops.runtime.backend import wants_triton
from fastvit.study.machine import cpu_name


@dataclass
class Provider:
    """One provider's figures; `skipped` says why there are none.

    On a GPU `time` is the GPU's alone, from the replays of a graph where there can be one; `remark` says why there was
    none. `over_fastvit` is the interval of this provider's time over fastvit's, by `timing.paired_interval`, from the
    rounds that they share.
    """

    time: Quantiles | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None  # for backward; training only
    error_ratio: float | None = None
    skipped: str = ""
    remark: str = ""
    called: Quantiles | None = None  # of a call in a steady loop, host and GPU together; on a GPU only
    over_fastvit: tuple[float, float] | None = None
    called_over_fastvit: tuple[float, float] | None = None

    @staticmethod
    def read(data: dict[str, Any]) -> Provider:
        times = {name: Quantiles(**data[name]) for name in ("time", "called") if data.get(name)}
        intervals = {name: tuple(data[name]) for name in ("over_fastvit", "called_over_fastvit") if data.get(name)}
        return Provider(**{**data, **times, **intervals})


@dataclass
class Record:
    op: str
    case: str
    mode: str
    shape: dict[str, Any]
    check: dict[str, Any]  # sizes that differed where agreement with float64 was checked
    flops: int  # what eager needs, nothing recomputed
    moved_bytes: int  # every input, parameter, output and gradient once a pass
    providers: dict[str, Provider] = field(default_factory=dict)
    sdpa_backend: str = ""
    note: str = ""

    def time_ratios(self) -> dict[str, float]:
        """Median time of each provider / that of fastvit."""
        return self._over_fastvit({name: p.time.median for name, p in self.providers.items() if p.time})

    def memory_ratios(self) -> dict[str, float]:
        """Peak of each provider / peak of fastvit."""
        return self._over_fastvit({name: p.peak_bytes for name, p in self.providers.items() if p.peak_bytes})

    @staticmethod
    def _over_fastvit(values: dict[str, float]) -> dict[str, float]:
        own = values.pop("fastvit", None)
        return {name: value / own for name, value in values.items()} if own else {}

    def told_apart(self, name: str) -> bool:
        """Whether the rounds say at 95 % which of the two is faster, and the printed ratio says the same."""
        interval, ratio = self.providers[name].over_fastvit, self.time_ratios()[name]
        return interval is not None and (min(interval[0], ratio) > 1 or max(interval[1], ratio) < 1)

    def share_of_ceiling(self, name: str, ceilings: Ceilings) -> float | None:
        """Return the share of the machine's binding limit that the provider reaches, at most 1.0; None without a
        time."""
        provider = self.providers.get(name)
        least = ceilings.least_seconds(self.flops, self.moved_bytes)
        return least / provider.time.median if provider and provider.time else None

    def as_dict(self, environment: dict[str, Any], ceilings: Ceilings) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        return {**asdict(self), "ceilings": asdict(ceilings), "environment": environment}

    @staticmethod
    def read(data: dict[str, Any]) -> Record:
        """Return the record that `as_dict` has written."""
        known = {f.name: data[f.name] for f in fields(Record)}
        known["providers"] = {name: Provider.read(p) for name, p in known["providers"].items()}
        return Record(**known)


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return device, versions, threads and dtype of a run."""
    gpu = device.type == "cuda"
    path = "CPU path (ATen), no GPU measured"
    if gpu:
        triton = wants_triton(torch.empty(0, device=device))
        path = "Triton kernels" if triton else "ATen on a GPU, no Triton kernel measured"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else cpu_name(),
        "path": path,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": version_of("triton") or "none",
        "fastvit": version_of("fastvit") or "none",
        "python": platform.python_version(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
