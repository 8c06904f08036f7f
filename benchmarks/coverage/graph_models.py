"""Run every vision model of transformers, timm and torchvision through `fastvit.compile` and `fastvit.accelerate`. The
models are small and have random weights.

    python -m benchmarks.coverage.graph_models benchmarks/results/cpu/graphs.json

checks each against eager mode and float64 (coverage/graph_checks.py), and records what is fused in its graphs, what is
left, and what attention `accelerate` leaves. Results are saved after each model, and a second call continues.
`python -m benchmarks.report.results` makes a table of them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastvit
from benchmarks.coverage import small_timm, small_transformers
from benchmarks.coverage.graph_checks import Model, infer
from benchmarks.gpu.results_file import words
from benchmarks.harness.libraries import load, randomize
from benchmarks.harness.program import parser
from benchmarks.harness.provenance import write_text
from benchmarks.harness.record import environment
from fastvit.cli import terminal

LIBRARIES = ("transformers", "timm", "torchvision")
Made = tuple[nn.Module, dict[str, Tensor]]
Sites = dict[str, dict[str, dict[str, int]]]


class Candidate(NamedTuple):
    """A model to check."""

    library: str
    name: str
    family: str = ""

    def __str__(self) -> str:
        return f"{self.library}/{self.name}"

    def makers(self) -> list[Callable[[], Made]]:
        """Return functions that make the model and its inputs; the first that runs is used."""
        if self.library == "transformers":
            kind = getattr(load(self.library), self.name, None) or dict(small_transformers.classes())[self.name]
            return [partial(_of_transformers, kind, narrow) for narrow in (True, False)]
        if self.library == "timm":
            return [lambda: (small_timm.build(self.family, self.name), small_timm.inputs(self.name))]
        return [lambda: small_timm.of_torchvision(self.name)]


def _of_transformers(kind: Any, narrow: bool) -> Made:
    model = small_transformers.build(kind, narrow=narrow)
    return model, small_transformers.inputs(model)


@dataclass
class Accelerated:
    """The result of one model after `fastvit.accelerate`.

    Attributes:
        status: "right", "wrong", "fails", or "" if the model does not run.
        left: number of attention sites that `fastvit.compile` finds in the accelerated model's graphs. None if it finds
            none in the model's own graphs, or is not right there.
    """

    status: str = ""
    detail: str = ""
    share: float = 0.0
    left: int | None = None


@dataclass
class Row:
    """The result of one model, by `fastvit.compile` unless another route is named.

    Attributes:
        status: "right"; "wrong"; "fails" (the compiled model raises); "Dynamo" (it fails or is wrong without fastvit);
            "eager" (it does not run uncompiled); "running" (it ended the process).
        sites: {kind: {"fused": {op: n}, "left": {reason: n}}} in the graphs of inference.
        share: the largest error as a share of the allowed one.
        eager_runs: number of eager runs that determine the allowed error.
    """

    library: str
    name: str
    family: str
    status: str = "running"
    detail: str = ""
    graphs: int = 0
    sites: Sites = field(default_factory=dict)
    share: float = 0.0
    eager_runs: int = 1
    accelerated: Accelerated = field(default_factory=Accelerated)
    seconds: float = 0.0


def candidates(library: str) -> Iterator[Candidate]:
    if library == "transformers":
        models = [(kind.__module__.split(".")[2], name) for name, kind in small_transformers.classes()]
    elif library == "timm":
        models = list(small_timm.names())
    else:
        models = [(name.partition("_")[0], name) for name in small_timm.TORCHVISION]
    return (Candidate(library, name, family) for family, name in models)


def made(candidate: Candidate) -> Made:
    """Return a model with random weights, and its inputs, after one run."""
    errors: list[Exception] = []
    for make in candidate.makers():
        try:
            torch.manual_seed(0)
            model, inputs = make()
            randomize(model)
            infer(model.eval(), inputs)
            return model, inputs
        except Exception as error:
            errors.append(error)
    raise errors[0]


def sites(reports: list[Any]) -> Sites:
    counted: Sites = {}
    for entry in (entry for report in reports for entry in report.entries):
        kind = counted.setdefault(entry.kind, {"fused": {}, "left": {}})["fused" if entry.fused else "left"]
        kind[entry.detail] = kind.get(entry.detail, 0) + 1
    return counted


def run(candidate: Candidate) -> Row:
    """Check a model and return the row, whatever happens."""
    row, start = Row(candidate.library, candidate.name, candidate.family), time.perf_counter()
    try:
        model, inputs = made(candidate)
        subject = Model(model, inputs)
    except Exception as error:
        row.status, row.detail = "eager", _short(error)
    else:
        _check_compiled(subject, row)
        _check_accelerated(subject, row)
        row.eager_runs = len(subject.eager)
    row.seconds = time.perf_counter() - start
    return row


def _check_compiled(subject: Model, row: Row) -> None:
    reports: list[list[Any]] = []

    def compile(model: nn.Module) -> Callable[..., Any]:
        reports.append([])
        return fastvit.compile(model, inner="aot_eager", report=reports[-1].append)

    torch._dynamo.utils.counters.clear()
    _note(row, lambda: subject.check(compile))
    inference = reports[0] if reports else []
    row.graphs = len(inference) or torch._dynamo.utils.counters["stats"]["unique_graphs"]
    row.sites = sites(inference)
    if row.status != "right":
        try:
            subject.check(lambda model: torch.compile(model, backend="aot_eager"))
        except Exception as error:
            row.status, row.detail = "Dynamo", _short(error)


def _check_accelerated(subject: Model, row: Row) -> None:
    def accelerate(model: nn.Module) -> Callable[..., Any]:
        def call(**inputs: Any) -> Any:
            with fastvit.accelerated(model):  # not for longer: other eager runs are of copies of this model
                return model(**inputs)

        return call

    def check() -> float:
        share = subject.check(accelerate)
        if row.status == "right" and "attention" in row.sites:
            reports: list[Any] = []
            torch._dynamo.reset()
            with fastvit.accelerated(subject.model.eval()):
                infer(fastvit.compile(subject.model, inner="eager", report=reports.append), subject.inputs)
            row.accelerated.left = sum(entry.kind == "attention" for report in reports for entry in report.entries)
        return share

    _note(row.accelerated, check)


def _note(result: Row | Accelerated, check: Callable[[], float]) -> None:
    try:
        result.share, result.status = check(), "right"
    except Exception as error:
        result.status, result.detail = "wrong" if isinstance(error, AssertionError) else "fails", _short(error)


def _short(error: Exception) -> str:
    """Return an error's message in one line, and where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{words(error)} ({Path(where.filename).name}:{where.lineno})"


def main(arguments: list[str] | None = None) -> None:
    options = parser("benchmarks.coverage.graph_models", __doc__)
    options.add_argument("path", type=Path, help="result file, new or to continue")
    options.add_argument("--only", help="only models with this in LIBRARY/NAME, also [A-L], even if they have results")
    chosen = options.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)  # it logs every graph break
    terminal.check_folder("path", chosen.path)
    rows: dict[str, Any] = json.loads(chosen.path.read_text())["rows"] if chosen.path.exists() else {}
    found = False
    for library in LIBRARIES:
        if library == "transformers":
            load("transformers").logging.set_verbosity_error()
        for candidate in candidates(library):
            name = str(candidate)
            if not fnmatchcase(name, f"*{chosen.only}*") if chosen.only else name in rows:
                continue
            found = True
            rows[name] = asdict(Row(library, candidate.name, candidate.family))
            save(chosen.path, rows)
            try:
                with terminal.progress(None, name):
                    rows[name] = asdict(run(candidate))
            except KeyboardInterrupt:
                del rows[name]
                save(chosen.path, rows)
                raise KeyboardInterrupt(f"{len(rows)} models are in {chosen.path}; a second call continues") from None
            print(f"{name}: {rows[name]['status']} {rows[name]['detail']}", flush=True)
            save(chosen.path, rows)
    if chosen.only and not found:
        raise ValueError(f"--only: no model has {chosen.only!r} in its name")


def save(path: Path, rows: Mapping[str, Any]) -> None:
    where = environment(torch.device("cpu"), torch.float32)
    where["libraries"] = {name: load(name).__version__ for name in LIBRARIES}
    write_text(path, json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(terminal.guarded(main, name="benchmarks.coverage.graph_models"))
