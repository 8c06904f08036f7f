"""Write benchmarks/results/README.md from the result files next to it, the tables of the main README, and `table.md` of
each GPU.

    pytest benchmarks --benchmark-only --benchmark-json benchmarks/results/cpu/float32.json
    python -m benchmarks.report.results

In each folder: `results.jsonl` of benchmarks/gpu; files of the benchmarks (all of one dtype are one table, with the
best limits that any measured),
`families.json` of harness/families.py, `host.json` of benchmarks/host, `graphs.json` of
graph_models.py, `peers.json` of benchmarks/peers, `training.json` of `make training`, `fitting.json` of
`benchmarks.harness.fitting`, and pictures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu import journal, summary, verdict
from benchmarks.harness import conditions, families, fitting, table
from benchmarks.harness.provenance import ROOT
from benchmarks.host import __main__ as host
from benchmarks.peers import __main__ as peers
from benchmarks.report import graph_tables, plot, training
from benchmarks.report.read import read
from fastvit._output import write_file

RESULTS = ROOT / "benchmarks" / "results"
GPU = RESULTS / "nvidia_h200" / "results.jsonl"
_INTRODUCTION = f"""\
# Results

Made by `python -m benchmarks.report.results` from the files next to this page; how they were measured is in
[../README.md](../README.md). On a CPU the same ops run PyTorch's fused ATen functions: the figures say nothing about
the Triton kernels' speed. `make results` also draws the picture.

```text
{table.LEGEND}
```
"""


def render(paths: Sequence[Path]) -> str:
    """Return the section of one run, with a part for each op."""
    records, ceilings, where = read(paths)
    parts = [_fenced(where)]
    for op, lines in table.render(records, ceilings):
        parts.append(f"### {op}\n\n{_fenced(lines)}")
    return "\n".join(parts)


def _fenced(lines: Sequence[str]) -> str:
    return "\n".join(["```text", *lines, "```", ""])


def page(folders: Sequence[Path] = ()) -> str:
    """Return the page, of all folders of results unless some are given."""
    folders = folders or sorted(path for path in RESULTS.iterdir() if path.is_dir())
    return "\n".join([_INTRODUCTION, *(part for folder in folders for part in _folder(folder))])


def _folder(folder: Path) -> Iterator[str]:
    special = {
        "families": families.render, "graphs": graph_tables.render, "host": host.render, "peers": peers.render,
        "training": training.render, "fitting": fitting.render,
    }  # fmt: skip
    if records := journal.last(journal.read(folder / "results.jsonl")):
        others = sorted(
            {path.name for path in folder.iterdir() if path.suffix in (".md", ".txt")} - {"README.md", "log.txt"}
        )
        links = ", ".join(f"[{name}]({folder.name}/{name})" for name in others)
        yield f"## {folder.name}, first minutes\n\n{_fenced(verdict.lines(records))}\nAll of it: {links}.\n"
    runs: dict[str, list[Path]] = {}  # by dtype
    for path in sorted(folder.glob("*.json")):
        if path.stem in special or path.name.startswith("tuned_") or not path.stat().st_size:  # empty: cut off
            continue
        if found := json.loads(path.read_text())["benchmarks"]:
            runs.setdefault(found[0]["extra_info"]["environment"]["dtype"], []).append(path)
    picture = [plot.picture(folder.name)] * (folder / plot.FILES["light"]).exists()  # memory, of the first dtype
    for dtype, paths in sorted(runs.items(), key=lambda run: run[0] != "float32"):
        yield f"## {folder.name}, {dtype}\n"
        yield from picture
        yield render(paths)
        picture = []
    for name, function in special.items():
        if (folder / f"{name}.json").exists():
            yield f"## {folder.name}, {name.replace('_', ' ')}\n\n{_fenced(function(folder / f'{name}.json'))}"
            if name == "training":
                yield plot.picture(folder.name, name, "Accuracy and loss of a ViT and a ResNet")


def gpu_page(path: Path) -> str:
    """Return the page of a results.jsonl."""
    records = journal.last(journal.read(path))
    return summary.markdown(records, summary.Rates(records))


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
    found, _, (where, versions, *rest) = read([RESULTS / "cpu" / "float32.json"])
    records = {(r.op, r.case): r for r in found if r.mode == "training"}
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


_OF_A_GPU = {"attention": "attention", "block": "Block", "model": "ViT-S/16 and ViT-B/16"}
_GPU_HEAD = """\
| fastvit on an H200 against | forward: SDPA, flash | SDPA, cuDNN | both passes: SDPA, flash | SDPA, cuDNN |
|---|---|---|---|---|"""


def gpu_table(path: Path = GPU) -> str:
    """Return the table of attention, blocks and models on a GPU, by the GPU's time alone: least to most over shapes."""
    rows = [r for r in journal.last(journal.read(path)) if r["kind"] == "row" and r["status"] == "passed"]
    lines = [_GPU_HEAD]
    for op, name in _OF_A_GPU.items():
        cells, of_op = [], [r for r in rows if r["op"] == op]
        for mode in verdict.PASSES:
            found = [verdict.ratios(r, "graph") for r in of_op if r["mode"] == mode]
            cells += [_range([ratios[other] for ratios in found]) for other in ("flash", "cudnn")]
        lines.append(f"| {' | '.join([f'{name}, {len(of_op) // 2} shapes', *cells])} |")
    return "\n".join(lines)


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}-{max(ratios):.2f}x"


def with_ops(readme: str) -> str:
    """Return the README with the tables between its two marks."""
    before, mark, rest = readme.partition("<!-- ops -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (mark and end):
        raise ValueError("README.md has no lines <!-- ops --> and <!-- end -->")
    return f"{before}{mark}{gpu_table()}\n\n{ops_table()}\n{end}{after}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, help="of result files; default: all in benchmarks/results")
    parser.add_argument("--to", type=Path, default=RESULTS / "README.md", help="the page")
    chosen = parser.parse_args(arguments)
    write_file(chosen.to, page(chosen.folders))
    if not chosen.folders:
        for path in RESULTS.glob("*/results.jsonl"):
            write_file(path.with_name("table.md"), gpu_page(path))
        readme = ROOT / "README.md"
        write_file(readme, with_ops(readme.read_text()))


if __name__ == "__main__":
    main()
