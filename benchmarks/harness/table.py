"""The one table at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.cases import PROVIDERS
from benchmarks.harness.memory import exponent
from benchmarks.harness.record import Provider, Record
from benchmarks.harness.timing import Ceilings

_ABSENT = "-"
MODE = {"inference": "fwd", "training": "fwd+bwd"}


def header(environment: dict[str, Any], ceilings: Ceilings | None) -> list[str]:
    e = environment
    lines = [
        f"{e['path']}: {e['device']}, {e['dtype']}, {e['threads']} threads, "
        f"torch {e['torch']}, triton {e['triton']}, python {e['python']}"
    ]
    if ceilings is not None:
        lines.append(
            f"ceilings measured in this run: large copy {ceilings.bytes_per_second * 1e-9:,.0f} GB/s, "
            f"large matmul {ceilings.flops_per_second * 1e-9:,.0f} GFLOP/s"
        )
    return [
        *lines,
        "time: median ms of interleaved rounds; peak: MB that one step allocates; faster, smaller: provider / fused;",
        "ceiling: the share of it that fused reaches; error against float64: fused's / (eager's + ulp)",
    ]


def _milliseconds(p: Provider) -> str:
    if p.skipped:
        return "skipped"
    return _ABSENT if p.time is None else _digits(p.time.median * 1e3)


def _megabytes(p: Provider) -> str:
    return _ABSENT if p.peak_bytes is None else _digits(p.peak_bytes / 1e6)


def _digits(value: float) -> str:
    """Three significant digits, and all before the decimal point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}" if value < 1 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:.2f}x"


def render(records: Sequence[Record], ceilings: Ceilings | None) -> list[str]:
    """Lines of the table: one row per case and mode, a block per op; providers that nobody ran have no column."""
    providers = [name for name in PROVIDERS if any(name in r.providers for r in records)]
    rivals = [name for name in providers if name != "fused"]
    top = [""] * 2 + ["time"] * len(providers) + ["peak"] * len(providers)
    top += ["faster"] * len(rivals) + ["smaller"] * len(rivals) + ["", ""]
    names = ["case", "step", *providers, *providers, *rivals, *rivals, "ceiling", "error"]
    rows: list[list[str] | None] = []
    previous = ""
    for r in records:
        if previous and r.op != previous:
            rows.append(None)
        previous = r.op
        rows.append(_row(r, providers, rivals, ceilings))
    return _align(_grouped(top), names, rows)


def _row(r: Record, providers: Sequence[str], rivals: Sequence[str], ceilings: Ceilings | None) -> list[str]:
    figures = [r.providers.get(name, Provider()) for name in providers]
    memory = r.memory_ratios()
    fused = r.providers.get("fused", Provider())
    share = r.rates(ceilings).get("fused", {}).get("share_of_ceiling") if ceilings else None
    return [
        f"{r.op} {r.case}",
        MODE[r.mode],
        *map(_milliseconds, figures),
        *map(_megabytes, figures),
        *(_ratio(r.speedups.get(name)) for name in rivals),
        *(_ratio(memory.get(name)) for name in rivals),
        _ABSENT if share is None else f"{share:.0%}",
        _ABSENT if fused.error_ratio is None else f"{fused.error_ratio:.2f}",
    ]


def _grouped(top: Sequence[str]) -> list[str]:
    """Each label once, over the first column of its group."""
    return [label if i == 0 or label != top[i - 1] else "" for i, label in enumerate(top)]


def _align(top: Sequence[str], names: Sequence[str], rows: Sequence[list[str] | None]) -> list[str]:
    lines = [list(top), list(names), *(row for row in rows if row is not None)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]

    def line(cells: Sequence[str]) -> str:
        left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
        return "  ".join(left + right).rstrip()

    rule = "-" * len(line(names).ljust(sum(widths) + 2 * (len(widths) - 1)))
    return [line(top), line(names), rule, *("" if row is None else line(row) for row in rows), rule]


def notes(records: Sequence[Record]) -> list[str]:
    """What a reader must know that is not a number: what was left out and why, and which SDPA ran."""
    lines = [
        f"skipped: {r.op} {r.case} {MODE[r.mode]}, {name}: {p.skipped}"
        for r in records
        for name, p in r.providers.items()
        if p.skipped
    ]
    lines += sorted({f"note: {r.note}" for r in records if r.note})
    backends = sorted({r.sdpa_backend for r in records if r.sdpa_backend})
    if backends:
        lines.append(f"kernel behind the sdpa provider: {', '.join(backends)}")
    return lines


def growth(records: Sequence[Record]) -> dict[str, dict[str, tuple[list[int], list[int]]]]:
    """For the memory study: by op, by provider, token counts and peak bytes."""
    curves: dict[str, dict[str, tuple[list[int], list[int]]]] = {}
    for r in records:
        for name, p in r.providers.items():
            if p.peak_bytes is not None:
                tokens, peaks = curves.setdefault(r.op, {}).setdefault(name, ([], []))
                tokens.append(r.shape["N"])
                peaks.append(p.peak_bytes)
    return curves


def growth_lines(records: Sequence[Record]) -> list[str]:
    """Fitted exponents of peak memory against N, over all points and over the largest three."""
    lines = []
    for op, by_provider in growth(records).items():
        for name, (tokens, peaks) in by_provider.items():
            fits = [slice(None)] if len(tokens) >= 3 else []
            fits += [slice(-3, None)] if len(tokens) > 3 else []
            text = [
                f"N^{exponent(tokens[part], peaks[part]):.2f} over N = {tokens[part][0]}..{tokens[-1]}" for part in fits
            ]
            if text:
                lines.append(f"{op}, training step, {name}: peak ~ {', '.join(text)}")
    return lines
