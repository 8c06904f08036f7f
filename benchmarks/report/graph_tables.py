"""The table of what `fastvit.compile` fuses in other libraries' models, from the results of graph_models.py."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.columns import make, wrapped

Row = dict[str, Any]
# Columns, and the kinds of sites in them
KINDS = {"attention": ("attention",), "norms": ("LayerNorm", "RMSNorm"), "MLP": ("MLP",), "patch": ("patch embedding",)}
STATUS = {  # but "right"
    "wrong": "computes something else, compiled",
    "fails": "fails, compiled",
    "Dynamo": "fails or is wrong with torch.compile(backend='aot_eager'), too",
    "eager": "does not run here untouched",
    "running": "ended the process",
}
_LEGEND = """\
right: models of all. attention, norms, MLP, patch: sites fused of all. cross: attention of other queries than keys, \
which is left and not counted before. graphs: the most of one model. error: the largest of outputs and gradients as a \
share of the one allowed."""


def is_cross(reason: str) -> bool:
    """Whether attention was left because its keys are of other tokens than its queries."""
    return reason.startswith("k and v of another length")


def _left(row: Row) -> dict[str, int]:
    """Return why attention was left, and at how many sites."""
    left: dict[str, int] = row["sites"].get("attention", {"left": {}})["left"]
    return left


def counts(row: Row, *kinds: str) -> tuple[int, int]:
    """Return the number of fused sites, and of all; for attention, of all self-attention."""
    fused = left = 0
    for kind in kinds:
        sites = row["sites"].get(kind, {"fused": {}, "left": {}})
        fused += sum(sites["fused"].values())
        left += sum(n for reason, n in sites["left"].items() if kind != "attention" or not is_cross(reason))
    return fused, fused + left


def render(path: Path) -> list[str]:
    """Return the totals, the families whose self-attention is all fused, a table of the others, why attention was left,
    and every model that is not right."""
    results = json.loads(path.read_text())
    rows, where = list(results["rows"].values()), results["environment"]
    lines = []
    for library, own in _by(rows, "library").items():
        whole: dict[str, list[Row]] = {}
        others: dict[str, list[Row]] = {}
        for family, members in _by(own, "family").items():
            fused, every = _sum(counts(row, "attention") for row in members if row["status"] != "eager")
            right = all(row["status"] == "right" for row in members)
            (whole if right and every and fused == every else others)[family] = members
        lines += [*_totals(library, own), "", f"all of it fused: {', '.join(sorted(whole))}", "", *_table(others), ""]
    lines += [_LEGEND, "", *_reasons(rows), *_exceptions(rows)]
    lines.append(f"{where['device']}, float32, {where['threads']} threads, torch {where['torch']}, ")
    lines[-1] += ", ".join(f"{name} {version}" for name, version in where["libraries"].items())
    return wrapped(lines)


def _by(rows: Iterable[Row], key: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _totals(library: str, rows: Sequence[Row]) -> Iterator[str]:
    run = [row for row in rows if row["status"] not in ("eager", "Dynamo")]
    right = sum(row["status"] == "right" for row in run)
    alone = f"{len(rows) - len(run)} do not run, compile alone or end in time"
    yield f"{library}: {len(rows)} models; {alone}; {right} of the other {len(run)} right"
    with_attention = [pair for row in run if (pair := counts(row, "attention"))[1]]
    whole = sum(fused == every for fused, every in with_attention)
    yield f"{whole} of {len(with_attention)} with every self-attention fused"
    fused, every = _sum(with_attention)
    yield f"{fused} of {every} such attention sites"


def _table(families: dict[str, list[Row]]) -> list[str]:
    table = []
    for family, own in families.items():
        run = [row for row in own if row["status"] != "eager"]
        attention, *others = (_shown(_sum(counts(row, *kinds) for row in run)) for kinds in KINDS.values())
        cross = sum(number for row in run for reason, number in _left(row).items() if is_cross(reason))
        right = f"{sum(row['status'] == 'right' for row in own)}/{len(own)}"
        graphs = str(max((row["graphs"] for row in run), default="-"))
        error = f"{max(row['share'] for row in own):.2f}"
        name = family.replace("vision_transformer", "vit")
        table.append((name, right, attention, str(cross or "-"), *others, graphs, error))
    return make(("model", "right", "attention", "cross", *list(KINDS)[1:], "graphs", "error"), table)


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    several = list(pairs)
    return sum(fused for fused, _ in several), sum(every for _, every in several)


def _shown(pair: tuple[int, int]) -> str:
    return f"{pair[0]}/{pair[1]}" if pair[1] else "-"


def _reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Yield why attention was left, and in how many models."""
    reasons = Counter[str]()
    for row in rows:
        reasons.update({re.sub(r"(shape) \(.*", r"\1", reason) for reason in _left(row)})
    if reasons:
        yield "attention left, and in how many models:"
        ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        yield from (f"  {number:4d}  {reason}" for reason, number in ordered)
        yield ""


def _exceptions(rows: Sequence[Row]) -> Iterator[str]:
    several = [row for row in rows if row["status"] == "right" and row["eager_runs"] > 1]
    if several:
        yield "right by eager mode's largest error of so many runs, with weights a rounding away from each other:"
        yield from (f"  {row['library']} {row['name']}: {row['eager_runs']}" for row in several)
        yield ""
    for status, words in STATUS.items():
        own = [row for row in rows if row["status"] == status]
        if own:
            yield f"{words}:"
            yield from (f"  {row['library']} {row['name']}: {row['detail'][:120]}" for row in own)
            yield ""
