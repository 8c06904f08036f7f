"""Whole models under torch.compile: eager with SDPA, fused, and the former with fastvit's ops in its graph; compiled at
once, timed when the file `go` is there.

python -m benchmarks.gpu.compiled --out FOLDER --model vit_base_patch16_224 --provider fused --go FILE --until TIME
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import summary
from benchmarks.gpu.journal import words
from benchmarks.harness.draw import Draw
from benchmarks.harness.providers import compiled
from benchmarks.harness.timing import Clock, Quantiles, measured, per_call
from benchmarks.harness.workloads import Step, Workload, workloads

MODELS = ("vit_small_patch16_224", "vit_base_patch16_224")
RUNS = (*((model, provider) for model in MODELS for provider in ("sdpa", "fused")), (MODELS[1], "graph"))
_STYLES = ("reduce-overhead", "default")


def warm(workload: Workload, provider: str, mode: str, device: torch.device, options: dict[str, Any]) -> Step:
    """The step, compiled and warm."""
    step, runner = workload.step("sdpa" if provider == "graph" else provider, mode, Draw(torch.bfloat16, device))
    runner.forward = compiled(provider, runner.forward, **options)
    for _ in range(4):  # the third and later ones may replay a graph
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return step


def main(arguments: list[str] | None = None) -> int:
    parser = summary.arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--provider", choices=sorted({name for _, name in RUNS}), required=True)
    parser.add_argument("--go", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds since 1970 after which nothing is compiled")
    chosen = parser.parse_args(arguments)
    device = summary.device_of(chosen)
    journal = summary.journal(chosen.out, device)
    models = workloads("quick" if chosen.rehearse else "headline", ops=("model",))
    (workload,) = [w for w in models if chosen.rehearse or (w.sizes["name"], w.sizes["B"]) == (chosen.model, 32)]
    steps: dict[str, Step] = {}
    clock, cut = Clock(device), []
    for style in _STYLES[-1:] if chosen.rehearse else _STYLES:
        for mode, title in summary.MODES.items():
            name = f"model {workload} {chosen.provider}, {style}, {title}"
            if journal.done("compiled", name):
                continue
            if time.time() > chosen.until:
                cut.append(name)
                continue
            start = time.perf_counter()
            options: dict[str, Any] = {"mode": style}
            if chosen.rehearse:
                options = {"inner" if chosen.provider == "graph" else "backend": "eager"}
            try:
                steps[name] = warm(workload, chosen.provider, mode, device, options)
                print(f"{name}: compiled in {time.perf_counter() - start:.0f} s", flush=True)
            except Exception as error:
                cut.append(name)
                journal.add("compiled", name, "failed", reason=words(error))
    while not chosen.go.exists():
        time.sleep(0.05)
    for name, step in steps.items():
        called = Quantiles.of(per_call(step, device))
        samples = measured([clock.time(step) for _ in range(20)])
        alone = asdict(Quantiles.of(samples)) if samples else None
        journal.add("compiled", name, "passed", called=asdict(called), graph=alone)
        print(f"> {name}: {1e6 * called.median:,.0f} us called", flush=True)
    return int(bool(cut))


if __name__ == "__main__":
    sys.exit(main())
