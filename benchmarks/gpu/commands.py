"""The commands of a run on a GPU, the most important first, each with its limit in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import compiled, sanitize
from benchmarks.gpu.runner import Command
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.workloads import workloads
from fastvit.study.accuracy.verification import OPS

FIRST = 540.0  # seconds of the first minutes
_REHEARSED = 600.0  # seconds, the limit of every command of a rehearsal
_APART = ("attention", "block", "model")  # ops whose rows are a command each
# Tests that need no GPU
_WITHOUT_GPU = ("benchmarks/", "kernels/test_targets", "kernels/test_traffic", "pretended_cuda/")
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


def first(folder: Path) -> list[Command]:
    """Return what shows in the first minutes whether all is right, and how fast it is. On an H200 with 16 cores 889
    kernels were compiled in 80 s. folder: of the results."""
    others = {workload.op for workload in workloads("headline")} - {*_APART}
    commands = [Command("compile kernels", ("-m", "benchmarks.gpu.precompile"), 120.0, always=True)]
    commands += [_check(op, 120.0, "--ops", op) for op in OPS]
    model = compiled.MODELS[0]
    commands.append(_check(model, 120.0, model, "--ops", "layer_norm", "--depth", "2"))
    for name, ops in [*((op, (op,)) for op in _APART), ("others", tuple(sorted(others)))]:
        commands.append(_rows(name, ops, folder, 150.0))
    return [*commands, _sanitize("memcheck", "attention", 150.0)]


def rest(folder: Path) -> list[Command]:
    """Return everything else that needs a GPU, in the order of worth."""
    commands = [_compiled(model, provider, folder, 900.0) for model, provider in compiled.RUNS]
    for name in test_files():
        commands.append(Command(f"tests {name}", (*_PYTEST, f"tests/{name}.py"), 1800.0))
    commands += [_sanitize(tool, op, 900.0) for tool in ("memcheck", "racecheck") for op in sanitize.ops()]
    commands.append(_sanitize("memcheck", sanitize.GRAPHS, 900.0))
    for op in dict.fromkeys(workload.op for workload in workloads("gpu")):
        result = ("--benchmark-json", str(folder / f"{op.replace(', ', '_').replace(' ', '_')}.json"))
        commands.append(Command(f"bench {op}", (*_PYTEST, *_selected(op), *result), 7200.0))
    commands.append(Command("page", ("-m", "benchmarks.report.results"), 60.0))
    before = {command.name for command in first(folder)}
    return [command for command in commands if command.name not in before]


def rehearsal(folder: Path) -> list[Command]:
    """Return a command of every kind, small enough for a CPU."""
    page = ("-m", "benchmarks.report.results", str(folder), "--to", str(folder / "README.md"))
    result = ("--benchmark-json", str(folder / "layer_norm.json"))
    commands = [
        Command("compile kernels", ("-m", "benchmarks.gpu.precompile", "--rehearse"), always=True),
        *(_check(op, _REHEARSED, "--ops", op) for op in ("layer_norm", "dropout")),
        Command("sanitize dropout", ("-m", "benchmarks.gpu.sanitize", "--rehearse", "--op", "dropout")),
        _rows("block", ("block",), folder, _REHEARSED, "--quick"),
        _compiled(*compiled.REHEARSED, folder, _REHEARSED, "--rehearse"),
        Command("tests runtime/test_library", (*_PYTEST, "tests/runtime/test_library.py")),
        Command("bench layer_norm", (*_PYTEST, *_selected("layer_norm"), "--quick", *result)),
        Command("page", page),
    ]
    return [replace(command, limit=_REHEARSED) for command in commands]


def test_files() -> list[str]:
    """Return the names of the test files that are worth a GPU's time."""
    tests = ROOT / "tests"
    names = [path.relative_to(tests).with_suffix("").as_posix() for path in sorted(tests.rglob("test_*.py"))]
    return [name for name in names if not name.startswith(_WITHOUT_GPU)]


def _selected(*ops: str) -> tuple[str, ...]:
    selection = " or ".join(f"[{op.replace(', ', '-').replace(' ', '-')}-" for op in ops)
    return "benchmarks", "-k", selection, "--benchmark-only"


def _check(subject: str, limit: float, *words: str) -> Command:
    """Compare an op, or a model, with float64. Each is a process of its own: an illegal access ends no other."""
    return Command(f"check {subject}", ("-m", "fastvit", "verify", *words), limit)


def _rows(name: str, ops: tuple[str, ...], folder: Path, limit: float, *options: str) -> Command:
    words = ("--results", str(folder), "--providers", "eager,flash,cudnn,fastvit,graphs", *options)
    return Command(f"rows {name}", (*_PYTEST, *_selected(*ops), *words), limit)


def _compiled(model: str, provider: str, folder: Path, limit: float, *options: str) -> Command:
    words = ("-m", "benchmarks.gpu.compiled", "--out", str(folder), "--model", model, "--provider", provider, *options)
    return Command(f"compiled {model} {provider}", words, limit)


def _sanitize(tool: str, op: str, limit: float) -> Command:
    return Command(f"sanitize {tool} {op}", ("-m", "benchmarks.gpu.sanitize", "--tool", tool, "--op", op), limit)
