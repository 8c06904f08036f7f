"""The first nine minutes on a GPU: is all of it right, and how fast is it?

    make gpu-first                                     # or python -m benchmarks.gpu.first
    python -m benchmarks.gpu.first --out FOLDER
    python -m benchmarks.gpu.first --unpack FOLDER     # what another machine's run has brought back: go on with it here
    python -m benchmarks.gpu.first --rehearse          # every step in miniature, on a CPU

One deadline is kept; later steps are cut, not earlier ones. All that is found goes at once into results.jsonl in the
results folder, and into table.md; log.txt has what the steps printed. These three files are what has to come back. A
second call goes on with what is missing. Exit status: 0 if all is done and right, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import wait
from pathlib import Path

import torch

from benchmarks.gpu import compiled, correct, headline, summary
from benchmarks.gpu.journal import DONE, REHEARSAL, Journal, read, results_folder
from benchmarks.gpu.runner import Runner, Step
from fastvit._output import write_file
from fastvit.kernels import _tuned

SECONDS = 535.0  # 9 minutes less what ending takes
# Seconds since the start by which a part has to end
COMPILED, CHECKED, SANITIZED, TIMED, MODELS_TIMED = 110.0, 220.0, 265.0, 440.0, 490.0
MEMORY = 8e9  # bytes that a process of correctness checks may need


def run(folder: Path, rehearse: bool, seconds: float = SECONDS) -> int:
    """All steps, in order of worth, and the summary; the exit status."""
    journal = summary.journal(folder, torch.device("cpu" if rehearse else "cuda"))
    runner = Runner(journal, seconds, {"FASTVIT_STRICT": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"})
    shared = ("--out", str(folder), *["--rehearse"] * rehearse)

    def step(name: str, module: str, *arguments: str, limit: float = 3600.0) -> Step:
        return Step(name, ("-m", f"benchmarks.gpu.{module}", *shared, *arguments), limit)

    runner.say(f"{journal.device}, sources {journal.code}, results in {folder}")
    checks = [step(f"correct {name}", "correct", "--group", name) for name in correct.groups(rehearse)]
    sanitizer = _sanitizer(rehearse)
    unfinished = any(not journal.done("step", step.name) for step in (*checks, sanitizer)) or _rows_left(journal)
    with tempfile.TemporaryDirectory() as scratch:
        go = Path(scratch) / "go"
        try:
            if unfinished:
                runner.run([step("environment", "probe", limit=60)], again=True)
            models = runner.begin(
                [
                    step(f"torch.compile {provider} {model}", "compiled", "--model", model, "--provider", provider,
                         "--go", str(go), "--until", str(time.time() + SANITIZED - runner.elapsed))
                    for model, provider in compiled.RUNS
                    if not rehearse or model == compiled.MODELS[-1]
                ],
                until=MODELS_TIMED,
            )  # fmt: skip
            if unfinished:
                runner.run([step("compile", "precompile")], until=COMPILED, again=True)
            runner.run(checks, workers=_workers(runner), until=CHECKED)
            runner.run([sanitizer], until=SANITIZED)
            _rows(runner, step("rows, first part", "headline", "--part", "first"), until=TIMED)
            go.touch()
            wait(models)
            _rows(runner, step("rows, second part", "headline", "--part", "second"))
        finally:
            runner.end()
    records = journal.records()
    print(*summary.short(records), sep="\n", flush=True)
    missing = _rows_left(journal)
    bad = [r["name"] for r in records if r["kind"] != "step" and r["status"] not in DONE]
    print(f"{len(records)} results, {len(bad)} of them bad, {len(missing)} rows missing; see {folder / 'table.md'}")
    return int(bool(missing) or any(r["status"] not in DONE for r in records))


def _workers(runner: Runner) -> int:
    """Of the checks: as many as memory and cores allow."""
    machine = runner.journal.get("environment", "machine") or {}
    return max(2, min(6, int(machine.get("memory_bytes", 0) / MEMORY), (os.cpu_count() or 1) // 2))


def _sanitizer(rehearse: bool) -> Step:
    arguments = ("--rehearse", "--op", "dropout") if rehearse else ("--tool", "memcheck", "--op", "attention")
    return Step("sanitize", ("-m", "benchmarks.gpu.sanitize", *arguments))


def _rows(runner: Runner, step: Step, until: float = SECONDS) -> None:
    """Again without the row that ended the process, as long as there is progress."""
    since = time.time()
    part = step.arguments[-1]
    rehearse = runner.journal.device == REHEARSAL
    while left := headline.left(runner.journal, rehearse, part, since):
        runner.run([Step(step.name, (*step.arguments, "--since", str(since)))], until=until)
        if headline.left(runner.journal, rehearse, part, since) == left:
            return


def _rows_left(journal: Journal) -> list[str]:
    rehearse = journal.device == REHEARSAL
    return [name for part in headline.PARTS for *_, name in headline.left(journal, rehearse, part, time.time())]


def unpack(bundle: Path, folder: Path | None) -> Path:
    """Puts the files of a run's folder where a run goes on with them; where that is."""
    found = read(bundle / "results.jsonl")
    if not found:
        raise SystemExit(f"{bundle}: no results.jsonl with a result in it")
    folder = folder or results_folder(found[-1]["device"]) / "first"
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(bundle.iterdir()):
        if path.is_file():
            write_file((_tuned.FOLDER if path.name.startswith("tuned_") else folder) / path.name, path.read_bytes())
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="results folder; default benchmarks/results/<gpu>/first")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the deadline")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER", help="take over the results in this folder, and end")
    parser.add_argument("--rehearse", action="store_true", help="every step in miniature, on a CPU")
    chosen = parser.parse_args(arguments)
    if chosen.unpack is not None:
        print(f"the results are in {unpack(chosen.unpack, chosen.out)}")
        return 0
    if not (chosen.rehearse or torch.cuda.is_available()):
        parser.error("no GPU; --rehearse runs the steps in miniature without one")
    device = REHEARSAL if chosen.rehearse else torch.cuda.get_device_name()
    return run((chosen.out or results_folder(device) / "first").resolve(), chosen.rehearse, chosen.seconds)


if __name__ == "__main__":
    sys.exit(main())
