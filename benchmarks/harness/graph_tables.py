"""The table of what `fastvit.compile` fuses in other libraries' models, from the results of harness/graph_models.py."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.columns import WIDTH, make

Row = dict[str, Any]
KINDS = {"attention": "attention", "LayerNorm": "LayerNorm", "MLP": "MLP", "patch embedding": "patch"}
STATUS = {
    "right": "right",
    "wrong": "computes something else, compiled",
    "fails": "fails, compiled",
    "Dynamo": "fails or is wrong with torch.compile(backend='eager'), too",
    "eager": "does not run here untouched",
    "running": "ended the process",
}


def masked(reason: str) -> bool:
    return reason.startswith(("a mask", "a bias"))


def counts(row: Row, kind: str) -> tuple[int, int]:
    """Fused sites, and all but those whose scores have a mask or a bias."""
    found = row["sites"].get(kind, {"fused": {}, "left": {}})
    fused = sum(found["fused"].values())
    return fused, fused + sum(n for reason, n in found["left"].items() if not masked(reason))


def render(path: Path) -> list[str]:
    results = json.loads(path.read_text())
    rows, where = list(results["rows"].values()), results["environment"]
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    lines: list[str] = []
    for library in libraries:
        own = [row for row in rows if row["library"] == library]
        lines += [*_totals(library, own), "", *_families(own), ""]
    lines += [
        "right: models of all. attention, LayerNorm, MLP, patch: sites fused of all. masked: attention with a mask or",
        "a bias added to its scores, which is left and not counted before. graphs: the most of one model.",
        "error: the largest of outputs and gradients as a share of the one allowed.",
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
    yield f"{library}: {right} of {len(run)} models right (and {len(rows) - len(run)} that do not compile or run)"
    with_attention = [pair for row in run if (pair := counts(row, "attention"))[1]]
    whole = sum(fused == all_of_it for fused, all_of_it in with_attention)
    yield f"{whole} of {len(with_attention)} with every self-attention fused that has neither mask nor bias"


def _families(rows: Sequence[Row]) -> list[str]:
    table = []
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        run = [row for row in own if row["status"] != "eager"]
        left_masked = sum(
            n
            for row in run
            for reason, n in row["sites"].get("attention", {}).get("left", {}).items()
            if masked(reason)
        )
        pairs = (
            [tuple(map(sum, zip(*(counts(row, kind) for row in run), strict=True))) for kind in KINDS] if run else []
        )
        shown = [f"{fused}/{of}" if of else "-" for fused, of in pairs] or ["-"] * len(KINDS)
        right = sum(row["status"] == "right" for row in own)
        graphs = max((row["graphs"] for row in run), default=0)
        error = max((row["share"] for row in own), default=0.0)
        table.append(
            (family, f"{right}/{len(own)}", shown[0], str(left_masked or "-"), *shown[1:], str(graphs), f"{error:.2f}")
        )
    return make(("model", "right", "attention", "masked", *list(KINDS.values())[1:], "graphs", "error"), table)


def _reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Why sites were left, by kind, and in how many models."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        for kind, parts in row["sites"].items():
            found.setdefault(kind, Counter()).update(dict.fromkeys(parts["left"], 1))
    for kind, reasons in found.items():
        if reasons:
            yield f"{kind} left, and in how many models:"
            yield from (f"  {number:4d}  {reason}" for reason, number in reasons.most_common())
            yield ""


def _exceptions(rows: Sequence[Row]) -> Iterator[str]:
    for status, words in STATUS.items():
        own = [row for row in rows if row["status"] == status and status != "right"]
        if own:
            yield f"{words}:"
            yield from (f"  {row['library']} {row['name']}: {row['detail']}" for row in own)
            yield ""
