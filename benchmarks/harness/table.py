"""The tables of a run of the benchmarks, op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness.columns import WIDTH, make, wrapped
from benchmarks.harness.providers import OPS, PROVIDERS
from benchmarks.harness.record import Provider, Record
from benchmarks.harness.timing import Ceilings
from benchmarks.harness.workloads import on_the_page
from fastvit.study.memory.peak import LONG, growth_exponent

ONE = "the most important case of each op"
MODE = {"inference": "fwd", "training": "fwd+bwd"}
_LEGEND = {
    "case": "B batch, N tokens, D width, H heads, d head dimension, px image, patch; features out",
    "step": "fwd: forward without gradients; fwd+bwd: forward and the gradients of all that has one",
    "eager": """plain PyTorch in its fastest spelling, with N x N scores: q is scaled, not the scores; a product and a
        sum are one addcmul; patches are embedded by a linear layer, in models by a convolution""",
    "sdpa": "the same with torch's scaled_dot_product_attention",
    "compile": "the latter, or where an op has no attention the former, under torch.compile",
    "graph": "the same under fastvit.compile, with fastvit's ops in the graph",
    "fastvit": "this package",
    "graphs": """its modules and models after fastvit.graphs; "ms called" only, because the GPU alone runs the same
        kernels""",
    "ms": "median of interleaved rounds, at least seven, their order random",
    "MB": """the most that one step allocates at a time: activations, temporaries, results, gradients; those of
        parameters do not grow with N""",
    "/ fastvit": """that provider's figure in the row over fastvit's: above 1 where fastvit is faster or smaller; ~
        where the rounds do not tell the two apart: the interval of the median ratio of a round holds 1 at 95 % (by
        order statistics, for noise of any distribution)""",
    "ceiling": """share that fastvit reaches of what the measured limits allow; what moves less than 134 MB is held
        against a copy in the cache""",
    "error": "fastvit's against float64, over eager's + one ulp: at most 2 forward, 3 for gradients",
}


def legend(width: int = 80) -> list[str]:
    lines = [f"{term:<9} {' '.join(text.split())}" for term, text in _LEGEND.items()]
    return wrapped(lines, min(width, 80), indent=10)


def header(environment: dict[str, Any], ceilings: Ceilings) -> list[str]:
    e, cached = environment, ceilings.cached_bytes_per_second
    return [
        f"{e['path']}: {e['device']}, {e['dtype']}, {e['threads']} threads",
        f"torch {e['torch']}, triton {e['triton']}, python {e['python']}",
        f"limits: large copy {ceilings.bytes_per_second * 1e-9:,.0f} GB/s, "
        + (f"in the cache {cached * 1e-9:,.0f} GB/s, " if cached else "")
        + f"large matmul {ceilings.flops_per_second * 1e-9:,.0f} GFLOP/s",
    ]


def render(records: Sequence[Record], ceilings: Ceilings, width: int = WIDTH) -> Iterator[tuple[str, list[str]]]:
    """Yield (op, lines) for each op, with tables of times and of peak memory, then ("notes", lines). The memory study
    has too few rounds for times."""
    known = [*OPS]
    for op in sorted({r.op for r in records}, key=lambda op: (known.index(op) if op in known else len(known), op)):
        mine = _small_first([r for r in records if r.op == op])
        names = [name for name in PROVIDERS if any(name in r.providers for r in mine)]
        alone = [name for name in names if name != "graphs"]  # which has only a time as called
        times = [] if op.startswith("memory") else [*_table(mine, alone, "ms", ceilings, width), ""]
        if any(p.called for r in mine for p in r.providers.values()):
            times += [*_table([_as_called(r) for r in mine], names, "ms called", ceilings, width), ""]
        yield op, [*times, *_table(mine, alone, "MB", ceilings, width), *_remarks(mine, width)]
    if notes := wrapped(_notes(records), width):
        yield "notes", notes


def most_important(records: Sequence[Record], ceilings: Ceilings) -> Iterator[tuple[str, list[str]]]:
    """Yield the tables of the most important case of each op, with the number of cases in which fastvit is faster and
    slower, and of the memory study."""
    memory = [r for r in records if r.op.startswith("memory")]
    others = [r for r in records if r not in memory]
    shown = on_the_page()
    first = [replace(r, op=ONE, case=f"{r.op} {r.case}") for r in others if (r.op, r.case) in shown]
    for title, lines in render(first, ceilings):
        if title == ONE:
            yield title, [*lines, *_verdicts(others)]
    yield from (part for part in render(memory, ceilings) if part[0] != "notes")
    if notes := wrapped(_notes(records)):
        yield "notes", notes


def _verdicts(records: Sequence[Record]) -> Iterator[str]:
    """Yield in how many cases fastvit is faster than each other provider, and in how many slower."""
    yield ""
    for name in PROVIDERS:
        verdicts = Counter(
            "~" if not r.told_apart(name) else "faster" if ratio > 1 else "slower"
            for r in records
            if (ratio := r.time_ratios().get(name)) is not None
        )
        if verdicts:
            counts = ", ".join(f"{word} in {verdicts[word]}" for word in ("faster", "~", "slower"))
            yield f"all {verdicts.total()} cases with {name}: {counts}"


def _small_first(records: Sequence[Record]) -> list[Record]:
    """Sort by work, with the steps of a case together."""
    least: dict[str, tuple[int, int]] = {}
    for r in records:
        least[r.case] = min(least.get(r.case, (r.flops, r.moved_bytes)), (r.flops, r.moved_bytes))
    cases = sorted(least, key=lambda case: least[case])
    return sorted(records, key=lambda r: (cases.index(r.case), [*MODE].index(r.mode)))


def _table(records: Sequence[Record], names: list[str], unit: str, ceilings: Ceilings, width: int) -> list[str]:
    """Return one table. unit: "ms" for times, with the share of the ceilings and the error; "ms called"; "MB" for
    peaks."""
    rivals = [name for name in names if name != "fastvit"]
    rows = []
    for r in records:
        figures = [r.providers.get(name, Provider()) for name in names]
        if unit == "MB":
            cells = [_digits(p.peak_bytes, 1e-6) for p in figures]
            cells += [ratio(r.memory_ratios().get(name)) for name in rivals]
        else:
            cells = ["skipped" if p.skipped else _digits(p.time.median if p.time else None, 1e3) for p in figures]
            cells += [time_ratio(r, name) for name in rivals]
        if unit == "ms":
            error = r.providers.get("fastvit", Provider()).error_ratio
            share = r.share_of_ceiling("fastvit", ceilings)
            cells += ["-" if share is None else f"{share:.0%}", "-" if error is None else f"{error:.2f}"]
        rows.append([r.case, MODE[r.mode], *cells])
    columns = ["case", "step", *(f"{name}\n{unit}" for name in names), *(f"{name}\n/ fastvit" for name in rivals)]
    return make(columns + ["ceiling", "error"] * (unit == "ms"), rows, left=2, width=width)


def _as_called(r: Record) -> Record:
    called = {name: replace(p, time=p.called, over_fastvit=p.called_over_fastvit) for name, p in r.providers.items()}
    return replace(r, providers=called)


def in_a_line(r: Record) -> str:
    """Return fastvit's time, and the ratio to the fastest other; in the memory study peaks."""
    own = r.providers.get("fastvit", Provider())
    if r.op.startswith("memory"):
        ratios, figure = r.memory_ratios(), f"{_digits(own.peak_bytes, 1e-6):>7} MB"
    else:
        r = r if own.time else _as_called(r)
        time = r.providers.get("fastvit", Provider()).time
        ratios, figure = r.time_ratios(), f"{_digits(time.median if time else None, 1e3):>7} ms"
    if not ratios:
        return figure
    best = min(ratios, key=lambda name: ratios[name])
    shown = ratio(ratios[best]) if r.op.startswith("memory") else time_ratio(r, best)
    return f"{figure} {shown:>7} {best}"


def _digits(value: float | None, factor: float) -> str:
    """Format value * factor by three significant digits, and all before the decimal point."""
    if value is None:
        return "-"
    value *= factor
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}" if value < 1 else f"{value:.2f}"


def time_ratio(r: Record, name: str) -> str:
    value = r.time_ratios().get(name)
    return ratio(value) if value is None or r.told_apart(name) else f"~{ratio(value)}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _remarks(records: Sequence[Record], width: int) -> list[str]:
    """Return the remarks below a table: what was skipped and why, and exponents of growth."""
    each = [(f"{r.case} {MODE[r.mode]}, {name}", p) for r in records for name, p in r.providers.items()]
    lines = [f"skipped: {name}: {p.skipped}" for name, p in each if p.skipped]
    lines += [f"{name}: {p.remark}" for name, p in each if p.remark]
    return wrapped([*lines, *growth_lines(records)], width)


def _notes(records: Sequence[Record]) -> Iterator[str]:
    """Yield which images were used and which SDPA ran, once each, with the ops that this holds for."""
    ops: dict[str, dict[str, None]] = {}
    for r in records:
        for note in (r.note, r.sdpa_backend and f"sdpa runs {r.sdpa_backend}"):
            if note:
                ops.setdefault(note, {})[r.op] = None
    for note, holders in ops.items():
        yield f"{'; '.join(holders)}: {note}"


def growth(records: Sequence[Record]) -> dict[str, dict[str, tuple[list[int], list[int]]]]:
    """Return the memory study: by op and provider, token counts, the smallest first, and peak bytes."""
    curves: dict[str, dict[str, tuple[list[int], list[int]]]] = {}
    for r in sorted(records, key=lambda r: r.shape.get("N", 0)):
        for name, p in r.providers.items():
            if r.op.startswith("memory") and p.peak_bytes is not None:
                tokens, peaks = curves.setdefault(r.op, {}).setdefault(name, ([], []))
                tokens.append(r.shape["N"])
                peaks.append(p.peak_bytes)
    return curves


def growth_lines(records: Sequence[Record]) -> list[str]:
    """Return lines with the fitted exponents of peak memory against N, and the sizes that they are fitted to."""
    lines = []
    for by_provider in growth(records).values():
        missing = []
        for name, (tokens, peaks) in by_provider.items():
            if fit := growth_exponent(tokens, peaks):
                lines.append(f"{name}: peak grows as N^{fit.exponent:.2f} from N = {fit.first} to {fit.last}")
            else:
                missing.append(name)
        if missing:
            needs = f"three sizes, the largest of at least {LONG} tokens"
            lines.append(f"{', '.join(missing)}: no exponent of growth, which needs {needs}")
    return lines
