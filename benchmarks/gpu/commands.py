"""The commands of a run on a GPU, the most important first, each with its limit in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import check, compiled, sanitize
from benchmarks.gpu.runner import Command
from benchmarks.gpu.summary import MODES, row_name
from benchmarks.gpu.tune import TABLES
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.workloads import workloads

FIRST = 540.0  # seconds of the first minutes
REHEARSED = 600.0  # seconds, the limit of every command of a rehearsal
_OTHERS = ("layer_norm", "add_layer_norm", "layer_norm_mlp", "layer_norm_attention", "patch_embed")
ROWS = (("attention",), ("block",), ("model",), _OTHERS)  # ops of a command
# Tests that need no GPU
_WITHOUT_GPU = ("benchmarks/", "kernels/test_targets", "kernels/test_traffic", "kernels/test_tuned")
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


def first(folder: Path) -> list[Command]:
    """Return what shows in the first minutes whether all is right, and how fast it is. On an H200 with 16 cores 889
    kernels were compiled in 80 s. folder: of the results."""
    out = ("--out", str(folder))
    words = ("-m", "benchmarks.gpu.precompile")
    commands = [Command("compile kernels", words, 120.0, prepares=("check", "rows", "sanitize"))]
    commands += [
        Command(f"check {subject}", ("-m", "benchmarks.gpu.check", *out, subject), 120.0)
        for subject in (*check.OPS, check.MODEL)
    ]
    commands += [_rows(ops, folder, 150.0, "--bench-seconds", "0.8") for ops in ROWS]
    return [*commands, _sanitize("memcheck", "attention", 150.0)]


def rest(folder: Path) -> list[Command]:
    """Return everything else that needs a GPU, in the order of worth."""
    commands = [_compiled(model, provider, folder, 900.0) for model, provider in compiled.runs(False)]
    for table in dict.fromkeys(table.name for table in TABLES):
        commands.append(Command(f"tune {table}", ("-m", "benchmarks.gpu.tune", "--table", table)))
    for path in test_files():
        name = path.relative_to(ROOT / "tests").with_suffix("").as_posix()
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
    out, name = ("--out", str(folder), "--rehearse"), "attention_fwd"
    table = ("-m", "benchmarks.gpu.tune", "--rehearse", "--table", name, "--out", str(folder / "tuned"))
    page = ("-m", "benchmarks.report.results", str(folder), "--to", str(folder / "README.md"))
    result = ("--benchmark-json", str(folder / "layer_norm.json"))
    commands = [
        Command("compile kernels", ("-m", "benchmarks.gpu.precompile", "--rehearse"), prepares=("check", "rows")),
        *(Command(f"check {op}", ("-m", "benchmarks.gpu.check", *out, op)) for op in ("layer_norm", "dropout")),
        Command("sanitize dropout", ("-m", "benchmarks.gpu.sanitize", "--rehearse", "--op", "dropout")),
        _rows(("block",), folder, REHEARSED, "--quick"),
        _compiled(*compiled.runs(True)[0], folder, REHEARSED, rehearse=True),
        Command(f"tune {name}", table),
        Command("tests runtime/test_library", (*_PYTEST, "tests/runtime/test_library.py")),
        Command("bench layer_norm", (*_PYTEST, *_selected("layer_norm"), "--quick", *result)),
        Command("page", page),
    ]
    return [replace(command, limit=REHEARSED) for command in commands]


def test_files() -> list[Path]:
    """Return the files of tests that are worth a GPU's time."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in paths if not path.relative_to(ROOT / "tests").as_posix().startswith(_WITHOUT_GPU)]


def _selected(*ops: str) -> tuple[str, ...]:
    selection = " or ".join(f"[{op.replace(', ', '-').replace(' ', '-')}-" for op in ops)
    return "benchmarks", "-k", selection, "--benchmark-only"


def _rows(ops: tuple[str, ...], folder: Path, limit: float, *options: str) -> Command:
    plugin = ("-p", "benchmarks.gpu.rows", "--journal", str(folder), "--providers", "eager,flash,cudnn,fastvit,graphs")
    uses = "quick" if "--quick" in options else "headline"
    results = tuple(row_name(workload, mode) for workload in workloads(uses, ops=ops) for mode in MODES)
    name = ops[0] if len(ops) == 1 else "others"
    return Command(f"rows {name}", (*_PYTEST, *plugin, *_selected(*ops), *options), limit, results)


def _compiled(model: str, provider: str, folder: Path, limit: float, rehearse: bool = False) -> Command:
    words = ("-m", "benchmarks.gpu.compiled", "--out", str(folder), *["--rehearse"] * rehearse)
    results = tuple(compiled.results(model, provider, rehearse))
    return Command(f"compiled {model} {provider}", (*words, "--model", model, "--provider", provider), limit, results)


def _sanitize(tool: str, op: str, limit: float) -> Command:
    return Command(f"sanitize {tool} {op}", ("-m", "benchmarks.gpu.sanitize", "--tool", tool, "--op", op), limit)
