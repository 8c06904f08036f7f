"""The verdict on a run in a few lines: wrong, failed and missing results, and times against other providers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from benchmarks.gpu.journal import BEGUN, REHEARSAL, Record

KINDS = ("correct", "row", "compiled")  # of results
PASSES = {"inference": "forward", "training": "both passes"}
_NAMED = 8  # results at most that are named


def lines(records: list[Record]) -> list[str]:
    """Return wrong results first, then those that failed, did not end or are missing, then times of others over
    fastvit's."""
    results = [r for r in records if r["kind"] in KINDS]
    wrong = [r for r in results if is_wrong(r)]
    failed = [r for r in results if r["status"] in ("failed", BEGUN) and not is_wrong(r)]
    there = {r["name"] for r in results if r["status"] != "cut"}
    expected: dict[str, list[str]] = next((r["expected"] for r in records if r["kind"] == "plan"), {})
    missing = [name for names in expected.values() for name in names if name not in there]
    found = [f"{len(there)} results: {len(wrong)} wrong, {len(failed)} failed, {len(missing)} missing"]
    if any(r.get("device") == REHEARSAL for r in records):
        found.append("A rehearsal on a CPU: it shows that the steps run. Its times measure nothing.")
    for word, several in (("WRONG", wrong), ("FAILED", failed)):
        found += _named(word, [f"{r['name']}: {reason(r)} {figures(r)}".strip() for r in several])
    found += _named("MISSING", missing)
    steps = [r for r in records if r["kind"] in ("environment", "compile", "step") and r["status"] != "passed"]
    found += _named("", [f"{r['name']}: {r['status']} {reason(r)}" for r in steps])
    return [*found, *_times(results), *_compiled(results)]


def is_wrong(r: Record) -> bool:
    """Whether a result was compared, and missed its bound or changed from run to run."""
    return r["status"] == "failed" and bool(r.get("wrong") or (r["kind"] == "correct" and "ratios" in r))


def reason(r: Record) -> str:
    """Say why a result did not pass; for a step, its last lines."""
    return "did not end" if r["status"] == BEGUN else r.get("reason") or " ".join(r.get("last", ())[-2:])


def figures(r: Record) -> str:
    """Format the error ratios of a check, outputs and gradients; "" for other results."""
    return ", ".join("not finite" if value is None else f"{value:.2f}" for value in r.get("ratios", ()))


def ratios(r: Record, which: str) -> dict[str, float]:
    """Return the time of each other provider over fastvit's. which: "graph" or "called"."""
    times = {name: f[which]["median"] for name, f in r.get("providers", {}).items() if f.get(which)}
    own = times.pop("fastvit", None)
    return {name: value / own for name, value in times.items()} if own else {}


def _named(word: str, names: list[str]) -> list[str]:
    word = f"{word}: " * bool(word)
    more = [f"{word}and {len(names) - _NAMED} more"] * (len(names) > _NAMED)
    return [f"{word}{name}"[:160] for name in names[:_NAMED]] + more


def _times(results: list[Record]) -> Iterator[str]:
    """Yield a line for each op and pass."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    without = 0
    for r in results:
        if r["kind"] == "row" and r["status"] == "passed":
            if others := ratios(r, "graph"):
                found.setdefault((r["op"], r["mode"]), []).append(others)
            else:
                without += 1
    if without:
        yield f"{without} rows have no time of the GPU alone: table.md says why"
    if not found:
        return
    yield "GPU time of others over that of fastvit: median (least to most) over shapes;"
    yield "above 1 fastvit is faster"
    yield f"{'':<28} {'SDPA flash':<22} {'the fastest other':<21} shapes"
    for (op, mode), rows in found.items():
        flash, fastest = (_spread(r["flash"] for r in rows if "flash" in r), _spread(min(r.values()) for r in rows))
        yield f"{op + ', ' + PASSES[mode]:<28} {flash:<22} {fastest:<21} {len(rows)}"


def _compiled(results: list[Record]) -> Iterator[str]:
    """Yield lines for models under torch.compile: the time of SDPA over that of fused ones."""
    times = {
        (r["model"], r["style"], r["mode"], r["provider"]): r["graph"]["median"]
        for r in results
        if r["kind"] == "compiled" and r["status"] == "passed" and r.get("graph")
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
