"""Time whole models under torch.compile: with SDPA, with fused modules, and with fastvit's ops in the graph of SDPA's.

    python -m benchmarks.gpu.compiled --out FOLDER --model vit_base_patch16_224 --provider sdpa

A process compiles one provider's model in all styles and modes, times each, and writes it into the journal at once.
What the journal has is left out.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu.journal import device_of, open_journal, parser, words
from benchmarks.gpu.summary import MODES
from benchmarks.harness.clock import Clock, Quantiles
from benchmarks.harness.draw import Draw
from benchmarks.harness.providers import compiled
from benchmarks.harness.timing import measured, per_call
from benchmarks.harness.workloads import Step, Workload, workloads

MODELS = ("vit_small_patch16_224", "vit_base_patch16_224")
REHEARSED = "vit_cifar_small"
BATCH = 32
PROVIDERS = ("sdpa", "fastvit", "graph")
_STYLES = ("reduce-overhead", "default")


def runs(rehearse: bool) -> list[tuple[str, str]]:
    """Return (model, provider) of every process."""
    if rehearse:
        return [(REHEARSED, "fastvit")]
    return [*((model, provider) for model in MODELS for provider in ("sdpa", "fastvit")), (MODELS[1], "graph")]


def results(model: str, provider: str, rehearse: bool) -> dict[str, dict[str, str]]:
    """Return by name the results that a process of `runs` has to find, in the order in which it compiles them."""
    workload, about = _workload(model, rehearse), {"model": model, "provider": provider}
    return {
        f"model {workload} {provider}, {style}, {title}": about | {"style": style, "mode": mode}
        for style in (_STYLES[-1:] if rehearse else _STYLES)
        for mode, title in MODES.items()
    }


def _workload(model: str, rehearse: bool) -> Workload:
    models = workloads("quick" if rehearse else "headline", ops=("model",))
    (workload,) = [w for w in models if w.sizes["name"] == model and w.sizes["B"] == (1 if rehearse else BATCH)]
    return workload


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
    options = parser(__doc__)
    options.add_argument("--model", choices=(*MODELS, REHEARSED), required=True)
    options.add_argument("--provider", choices=PROVIDERS, required=True)
    chosen = options.parse_args(arguments)
    device = device_of(chosen)
    journal, clock = open_journal(chosen.out, device), Clock(device)
    workload, failed = _workload(chosen.model, chosen.rehearse), 0
    for name, about in results(chosen.model, chosen.provider, chosen.rehearse).items():
        if journal.done("compiled", name):
            continue
        compiler: dict[str, Any] = {"mode": about["style"]}
        if chosen.rehearse:
            compiler = {"inner" if chosen.provider == "graph" else "backend": "eager"}
        start = time.time()
        try:
            step = warm(workload, chosen.provider, about["mode"], device, compiler)
            seconds = time.time() - start
            called = Quantiles.of(per_call({"": step}, device, seconds=0.1, rounds=3)[""])
            samples = measured([clock.time(step) for _ in range(20)])
        except Exception as error:
            journal.add("compiled", name, "failed", reason=words(error), **about)
            failed += 1
            continue
        alone = asdict(Quantiles.of(samples)) if samples else None
        journal.add("compiled", name, "passed", compiling=seconds, called=asdict(called), graph=alone, **about)
        print(f"> {name}: compiled in {seconds:.0f} s, {1e6 * called.median:,.0f} us called", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
