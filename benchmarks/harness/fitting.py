"""Fit training steps into budgets of memory: planned peaks against measured ones, and what is computed again.

    python -m benchmarks.harness.fitting benchmarks/results/cpu/fitting.json
    python -m benchmarks.harness.fitting benchmarks/results/nvidia_h200/fitting.json --device cuda

The budgets of a model lie at a quarter, a half and three quarters of the way from its least peak to that of recomputing
nothing. At each, a step runs with the choices of `fastvit.fit`, and its peak is read from the allocator. `checkpointed`
is what the fewest whole blocks within the same budget compute again. On a CPU ViT-L is only planned.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.harness.columns import make
from benchmarks.harness.provenance import commit, write_json
from benchmarks.harness.record import environment
from fastvit import study
from fastvit.study.fitting.choices import Choice, put_on
from fastvit.study.fitting.costs import blocks_of
from fastvit.study.fitting.words import in_words
from fastvit.study.memory import measurement
from fastvit.study.memory.step import DTYPES, Setting
from fastvit.study.sources.find import find

SHARES = 0.25, 0.5, 0.75


class Case(NamedTuple):
    model: str
    image_size: int
    batch: int
    measured: bool = True


CASES = {
    "cpu": (
        Case("vit_small_patch16_224", 224, 8),
        Case("vit_base_patch16_224", 224, 8),
        Case("vit_small_patch14_reg4_dinov2", 224, 8),
        Case("vit_small_patch16_dinov3", 256, 8),
        Case("vit_base_patch16_siglip_224", 224, 8),
        Case("vit_large_patch16_224", 224, 8, measured=False),
    ),
    "cuda": (
        Case("vit_base_patch16_224", 224, 128),
        Case("vit_large_patch16_224", 224, 64),
        Case("vit_base_patch14_reg4_dinov2", 518, 16),
        Case("vit_small_plus_patch16_dinov3", 512, 32),
        Case("vit_base_patch16_siglip_512", 512, 16),
    ),
}


def choose(model: nn.Module, choices: Sequence[Choice]) -> None:
    """Let each block recompute its choice."""
    for block, choice in zip(blocks_of(model).values(), choices, strict=True):
        put_on(block, choice)


def fit_at(case: Case, device: torch.device, dtype: str) -> list[dict[str, Any]]:
    """Return the results at every budget."""
    options: dict[str, Any] = {"batch": case.batch, "image_size": case.image_size, "dtype": dtype}
    options["device"] = device.type
    without_limit = study.fit(case.model, budget=1 << 60, **options)
    least, most = without_limit.frontier[0].peak, without_limit.alternatives[0].peak
    rows = []
    for share in SHARES:
        budget = int(least + share * (most - least))
        fit = study.fit(case.model, budget=budget, **options)
        whole = next((point.recomputed for point in fit.whole_blocks if point.peak <= budget), None)
        row = {
            "model": case.model, "image_size": case.image_size, "batch": case.batch, "share": share, "budget": budget,
            "planned": fit.peak, "recomputed": fit.recomputed, "least_recomputed": fit.least_recomputed,
            "checkpointed": whole, "words": in_words(fit.choices),
        }  # fmt: skip
        if case.measured:
            size, setting = (case.image_size, case.image_size), Setting("train", dtype)
            prepare = partial(choose, choices=fit.choices)
            row["measured"] = measurement.measure(
                find(case.model), "fastvit", size, case.batch, setting, device, prepare=prepare
            )
        rows.append(row)
        print(*render_rows([row]), sep="\n", flush=True)
    return rows


def render_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
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
        *render_rows(results["rows"]),
        "",
        "over measured: the planned peak; computed again, whole blocks: FLOPs over the step's, of fit and",
        "of the fewest checkpointed blocks within the budget; time, every block: of a step as called, the",
        "host included, over that of recomputing nothing, of fit and of checkpointing every block.",
        f"{where['device']}, {where['dtype']}, torch {where['torch']}, commit {results['commit'][:10]}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the result file, JSON")
    parser.add_argument("--device", choices=[*CASES], default="cpu")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), "float32" if args.device == "cpu" else "bfloat16"
    rows = [row for case in CASES[args.device] for row in fit_at(case, device, dtype)]
    write_json(args.file, {"commit": commit(), "environment": environment(device, DTYPES[dtype]), "rows": rows})
    print(*render(args.file), sep="\n")


if __name__ == "__main__":
    main()
