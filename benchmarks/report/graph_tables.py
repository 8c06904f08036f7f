"""The tables of what `fastvit.compile` and `fastvit.accelerate` fuse in other libraries' models, from the results of
graph_models.py."""

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
    "accelerated wrong": "computes something else, accelerated",
    "accelerated fails": "fails, accelerated",
    "Dynamo": "fails or is wrong with torch.compile(backend='aot_eager'), too",
    "eager": "does not run here untouched",
    "running": "ended the process",
}
_LEGEND = """\
right: models of all, by both routes. attention, norms, MLP, patch: sites that compile fuses of all. accelerate: \
attention that it fuses of the same. graphs: the most of one model. error: the largest of outputs and gradients as a \
share of the one allowed."""


def counts(row: Row, *kinds: str) -> tuple[int, int]:
    """Return the number of sites that compile fuses, and of all."""
    found = [row["sites"].get(kind, {"fused": {}, "left": {}}) for kind in kinds]
    fused = sum(sum(sites["fused"].values()) for sites in found)
    return fused, fused + sum(sum(sites["left"].values()) for sites in found)


def accelerated(row: Row) -> tuple[int, int]:
    """Return the number of attention sites that accelerate fuses, and of all; none if they could not be counted.

    Where graphs break, modules that share a graph count once, and accelerated ones may share fewer."""
    left, every = row["accelerated"]["left"], counts(row, "attention")[1]
    return (0, 0) if left is None else (max(every - left, 0), every)


def _both_right(row: Row) -> bool:
    return row["status"] == row["accelerated"]["status"] == "right"


def render(path: Path) -> list[str]:
    """Return totals of both routes, the families whose attention is all fused, a table of the others, why compile left
    attention, and every model that is not right."""
    results = json.loads(path.read_text())
    rows, where = list(results["rows"].values()), results["environment"]
    lines = []
    for library, own in _by(rows, "library").items():
        whole: dict[str, list[str]] = {"all": [], "some": [], "none": []}  # by what accelerate fuses
        others: dict[str, list[Row]] = {}
        for family, members in sorted(_by(own, "family").items()):
            fused, every = _sum(counts(row, "attention") for row in members)
            ours = _sum(map(accelerated, members))
            if every and fused == every == ours[1] and all(map(_both_right, members)):
                kind = "all" if ours[0] == every else "some" if ours[0] else "none"
                whole[kind].append(f"{family} {_shown(ours)}" if kind == "some" else family)
            else:
                others[family] = members
        lines += [*_totals(library, own), ""]
        for kind, names in whole.items():
            if names:
                lines += [f"all attention fused by compile, {kind} by accelerate: {', '.join(names)}", ""]
        lines += [*_table(others), ""]
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
    alone = f"{len(rows) - len(run)} do not run, compile alone or end in time"
    yield f"{library}: {len(rows)} models; {alone}; {sum(map(_both_right, run))} of the other {len(run)} right"
    some = [row for row in run if counts(row, "attention")[1]]
    by_route = {"compile": [counts(row, "attention") for row in some], "accelerate": [accelerated(row) for row in some]}
    for route, pairs in by_route.items():
        fused, every = _sum(pairs)
        whole = sum(pair[0] == pair[1] > 0 for pair in pairs)
        yield f"{whole} of {len(some)} with all attention fused by {route}: {fused} of {every} sites"


def _table(families: dict[str, list[Row]]) -> list[str]:
    table = []
    for family, own in families.items():
        run = [row for row in own if row["status"] != "eager"]
        attention, *others = (_shown(_sum(counts(row, *kinds) for row in run)) for kinds in KINDS.values())
        right = f"{sum(map(_both_right, own))}/{len(own)}"
        graphs = str(max((row["graphs"] for row in run), default="-"))
        error = f"{max(max(row['share'], row['accelerated']['share']) for row in own):.2f}"
        name = family.replace("vision_transformer", "vit")
        table.append((name, right, attention, _shown(_sum(map(accelerated, own))), *others, graphs, error))
    return make(("model", "right", "attention", "accelerate", *list(KINDS)[1:], "graphs", "error"), table)


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    several = list(pairs)
    return sum(fused for fused, _ in several), sum(every for _, every in several)


def _shown(pair: tuple[int, int]) -> str:
    return f"{pair[0]}/{pair[1]}" if pair[1] else "-"


def _reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Yield why compile left attention, and in how many models."""
    reasons = Counter[str]()
    for row in rows:
        left = row["sites"].get("attention", {"left": {}})["left"]
        reasons.update({re.sub(r"(shape) \(.*", r"\1", reason) for reason in left})
    if reasons:
        yield "attention that compile leaves, and in how many models:"
        ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        yield from (f"  {number:4d}  {reason}" for reason, number in ordered)
        yield ""


def _exceptions(rows: Sequence[Row]) -> Iterator[str]:
    several = [row for row in rows if _both_right(row) and row["eager_runs"] > 1]
    if several:
        yield "right by eager mode's largest error of so many runs, with weights a rounding away from each other:"
        yield from (f"  {row['library']} {row['name']}: {row['eager_runs']}" for row in several)
        yield ""
    outcomes = [(row, row["status"], row["detail"]) for row in rows]
    outcomes += [(row, f"accelerated {own['status']}", own["detail"]) for row in rows for own in [row["accelerated"]]]
    for status, words in STATUS.items():
        own = [f"  {row['library']} {row['name']}: {detail[:120]}" for row, was, detail in outcomes if was == status]
        if own:
            yield from (f"{words}:", *own, "")
