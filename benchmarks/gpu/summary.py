"""The table of a run on a GPU, and its short form, both made from the journal's records."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from benchmarks.gpu import verdict
from benchmarks.gpu.journal import BEGUN, Record
from benchmarks.gpu.verdict import figures, ratios, reason

MODES = {"inference": "forward", "training": "forward + backward"}
PROVIDERS = ("eager", "flash", "cudnn", "fastvit")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = 0.05  # of the largest result, by which a timed result may differ from another provider's


def markdown(records: list[Record]) -> str:
    machine = next((r for r in records if r["name"] == "machine"), {})
    lines = [
        f"# {machine.get('device', 'GPU')}",
        "",
        "```",
        *verdict.lines(records),
        "```",
        "",
        f"torch {machine.get('torch')}, triton {machine.get('triton')}, sources {machine.get('sources')}",
        "",
        *_ceilings(records),
        *_steps(records),
        *_correct(records),
        *_rows(records),
        *_compiled(records),
    ]
    return "\n".join(lines) + "\n"


def _table(head: Iterable[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table between blank lines; nothing without rows."""
    head = list(head)
    return ["", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), ""] if rows else []


def _ceilings(records: list[Record]) -> list[str]:
    return [
        f"limits: copy {r['bytes_per_second'] * 1e-9:,.0f} GB/s, matmul {r['flops_per_second'] * 1e-12:,.1f} TFLOP/s"
        for r in records
        if r["name"] == "ceilings" and r["status"] == "passed"
    ]


def _steps(records: list[Record]) -> list[str]:
    rows = [
        [r["name"], r["status"], str(r.get("seconds", "")), _last(r).replace("|", "/")]
        for r in records
        if r["kind"] in ("step", "environment") and r["name"] not in ("machine", "ceilings")
    ]
    return _table(("step", "what became of it", "s", "last words, unless it passed"), rows)


def _last(r: Record) -> str:
    """Say why a step did not pass, or ""."""
    return "" if r["status"] == "passed" else reason(r)[:200]


def _correct(records: list[Record]) -> list[str]:
    """Return the table of the worst errors of outputs and gradients, by op and shape."""
    found: dict[str, dict[str, str]] = {}
    for r in records:
        if r["kind"] == "correct":
            found.setdefault(r["case"], {})[r["dtype"]] = _verdict(r)
    rows = [[case, *(cells.get(dtype, "-") for dtype in DTYPES)] for case, cells in found.items()]
    return _table(("error of outputs (at most 2), gradients (at most 3)", *DTYPES), rows)


def _verdict(r: Record) -> str:
    if r["status"] == BEGUN:
        return "**did not end**"
    if "ratios" not in r:
        return f"**{r['status']}**: {reason(r)[:120]}".replace("|", "/")
    return figures(r) if r["status"] == "passed" else f"**{reason(r)}** {figures(r)}"


def _rows(records: list[Record]) -> list[str]:
    rows = []
    for r in records:
        if r["kind"] != "row":
            continue
        of = r.get("providers", {})
        graph = [_us(of, name, "graph") for name in PROVIDERS]
        called = [_us(of, name, "called") for name in PROVIDERS]
        name = r["name"] if r["status"] == "passed" else f"{r['name']} (**{reason(r)[:160].replace('|', '/')}**)"
        over = ", ".join(f"{value:.2f}x {key}" for key, value in ratios(r, "graph").items())
        rows.append([name, *graph, *called, over, str(len(r.get("tuned", ())) or "-")])
    times = [f"{name} us{called}" for called in ("", " called") for name in PROVIDERS]
    head = ["row", *times, "us / fastvit's", "tuned"]
    notes = [
        f"- {r['name']}, {name}: {words}"
        for r in records
        if r["kind"] == "row"
        for name, of in r.get("providers", {}).items()
        for words in (of.get("skipped"), of.get("remark"))
        if words
    ]
    legend = [
        "us: of the GPU, by replays of a graph (* without one), cache cleared; called: host included, in a loop; "
        "tuned: launch choices of fastvit that were measured on this GPU, - where all are as shipped"
    ]
    return [*_table(head, rows), *legend * bool(rows), *notes]


def _us(providers: Record, name: str, which: str) -> str:
    """Format microseconds; * marks a GPU time without a graph."""
    time = providers.get(name, {}).get(which)
    if time is None:
        return "-"
    return f"{time['median'] * 1e6:,.1f}" + "*" * (which == "graph" and bool(providers[name].get("remark")))


def _compiled(records: list[Record]) -> list[str]:
    rows = [
        [
            r["name"],
            *(f"{r[k]['median'] * 1e6:,.1f}" if r.get(k) else "-" for k in ("graph", "called")),
            f"{r['status']} {reason(r)}".strip().replace("|", "/"),
        ]
        for r in records
        if r["kind"] == "compiled"
    ]
    return _table(("torch.compile", "us", "us called", ""), rows)


def short(records: list[Record]) -> list[str]:
    """Return the most important results in a few lines."""
    machine = [r for r in records if r["name"] == "machine"]
    lines = [f"{r['own_device']}, torch {r['torch']}, triton {r['triton']}, commit {r['commit']}" for r in machine]
    bad = [r for r in records if r["kind"] == "environment" and r["status"] != "passed"]
    lines += [f"{r['name']}: {r['status']} {_last(r)}" for r in bad] + _ceilings(records)
    checked: dict[str, list[Record]] = {}
    for r in records:
        if r["kind"] == "correct":
            checked.setdefault(r["case"].split()[0], []).append(r)
    for op, cases in checked.items():
        wrong = [r for r in cases if r["status"] != "passed"]
        worst = max((v for r in cases for v in r.get("ratios", ()) if v is not None), default=float("nan"))
        lines.append(f"{op}: {len(cases) - len(wrong)} of {len(cases)} correct, worst error ratio {worst:.2f}")
    for r in records:
        if r["kind"] == "row" and r["status"] == "passed":
            pair = [", ".join(f"{k} {v:.2f}x" for k, v in ratios(r, which).items()) for which in ("graph", "called")]
            lines.append(f"{r['name']}: {_us(r['providers'], 'fastvit', 'graph')} us, {pair[0]}; as called {pair[1]}")
        elif r["kind"] == "row":
            lines.append(f"{r['name']}: {reason(r)}")
        elif r["kind"] == "compiled" and r.get("called"):
            lines.append(f"{r['name']}: {r['called']['median'] * 1e6:,.0f} us called")
    return lines
