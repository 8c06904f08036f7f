"""Time whole models under torch.compile: with SDPA, with fused modules, and with fastvit's ops in the graph of SDPA's.

    python -m benchmarks.gpu.compiled --out FOLDER --model vit_base_patch16_224 --provider sdpa

A process compiles one provider's model in all styles and modes, times each, and writes it into results.jsonl at
once. What is there already is left out.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.results_file import DONE, MODES, ResultsFile, device_name, words
from benchmarks.harness.clock import Clock, Quantiles
from benchmarks.harness.draw import Draw
from benchmarks.harness.program import parser
from benchmarks.harness.providers import compiled
from benchmarks.harness.timing import measured, per_call
from benchmarks.harness.workloads import Step, Workload
from fastvit.cli.terminal import guarded

MODELS = ("vit_small_patch16_224", "vit_base_patch16_224")
RUNS = [*((model, provider) for model in MODELS for provider in ("sdpa", "fastvit")), (MODELS[1], "graph")]
REHEARSED = ("vit_cifar_small", "fastvit")
_STYLES = ("reduce-overhead", "default")


def warm(workload: Workload, provider: str, mode: str, device: torch.device, options: dict[str, Any]) -> Step:
    """Return the step, compiled and warm."""
    step, runner = workload.step("sdpa" if provider == "graph" else provider, mode, Draw(torch.bfloat16, device))
    runner.forward = compiled(provider, runner.forward, **options)
    for _ in range(4):  # the third and later ones may replay a graph
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return step


def main(arguments: list[str] | None = None) -> int:
    options = parser("benchmarks.gpu.compiled", __doc__)
    options.add_argument("--out", type=Path, required=True, help="folder of the results")
    options.add_argument("--model", required=True)
    options.add_argument("--provider", choices=("sdpa", "fastvit", "graph"), required=True)
    options.add_argument("--rehearse", action="store_true", help="one image of CIFAR on a CPU, compiled by no backend")
    chosen = options.parse_args(arguments)
    if not chosen.rehearse and not torch.cuda.is_available():
        options.error("no GPU; --rehearse runs the steps without one")
    if chosen.rehearse:
        torch.set_num_threads(1)
    device = torch.device("cpu" if chosen.rehearse else "cuda")
    sizes = {"B": 1, "px": 32, "depth": 1} if chosen.rehearse else {"B": 32, "px": 224}
    workload = Workload("model", {"name": chosen.model} | sizes)
    results, clock, failed = ResultsFile(chosen.out, device_name(chosen.rehearse)), Clock(device), 0
    for style, mode in itertools.product(_STYLES, MODES):
        name = f"model {workload} {chosen.provider}, {style}, {MODES[mode]}"
        if results.status("compiled", name) in DONE:
            continue
        about = {"model": chosen.model, "provider": chosen.provider, "style": style, "mode": mode}
        start = time.time()
        try:
            step = warm(
                workload, chosen.provider, mode, device, {"backend": "eager"} if chosen.rehearse else {"mode": style}
            )
            seconds = time.time() - start
            called = Quantiles.of(per_call({"": step}, device, seconds=0.1, rounds=3)[""])
            samples = measured([clock.time(step) for _ in range(20)])
        except Exception as error:
            results.add("compiled", name, "failed", reason=words(error), **about)
            failed += 1
            continue
        alone = asdict(Quantiles.of(samples)) if samples else None
        results.add("compiled", name, "passed", compiling=seconds, called=asdict(called), time=alone, **about)
        print(f"{name}: compiled in {seconds:.0f} s, {1e6 * called.median:,.0f} us called", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(guarded(main, name="benchmarks.gpu.compiled"))
