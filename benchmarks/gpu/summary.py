"""The page of a run on a GPU, made from results.jsonl: the verdict in a few lines, with what has not passed
first, and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from benchmarks.gpu.results_file import REHEARSAL, Record
from benchmarks.harness import columns, conditions, record, table
from benchmarks.harness.timing import Ceilings

PASSES = {"inference": "forward", "training": "both passes"}
_RESULTS = ("row", "compiled", "correct")  # "correct": of earlier runs; later ones have a step for each op


def verdict(records: list[Record]) -> list[str]:
    """Return what has not passed, results before commands, then times of others over fastvit's."""
    results = [r for r in records if r["kind"] in _RESULTS]
    passed = sum(r["status"] == "passed" for r in results)
    said = [f"{len(results)} results, {passed} of them passed"]
    if any(r.get("device") == REHEARSAL for r in records):
        said.append("A rehearsal on a CPU: it shows that the steps run. Its times measure nothing.")
    for r in [*results, *(r for r in records if r["kind"] == "step")]:
        if r["status"] != "passed":
            said.append(f"{r['name']}: {r['status']} {reason(r)}".strip()[:160])
    return [*said, *_times(results), *_compiled_times(results)]


def reason(r: Record) -> str:
    """Say why a result did not pass; for a command, its last lines."""
    return str(r.get("reason") or " ".join(r.get("last", ())[-2:]))


def ratios(r: Record) -> dict[str, float]:
    """Return the GPU's time of each other provider over fastvit's."""
    times = {name: figures["time"]["median"] for name, figures in r["providers"].items() if figures.get("time")}
    own = times.pop("fastvit", None)
    return {name: value / own for name, value in times.items()} if own else {}


def _times(results: list[Record]) -> Iterator[str]:
    """Yield a line for each op and pass."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for r in results:
        if r["kind"] == "row" and r["status"] == "passed" and (others := ratios(r)):
            found.setdefault((r["op"], r["mode"]), []).append(others)
    if not found:
        return
    yield "GPU time of others over that of fastvit: median (least to most) over shapes;"
    yield "above 1 fastvit is faster"
    yield f"{'':<28} {'SDPA flash':<22} {'the fastest other':<21} shapes"
    for (op, mode), rows in found.items():
        flash, fastest = (_spread(r["flash"] for r in rows if "flash" in r), _spread(min(r.values()) for r in rows))
        yield f"{op + ', ' + PASSES[mode]:<28} {flash:<22} {fastest:<21} {len(rows)}"


def _compiled_times(results: list[Record]) -> Iterator[str]:
    """Yield lines for models under torch.compile: the time of SDPA over that of fused ones."""
    times = {
        (r["model"], r["style"], r["mode"], r["provider"]): r["time"]["median"]
        for r in results
        if r["kind"] == "compiled" and r["status"] == "passed" and r.get("time")
    }
    lines = []
    for provider, words in (("fastvit", "fused modules"), ("graph", "fastvit.compile")):
        for mode, title in PASSES.items():
            pairs = [
                times[*of, mode, "sdpa"] / own
                for (*of, m, p), own in times.items()
                if (m, p) == (mode, provider) and (*of, mode, "sdpa") in times
            ]
            if pairs:
                lines.append(f"{words + ', ' + title:<28} {_spread(pairs):<44} {len(pairs)}")
    if lines:
        yield "torch.compile, each model in its own process: time of SDPA over that of"
        yield from lines


def _spread(values: Iterable[float]) -> str:
    several = list(values)
    if not several:
        return "-"
    spread = f" ({min(several):.2f} to {max(several):.2f})" if len(several) > 1 else ""
    return f"{statistics.median(several):.2f}{spread}"


def markdown(records: list[Record]) -> str:
    """Return the page: the verdict, how the commands ended, and the tables of rows and of compiled models."""
    machine = next(r for r in records if r["name"] == "machine")
    parts = [f"# {machine['device']}\n", columns.fenced(verdict(records))]
    steps = [r for r in records if r["kind"] == "step"]
    parts.append(columns.fenced(f"{r['name']}: {r['status']}, {r['seconds']} s; {reason(r)}" for r in steps))
    rows = [r for r in records if r["kind"] == "row" and r["status"] == "passed"]
    if rows:
        limits = conditions.best([Ceilings(**r["ceilings"]) for r in rows])
        parts.append(columns.fenced([*table.header(rows[0]["environment"], limits), "", *table.legend()]))
        for title, lines in table.render([record.Record.read(r) for r in rows], limits):
            parts.append(f"## {title}\n\n{columns.fenced(lines)}")
    if models := [r for r in records if r["kind"] == "compiled"]:
        lines = columns.make(("", "us", "us called"), [[r["name"], _us(r, "time"), _us(r, "called")] for r in models])
        parts.append(f"## torch.compile\n\n{columns.fenced(lines)}")
    return "\n".join(parts)


def _us(r: Record, which: str) -> str:
    return f"{r[which]['median'] * 1e6:,.1f}" if r.get(which) else "-"
