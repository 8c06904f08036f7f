"""Show what `fastvit.fit` chose at three budgets of memory, results/*/fitting.json: planned peaks against measured
ones, and what is computed again. A file of a GPU has the times of a step, too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.columns import make


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    def gib(value: int | None) -> str:
        return "-" if value is None else f"{value / 2**30:.2f}"

    timed, lines, last = any("seconds" in r for r in rows), [], ""
    for r in rows:
        measured, times = r.get("measured"), r.get("seconds")
        model = f"{r['model']}\n{r['image_size']} px, batch {r['batch']}"
        cells = [model if model != last else "", *map(gib, (r["budget"], r["planned"], measured))]
        cells.append("-" if measured is None else f"{100 * (r['planned'] / measured - 1):+.1f} %")
        shares = r["recomputed"], r["checkpointed"]
        cells += ["-" if share is None else f"{100 * share:.1f} %" for share in shares]
        for way in ("fit", "every block") * timed:
            cells.append("-" if times is None else f"{times[way] / times['nothing']:.2f}")
        lines.append(cells)
        last = model
    heads = ["", "budget\nGiB", "planned\nGiB", "measured\nGiB", "over\nmeasured", "computed\nagain", "whole\nblocks"]
    return make([*heads, *["time", "every\nblock"] * timed], lines)


def render(path: Path) -> list[str]:
    """Return the table of a result file."""
    results = json.loads(path.read_text())
    where = results["environment"]
    return [
        *_table(results["rows"]),
        "",
        "over measured: the planned peak; computed again, whole blocks: FLOPs over the step's, of fit and",
        "of the fewest checkpointed blocks within the budget; time, every block: of a step as called, the",
        "host included, over that of recomputing nothing, of fit and of checkpointing every block.",
        f"{where['device']}, {where['dtype']}, torch {where['torch']}, commit {results['commit'][:10]}",
    ]
