"""The table of what `fastvit.compile` fuses in other libraries' models, from the results of graph_models.py."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.columns import WIDTH, make

Row = dict[str, Any]
# Columns, and the kinds of sites in them
KINDS = {
    "attention": ("attention",),
    "norms": ("LayerNorm", "RMSNorm"),
    "MLP": ("MLP",),
    "patch": ("patch embedding",),
}
STATUS = {
    "right": "right",
    "wrong": "computes something else, compiled",
    "fails": "fails, compiled",
    "Dynamo": "fails or is wrong with torch.compile(backend='aot_eager'), too",
    "eager": "does not run here untouched",
    "running": "ended the process",
}


def is_cross(reason: str) -> bool:
    """Whether attention was left because its keys are of other tokens than its queries."""
    return reason.startswith("k and v of another length")


def counts(row: Row, *kinds: str) -> tuple[int, int]:
    """Return the number of fused sites, and of all; for attention, of all self-attention."""
    fused = left = 0
    for kind in kinds:
        found = row["sites"].get(kind, {"fused": {}, "left": {}})
        fused += sum(found["fused"].values())
        left += sum(n for reason, n in found["left"].items() if kind != "attention" or not is_cross(reason))
    return fused, fused + left


def render(path: Path) -> list[str]:
    results = json.loads(path.read_text())
    rows, where = list(results["rows"].values()), results["environment"]
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    lines: list[str] = []
    for library in libraries:
        own = [row for row in rows if row["library"] == library]
        lines += [*_totals(library, own), "", *_families(own), ""]
    lines += [
        "right: models of all. attention, norms, MLP, patch: sites fused of all. cross: attention of other",
        "queries than keys, which is left and not counted before. graphs: the most of one model. error: the",
        "largest of outputs and gradients as a share of the one allowed.",
        "",
        *_reasons(rows),
        *_exceptions(rows),
        f"{where['device']}, float32, {where['threads']} threads, torch {where['torch']}, "
        + ", ".join(f"{name} {version}" for name, version in where["libraries"].items()),
    ]
    return [line for text in lines for line in (textwrap.wrap(text, WIDTH, subsequent_indent="  ") if text else [""])]


def _totals(library: str, rows: Sequence[Row]) -> Iterator[str]:
    run = [row for row in rows if row["status"] not in ("eager", "Dynamo")]
    right = sum(row["status"] == "right" for row in run)
    alone = f"{len(rows) - len(run)} do not run, compile alone or end in time"
    yield f"{library}: {len(rows)} models; {alone}; {right} of the other {len(run)} right"
    with_attention = [pair for row in run if (pair := counts(row, "attention"))[1]]
    whole = sum(fused == all_of_it for fused, all_of_it in with_attention)
    yield f"{whole} of {len(with_attention)} with every self-attention fused"
    sites = [sum(pair[i] for pair in with_attention) for i in (0, 1)]
    yield f"{sites[0]} of {sites[1]} such attention sites"


def _families(rows: Sequence[Row]) -> list[str]:
    table = []
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        run = [row for row in own if row["status"] != "eager"]
        shown = [_of([counts(row, *kinds) for row in run]) for kinds in KINDS.values()]
        cross = sum(
            number
            for row in run
            for reason, number in row["sites"].get("attention", {"left": {}})["left"].items()
            if is_cross(reason)
        )
        right = f"{sum(row['status'] == 'right' for row in own)}/{len(own)}"
        graphs = str(max((row["graphs"] for row in run), default="-"))
        error = f"{max(row['share'] for row in own):.2f}"
        attention, *others = shown
        name = family.replace("vision_transformer", "vit")
        table.append((name, right, attention, str(cross or "-"), *others, graphs, error))
    return make(("model", "right", "attention", "cross", *list(KINDS)[1:], "graphs", "error"), table)


def _of(pairs: Sequence[tuple[int, int]]) -> str:
    fused, of = (sum(pair[i] for pair in pairs) for i in (0, 1))
    return f"{fused}/{of}" if of else "-"


def _reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Yield why sites were left, by kind, and in how many models."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        for kind, parts in row["sites"].items():
            reasons = {re.sub(r"(shape) \(.*", r"\1", reason) for reason in parts["left"]}
            found.setdefault(kind, Counter()).update(reasons)
    for kind, counted in found.items():
        if counted:
            yield f"{kind} left, and in how many models:"
            ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
            yield from (f"  {number:4d}  {reason}" for reason, number in ordered)
            yield ""


def _exceptions(rows: Sequence[Row]) -> Iterator[str]:
    several = [row for row in rows if row["status"] == "right" and row["eager_runs"] > 1]
    if several:
        yield "right by eager mode's largest error of so many runs, with weights a rounding away from each other:"
        yield from (f"  {row['library']} {row['name']}: {row['eager_runs']}" for row in several)
        yield ""
    for status, words in STATUS.items():
        own = [row for row in rows if row["status"] == status and status != "right"]
        if own:
            yield f"{words}:"
            yield from (f"  {row['library']} {row['name']}: {row['detail']}" for row in own)
            yield ""
