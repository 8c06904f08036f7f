"""Write benchmarks/results/README.md from the result files next to it, and the tables of the main README. The page has
what most readers look for; with folders, it has every table of these.

    pytest benchmarks --benchmark-only --benchmark-json benchmarks/results/cpu/float32.json
    python -m benchmarks.report.results
    python -m benchmarks.report.results benchmarks/results/cpu --to out/results.md

In each folder: `results.jsonl` of benchmarks/gpu; files of the benchmarks (all of one dtype are one table, with the
best limits that any measured); graphs.json and training.json; and pictures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu import results_file, summary
from benchmarks.harness import columns, conditions, table
from benchmarks.harness.columns import fenced
from benchmarks.harness.program import parser
from benchmarks.harness.provenance import ROOT
from benchmarks.report import graph_tables, plot
from benchmarks.report.plot import read
from fastvit.cli.terminal import guarded, write

RESULTS = ROOT / "benchmarks" / "results"
GPU = RESULTS / "nvidia_h200" / "results.jsonl"
_INTRODUCTION = f"""\
# Results

`make results` makes this page from the files next to it; [../README.md](../README.md) says how they were measured.
`python -m benchmarks.report.results benchmarks/results/cpu --to out/results.md` makes every table of a folder. On a CPU
the same ops run PyTorch's fused ATen functions: the figures say nothing about the Triton kernels' speed.

{fenced(table.legend())}"""
_ONCE = "programs that are not in this repository; [what they decided](../NOTES.md)"
MADE_BY = {  # patterns of files in this folder, and what makes them
    "cpu/float32.json, cpu/bfloat16.json": '`make bench ARGS="--dtype TYPE --benchmark-json FILE"`',
    "cpu/graphs.json": "`python -m benchmarks.coverage.graph_models FILE`",
    "cpu/host.txt": "`python tests/pretended_cuda/run.py -m benchmarks.host`",
    "cpu/training.json, cpu/training*.svg": "`make training`",
    "cpu/memory_*.svg, memory_*.svg, block_*.svg, speed_*.svg, README.md": "`make results`",
    "attention_dinov2.png": "`fastvit attention`; the README has the command",
    "nvidia_h200/results.jsonl, nvidia_h200/table.md": "`make gpu`",
    "nvidia_h200/first_minutes.md": "`make gpu-first` on 28 November, its table.md",
    "nvidia_h200/host.txt": "`python -m benchmarks.host`",
    "nvidia_h200/memory.md": "`fastvit memory MODEL --measured --device cuda`",
    "nvidia_h200/attention_*, nvidia_h200/matmul*.txt, nvidia_h200/fitting.json": _ONCE,
    "nvidia_h200/tuned_*.json": _ONCE,
}


def render(paths: Sequence[Path], every: bool = True) -> str:
    """Return the section of one run, with a part for each op, or else the most important case of each."""
    records, ceilings, where = read(paths)
    tables = table.render(records, ceilings) if every else table.most_important(records, ceilings)
    return "\n".join([fenced(where), *(f"### {title}\n\n{fenced(lines)}" for title, lines in tables)])


def training(path: Path) -> list[str]:
    """Return the table of training runs of `train.py compare --json`, and what is below it."""
    runs = json.loads(path.read_text())
    return [*columns.make(runs["heads"], runs["rows"], left=2), "", *columns.wrapped(runs["notes"], indent=0)]


_TABLES = {  # by the name of the file
    "graphs": graph_tables.render,
    "training": training,
}


def page(folders: Sequence[Path] = ()) -> str:
    """Return the page, or all tables of the folders."""
    parts = [_INTRODUCTION]
    for folder in folders or sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        own = [*_folder(folder, every=bool(folders))]
        if folders and not own:
            raise ValueError(f"no results in {folder}: pytest benchmarks --benchmark-json {folder}/float32.json")
        parts += own
    if not folders:
        rows = [f"| {', '.join(f'`{file}`' for file in files.split(', '))} | {by} |" for files, by in MADE_BY.items()]
        parts += ["## Where each file comes from\n", "| files | made by |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def _folder(folder: Path, every: bool) -> Iterator[str]:
    if records := results_file.last(results_file.read(folder / "results.jsonl")):
        others = sorted({path.name for path in folder.iterdir() if path.suffix in (".md", ".txt")} - {"README.md"})
        links = ", ".join(f"[{name}]({folder.name}/{name})" for name in others)
        yield f"## {folder.name}, first minutes\n\n{fenced(summary.verdict(records))}\nAll of it: {links}.\n"
    runs: dict[str, list[Path]] = {}  # by dtype
    for path in sorted(folder.glob("*.json")):
        text = path.read_text()  # "" of a run that was cut off
        if benchmarks := text and json.loads(text).get("benchmarks"):
            runs.setdefault(benchmarks[0]["extra_info"]["environment"]["dtype"], []).append(path)
    picture = [plot.picture(folder.name)] * (folder / plot.FILES["light"]).exists()  # memory, of the first dtype
    for dtype, paths in sorted(runs.items(), key=lambda run: run[0] != "float32"):
        yield f"## {folder.name}, {dtype}\n"
        yield from picture
        yield render(paths, every)
        picture = []
    for name, lines in _TABLES.items():
        path = folder / f"{name}.json"
        if path.exists():
            yield f"## {folder.name}, {name}\n\n{fenced(lines(path))}"
            if name == "training":
                files = {"light": "training.svg", "dark": "training_dark.svg"}  # of `train.py compare --plot`
                yield plot.picture(folder.name, files, "Accuracy and loss of a ViT and a ResNet")


# ---- the table of the main README: op, its case in the result file, what is fused, what is saved ----

_OPS = [
    ("patch_embed", ("patch_embed", "B8 px224 patch16 D768"),
     "normalisation, convolution, positions, prefix tokens", "0"),
    ("attention_qkvpacked", ("attention", "B1 N1025 H12 d64"),
     "scores, softmax, values; no N x N tensor", "4: qkv, out"),
    ("layer_norm_attention", ("layer_norm_attention", "B1 N197 D768 H12"),
     "norm, QKV, rotary positions, attention, projection, residual sum", "5: x, qkv, out"),
    ("layer_norm_mlp", ("layer_norm_mlp", "B1 N197 D768"),
     "norm, both linears, activation, residual sum", "5: x, pre-activation"),
    ("Block", ("block", "B1 N1025 D768 H12"), "layer_norm_attention, layer_norm_mlp", "10"),
]  # fmt: skip
_OPS_HEAD = """\
| fastvit on a CPU against | fused | saved | time: eager | SDPA | peak memory: eager | SDPA |
|---|---|---|---|---|---|---|"""


def ops_table() -> str:
    """Return the table of one size of each op, forward and backward, and where it was measured; "-" where the file has
    none."""
    measured, _, (where, versions, *rest) = read([RESULTS / "cpu" / "float32.json"])
    records = {(r.op, r.case): r for r in measured if r.mode == "training"}
    lines = [_OPS_HEAD]
    for name, case, fused, saved in _OPS:
        cells, size = ["-"] * 4, ""
        if record := records.get(case):
            cells = [table.time_ratio(record, rival) for rival in ("eager", "sdpa")]
            cells += [table.ratio(record.memory_ratios().get(rival)) for rival in ("eager", "sdpa")]
            size = f", {record.case}"
        lines.append(f"| {' | '.join([f'`{name}`{size}', fused, saved, *cells])} |")
    marks = [f" **{line}.**" for line in rest if line.startswith(conditions.MARK)]
    device = where.partition(": ")[2]
    return "\n".join([*lines, "", f"Both passes on a CPU: {device}, {versions}.{''.join(marks)}"])


_ON_A_GPU = {"attention": "attention", "block": "Block", "model": "ViT-S/16 and ViT-B/16"}
_GPU_HEAD = """\
| fastvit on an H200 against | forward: SDPA, flash | SDPA, cuDNN | both passes: SDPA, flash | SDPA, cuDNN |
|---|---|---|---|---|"""


def gpu_table() -> str:
    """Return the table of attention, blocks and models on a GPU, by the GPU's time alone: least to most over shapes."""
    rows = [r for r in results_file.last(results_file.read(GPU)) if r["kind"] == "row" and r["status"] == "passed"]
    lines = [_GPU_HEAD]
    for op, name in _ON_A_GPU.items():
        cells, own = [], [r for r in rows if r["op"] == op]
        for mode in summary.PASSES:
            ratios = [summary.ratios(r) for r in own if r["mode"] == mode]
            for rival in ("flash", "cudnn"):
                several = [by_rival[rival] for by_rival in ratios]
                cells.append(f"{min(several):.2f}-{max(several):.2f}x")
        lines.append(f"| {' | '.join([f'{name}, {len(own) // 2} shapes', *cells])} |")
    return "\n".join(lines)


_CALLED_HEAD = """\
| as called, ms | forward: SDPA | fastvit | fastvit.graphs | both passes: SDPA | fastvit | fastvit.graphs |
|---|---|---|---|---|---|---|"""


def called_table() -> str:
    """Return the table of times as called on a GPU, of the models that ran after `fastvit.graphs`, too."""
    cells: dict[str, list[str]] = {}
    for r in results_file.last(results_file.read(GPU)):
        if r["kind"] == "row" and r["status"] == "passed" and "graphs" in r["providers"]:
            called = {name: 1e3 * figures["called"]["median"] for name, figures in r["providers"].items()}
            times = min(called["flash"], called["cudnn"]), called["fastvit"], called["graphs"]
            cells.setdefault(r["case"], []).extend(f"{time:#.3g}" for time in times)
    return "\n".join([_CALLED_HEAD, *(f"| {' | '.join([f'`{case}`', *each])} |" for case, each in cells.items())])


def with_ops(readme: str) -> str:
    """Return the README with the tables between its two marks."""
    before, mark, rest = readme.partition("<!-- ops -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (mark and end):
        raise ValueError("README.md has no lines <!-- ops --> and <!-- end -->")
    return f"{before}{mark}{gpu_table()}\n\n{called_table()}\n\n{ops_table()}\n{end}{after}"


def main(arguments: list[str] | None = None) -> None:
    options = parser("benchmarks.report.results", __doc__)
    options.add_argument("folders", nargs="*", type=Path, help="of result files; default: all in benchmarks/results")
    options.add_argument("--to", type=Path, default=RESULTS / "README.md", help="the page")
    chosen = options.parse_args(arguments)
    chosen.to.parent.mkdir(parents=True, exist_ok=True)
    write(chosen.to, page(chosen.folders))
    if not chosen.folders:
        readme = ROOT / "README.md"
        write(readme, with_ops(readme.read_text()))


if __name__ == "__main__":
    sys.exit(guarded(main, name="benchmarks.report.results"))
