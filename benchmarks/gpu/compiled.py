"""Time whole models under torch.compile: with SDPA, with fused modules, and with fastvit's ops in the graph of SDPA's.

    python -m benchmarks.gpu.compiled --out FOLDER --model vit_base_patch16_224 --provider sdpa --go FILE --until TIME

Several such processes compile at the same time. Each creates a file next to `go` when it is ready, waits for `go`, and
then times the models that it has compiled, one process after the other. A compilation that might not end before
`--until` is not begun.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.gpu import process, summary
from benchmarks.gpu.journal import Journal, words
from benchmarks.gpu.runner import CUT
from benchmarks.harness.draw import Draw
from benchmarks.harness.providers import compiled
from benchmarks.harness.timing import measured, per_call
from benchmarks.harness.workload import Step
from benchmarks.harness.workloads import Workload, workloads
from fastvit.tuning.clock import Clock, Quantiles

MODELS = ("vit_small_patch16_224", "vit_base_patch16_224")
REHEARSED = "vit_cifar_small"
BATCH = 32
PROVIDERS = ("sdpa", "fastvit", "graph")
LONGEST = 90.0  # seconds, assumed for the first compilation of a process
_STYLES = ("reduce-overhead", "default")
_MODES = ("training", "inference")  # the longer one first: its time bounds the next one's


def runs(rehearse: bool) -> list[tuple[str, str]]:
    """Return (model, provider) of every process."""
    if rehearse:
        return [(REHEARSED, provider) for provider in PROVIDERS]
    return [*((model, provider) for model in MODELS for provider in ("sdpa", "fastvit")), (MODELS[1], "graph")]


def results(model: str, provider: str, rehearse: bool) -> dict[str, dict[str, str]]:
    """Return the results that a process of `runs` has to find, by name, in the order in which it compiles them."""
    return {
        f"model {_workload(model, rehearse)} {provider}, {style}, {summary.MODES[mode]}": {
            "model": model,
            "provider": provider,
            "style": style,
            "mode": mode,
        }
        for style in (_STYLES[-1:] if rehearse else _STYLES)
        for mode in _MODES
    }


def ready(go: Path, model: str, provider: str) -> Path:
    """Return the file by which a process says that it has compiled all that it could."""
    return go.with_name(f"{provider} {model} is ready")


def _workload(model: str, rehearse: bool) -> Workload:
    models = workloads("quick" if rehearse else "headline", ops=("model",))
    (found,) = [w for w in models if w.sizes["name"] == model and w.sizes["B"] == (1 if rehearse else BATCH)]
    return found


def warm(workload: Workload, provider: str, mode: str, device: torch.device, options: dict[str, Any]) -> Step:
    """Return the step, compiled and warm."""
    step, runner = workload.step("sdpa" if provider == "graph" else provider, mode, Draw(torch.bfloat16, device))
    runner.forward = compiled(provider, runner.forward, **options)
    for _ in range(4):  # the third and later ones may replay a graph
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return step


def compile_all(journal: Journal, chosen: Any, device: torch.device) -> dict[str, tuple[Step, dict[str, Any]]]:
    """Compile what is not done yet. Returns by name the step and its record so far. What fails and what is not begun
    goes into the journal with the reason."""
    found: dict[str, tuple[Step, dict[str, Any]]] = {}
    longest = 0.0
    for name, about in results(chosen.model, chosen.provider, chosen.rehearse).items():
        if journal.done("compiled", name):
            continue
        start = time.time()
        if (needed := longest or LONGEST) > chosen.until - start:
            reason = f"not begun: {needed:.0f} s may be needed, and {max(chosen.until - start, 0):.0f} s were left"
            journal.add("compiled", name, "cut", reason=reason, **about)
            continue
        options: dict[str, Any] = {"mode": about["style"]}
        if chosen.rehearse:
            options = {"inner" if chosen.provider == "graph" else "backend": "eager"}
        workload = _workload(chosen.model, chosen.rehearse)
        try:
            step = warm(workload, chosen.provider, about["mode"], device, options)
        except Exception as error:
            journal.add("compiled", name, "failed", reason=words(error), compiling=[start, time.time()], **about)
            continue
        longest = max(longest, time.time() - start)
        found[name] = step, {**about, "compiling": [start, time.time()]}
        print(f"> {about['style']}, {about['mode']}: compiled in {time.time() - start:.0f} s", flush=True)
    return found


def take_turn(lock: Path) -> TextIO:
    """Wait until no other process has the turn. It lasts as long as the file that this returns is open, so at most as
    long as the process."""
    import fcntl  # Windows has no fcntl, but imports this file

    file = lock.open("a")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def main(arguments: list[str] | None = None) -> int:
    parser = process.arguments(__doc__)
    parser.add_argument("--model", choices=(*MODELS, REHEARSED), required=True)
    parser.add_argument("--provider", choices=PROVIDERS, required=True)
    parser.add_argument("--go", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds since 1970 by which all is compiled")
    chosen = parser.parse_args(arguments)
    device = process.device_of(chosen)
    journal = process.journal(chosen.out, device)
    found = compile_all(journal, chosen, device)
    ready(chosen.go, chosen.model, chosen.provider).touch()
    while not chosen.go.exists():
        time.sleep(0.05)
    turn = take_turn(chosen.go.with_name("turn"))  # held until the process has ended and freed its GPU memory
    clock = Clock(device)  # measures the frequency of the GPU's counter, so only now
    for name, (step, about) in found.items():
        start = time.time()
        called = Quantiles.of(per_call({"": step}, device, seconds=0.1, rounds=3)[""])
        samples = measured([clock.time(step) for _ in range(20)])
        alone = asdict(Quantiles.of(samples)) if samples else None
        about["timed"] = [start, time.time()]
        journal.add("compiled", name, "passed", called=asdict(called), graph=alone, **about)
        print(f"> {about['style']}, {about['mode']}: {1e6 * called.median:,.0f} us called", flush=True)
    missing = [
        r["status"]
        for name in results(chosen.model, chosen.provider, chosen.rehearse)
        if not journal.done("compiled", name) and (r := journal.get("compiled", name))
    ]
    assert not turn.closed
    return 0 if not missing else CUT if set(missing) == {"cut"} else 1


if __name__ == "__main__":
    sys.exit(main())
