"""The page of a run on a GPU, made from the journal's records: the verdict in a few lines, wrong, failed and missing
results first, and tables."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

import torch

from benchmarks.gpu.journal import BEGUN, REHEARSAL, Record
from benchmarks.harness.timing import Ceilings
from benchmarks.harness.workloads import Workload, workloads

MODES = {"inference": "forward", "training": "forward + backward"}
PROVIDERS = ("eager", "flash", "cudnn", "fastvit")
KINDS = ("correct", "row", "compiled")  # of results
PASSES = {"inference": "forward", "training": "both passes"}
_NAMED = 8  # results at most that are named
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def row_name(workload: Workload, mode: str) -> str:
    """Return the name of the result of a workload, forward alone or forward and backward."""
    return f"{workload.op} {workload} {MODES[mode]}"


def verdict(records: list[Record]) -> list[str]:
    """Return wrong results first, then those that failed, did not end or are missing, then times of others over
    fastvit's."""
    results = [r for r in records if r["kind"] in KINDS]
    wrong = [r for r in results if is_wrong(r)]
    failed = [r for r in results if r["status"] in ("failed", BEGUN) and not is_wrong(r)]
    there = {r["name"] for r in results if r["status"] != "cut"}
    expected: dict[str, list[str]] = next((r["expected"] for r in records if r["kind"] == "plan"), {})
    missing = [name for names in expected.values() for name in names if name not in there]
    said = [f"{len(there)} results: {len(wrong)} wrong, {len(failed)} failed, {len(missing)} missing"]
    if any(r.get("device") == REHEARSAL for r in records):
        said.append("A rehearsal on a CPU: it shows that the steps run. Its times measure nothing.")
    for word, several in (("WRONG", wrong), ("FAILED", failed)):
        said += _named(word, [f"{r['name']}: {reason(r)} {figures(r)}".strip() for r in several])
    said += _named("MISSING", missing)
    steps = [r for r in records if r["kind"] in ("environment", "compile", "step") and r["status"] != "passed"]
    said += _named("", [f"{r['name']}: {r['status']} {reason(r)}" for r in steps])
    return [*said, *_times(results), *_compiled_times(results)]


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


def _compiled_times(results: list[Record]) -> Iterator[str]:
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


class Rates:
    """Rates of measured times, and their share of the limits that were measured on the machine."""

    def __init__(self, records: Iterable[Record]) -> None:
        """Count FLOPs and bytes of every time, which takes seconds where there are models."""
        known = {f"{w.op} {w}": w for w in workloads("headline", "quick")}
        cost = functools.cache(lambda name, mode: known[name].cost(mode, torch.bfloat16))
        self._limits: Ceilings | None = None
        self._costs: dict[str, tuple[int, int]] = {}  # FLOPs, bytes
        for r in records:
            if r["name"] == "ceilings" and r["status"] == "passed":
                self._limits = Ceilings(*(r[field.name] for field in fields(Ceilings)))
            elif r["kind"] in ("row", "compiled") and r["status"] == "passed":
                names = [name for name in known if r["name"].startswith(f"{name} ")]
                if names:
                    self._costs[r["name"]] = cost(max(names, key=len), r["mode"])

    def cells(self, name: str, time: Mapping[str, float] | None) -> list[str]:
        """Return the rate of a result, and its share of the limit that binds it; "-" without a time."""
        if time is None or self._limits is None or name not in self._costs:
            return ["-", "-"]
        flops, moved = self._costs[name]
        share = self._limits.least_seconds(flops, moved) / time["median"]
        return [self._limits.rate(flops, moved, time["median"]), f"{share:.0%}"]


def markdown(records: list[Record]) -> str:
    """Return the page."""
    machine = next((r for r in records if r["name"] == "machine"), {})
    rates = Rates(records)
    lines = [
        f"# {machine.get('device', 'GPU')}",
        "",
        "```",
        *verdict(records),
        "```",
        "",
        f"torch {machine.get('torch')}, triton {machine.get('triton')}, sources {machine.get('sources')}",
        "",
        *_ceilings(records),
        *_steps(records),
        *_correct(records),
        *_rows(records, rates),
        *_compiled(records, rates),
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
        [
            r["name"],
            r["status"],
            str(r.get("seconds", "")),
            "" if r["status"] == "passed" else reason(r)[:200].replace("|", "/"),
        ]
        for r in records
        if r["kind"] in ("step", "environment") and r["name"] not in ("machine", "ceilings")
    ]
    return _table(("step", "what became of it", "s", "last words, unless it passed"), rows)


def _correct(records: list[Record]) -> list[str]:
    """Return the table of the worst errors of outputs and gradients, by op and shape."""
    by_case: dict[str, dict[str, str]] = {}
    for r in records:
        if r["kind"] == "correct":
            by_case.setdefault(r["case"], {})[r["dtype"]] = _checked(r)
    rows = [[case, *(cells.get(dtype, "-") for dtype in DTYPES.values())] for case, cells in by_case.items()]
    return _table(("error of outputs (at most 2), gradients (at most 3)", *DTYPES.values()), rows)


def _checked(r: Record) -> str:
    if r["status"] == BEGUN:
        return "**did not end**"
    if "ratios" not in r:
        return f"**{r['status']}**: {reason(r)[:120]}".replace("|", "/")
    return figures(r) if r["status"] == "passed" else f"**{reason(r)}** {figures(r)}"


_LEGEND = """\
us: of the GPU, by replays of a graph (* without one), cache cleared; called: host included, in a loop; rate: of
fastvit, in the unit of the limit that binds it: FLOPs of matmuls, two for a multiply-add, as eager needs them,
without what is recomputed (both passes of attention count as 3 forward passes; papers count 3.5), or bytes: every
input, parameter, output and gradient once a pass; of the limit: the share of the measured limit above""".splitlines()


def _rows(records: list[Record], rates: Rates) -> list[str]:
    alone, called, notes = [], [], []
    rows = [r for r in records if r["kind"] == "row"]
    with_graphs = (*PROVIDERS, *["graphs"] * any("graphs" in r.get("providers", {}) for r in rows))
    for r in rows:
        by_provider = r.get("providers", {})
        name = r["name"] if r["status"] == "passed" else f"{r['name']} (**{reason(r)[:160].replace('|', '/')}**)"
        reached = rates.cells(r["name"], by_provider.get("fastvit", {}).get("graph"))
        alone.append(
            [name, *(_us(by_provider, provider, "graph") for provider in PROVIDERS), *reached, _over(r, "graph")]
        )
        called.append([name, *(_us(by_provider, provider, "called") for provider in with_graphs), _over(r, "called")])
        notes += [
            f"- {r['name']}, {provider}: {words}"
            for provider, result in by_provider.items()
            for words in (result.get("skipped"), result.get("remark"))
            if words
        ]
    times = [f"{name} us" for name in with_graphs]
    return [
        *_table(["the GPU alone", *times[: len(PROVIDERS)], "rate", "of the limit", "us / fastvit's"], alone),
        *_table(["called", *times, "us / fastvit's"], called),
        *_LEGEND * bool(alone),
        *notes,
    ]


def _over(r: Record, which: str) -> str:
    return ", ".join(f"{value:.2f}x {name}" for name, value in ratios(r, which).items())


def _us(providers: Record, name: str, which: str) -> str:
    """Format microseconds; * marks a GPU time without a graph."""
    time = providers.get(name, {}).get(which)
    if time is None:
        return "-"
    return f"{time['median'] * 1e6:,.1f}" + "*" * (which == "graph" and bool(providers[name].get("remark")))


def _compiled(records: list[Record], rates: Rates) -> list[str]:
    rows = []
    for r in records:
        if r["kind"] == "compiled":
            alone, called = (
                f"{r[which]['median'] * 1e6:,.1f}" if r.get(which) else "-" for which in ("graph", "called")
            )
            status = f"{r['status']} {reason(r)}".strip().replace("|", "/")
            rows.append([r["name"], alone, *rates.cells(r["name"], r.get("graph")), called, status])
    return _table(("torch.compile", "us", "rate", "of the limit", "us called", ""), rows)
