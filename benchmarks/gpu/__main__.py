"""Run everything that needs a GPU, the most important first.

    make gpu                                        # all that has not passed yet
    make gpu-first                                  # its first nine minutes: is all of it right, and how fast is it?
    python -m benchmarks.gpu --first --out FOLDER
    python -m benchmarks.gpu --unpack FOLDER        # continue here from the results of another machine
    python -m benchmarks.gpu --list                 # the steps and their status
    python -m benchmarks.gpu --steps tests "bench model" --minutes 9
    python -m benchmarks.gpu --rehearse             # every kind of step in miniature, on a CPU

Every step is a process of its own with a time limit. The results folder, benchmarks/results/<gpu>, then has all that is
to be kept: results.jsonl, every result and what became of every step, a line each, written at once; table.md, made of
it; log.txt, what the steps printed; tuned_<gpu>.json, the launch choices measured; and the files of the benchmarks. A
second call continues with what is missing or has failed, unless code or device have changed. Exit status: 0 if all is
done and right, 1 if not, 2 if the run could not begin.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

from benchmarks.gpu import needs, rest, summary, verdict
from benchmarks.gpu.first import FirstMinutes, keep_tuned
from benchmarks.gpu.journal import REHEARSAL, Journal, read, results_folder
from benchmarks.gpu.plan import SECONDS, Plan
from benchmarks.gpu.runner import Step, StepRunner
from benchmarks.harness.provenance import commit, write_text
from fastvit._output import not_writable, write_file
from fastvit.kernels import _tuned


def run(journal: Journal, first: FirstMinutes | None, steps: list[Step], seconds: float) -> int:
    """Run the first minutes, unless they are None, and then the steps, for at most so many seconds. Returns the exit
    status."""
    length = min(seconds, SECONDS) if steps else seconds
    plan = Plan(length, first.todo() if first else set(), first is not None and first.rehearse)
    if first is not None:
        journal.add("plan", "results", "passed", expected=first.expected())

    def left(runner: StepRunner) -> str:
        before = plan.left(runner.elapsed) if first and first.steps[-1].name not in runner.ended else 0.0
        return rest.left(steps, journal, runner.ended, runner.seconds - runner.elapsed, before)

    status = 0
    runner = StepRunner(journal, seconds, left)
    runner.say(f"{journal.device}, commit {commit()}, sources {journal.code}, results in {journal.folder}")
    runner.say(left(runner) or "all is done")
    try:
        if first is not None:
            first.run(runner, plan)
            status = int(not first.complete())
        if steps:
            status |= rest.execute(steps, runner)
    finally:
        runner.end()
        keep_tuned(journal)
        records = journal.records()
        page = summary.markdown(records, summary.Rates(records))
        write_text(journal.folder / "table.md", page)  # the last of several writers
    if steps:
        print(rest.summary(steps, journal))
    if first is not None:
        print(*summary.short(records), "", *verdict.lines(records), sep="\n")
    print(f"see {journal.folder / 'table.md'}", flush=True)
    return status


def unpack(bundle: Path, folder: Path | None) -> Path:
    """Copy the results of a run to where the next call continues from them, and its launch choices also into kernels/.
    Returns the folder of the results.

    Raises:
        SystemExit: the bundle has no result.
    """
    found = read(bundle / "results.jsonl")
    if not found:
        raise SystemExit(f"{bundle}: no results.jsonl with a result in it")
    folder = folder or results_folder(found[-1]["device"])
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(bundle.iterdir()):
        if path.is_file():
            write_file(folder / path.name, path.read_bytes())
            if path.name.startswith("tuned_"):
                write_file(_tuned.FOLDER / path.name, path.read_bytes())
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", action="store_true", help="only the first nine minutes")
    parser.add_argument("--minutes", type=float, help="for all of it; default: 9 with --first, else no limit")
    parser.add_argument(
        "--steps",
        nargs="+",
        metavar="PREFIX",
        help='without the first minutes, only these steps: tests, or "bench model"',
    )
    parser.add_argument("--list", action="store_true", help="print the steps and their status")
    parser.add_argument("--rehearse", action="store_true", help="every kind of step in miniature, on a CPU")
    parser.add_argument("--out", type=Path, help="results folder; default benchmarks/results/<gpu>")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER", help="copy the results in this folder, and end")
    chosen = parser.parse_args(arguments)
    if chosen.first and chosen.steps:
        parser.error("--first and --steps exclude each other")
    if chosen.unpack is not None:
        print(f"the results are in {unpack(chosen.unpack, chosen.out)}")
        return 0
    target, packages = ("gpu-first", ("triton",)) if chosen.first else ("gpu", ("triton", *rest.PACKAGES))
    if not chosen.list and (reason := needs.complaint(target, packages, rehearse=chosen.rehearse)):
        print(reason, file=sys.stderr)
        return 2
    gpu = torch.cuda.is_available() and not chosen.rehearse
    device = torch.cuda.get_device_name() if gpu else REHEARSAL
    folder = (chosen.out or results_folder(device)).resolve()
    steps = [] if chosen.first else rest.rehearsal_steps(folder) if chosen.rehearse else rest.gpu_steps(folder)
    if chosen.steps and not (steps := [step for step in steps if step.name.startswith(tuple(chosen.steps))]):
        parser.error(f"no step begins with {' or '.join(map(repr, chosen.steps))}")
    if reason := not_writable(folder):
        print(f"{reason}; --out chooses another folder", file=sys.stderr)
        return 2
    journal = Journal(folder, device, summary.markdown)
    first = None if chosen.steps else FirstMinutes(journal, chosen.rehearse)
    if chosen.list:
        for step in [*(first.steps if first else ()), *steps]:
            print(f"{journal.status(step.name):<10} {step.name:<34} python {' '.join(step.arguments)}")
        return 0
    seconds = 60 * chosen.minutes if chosen.minutes is not None else SECONDS if chosen.first else math.inf
    try:
        return run(journal, first, steps, seconds)
    except KeyboardInterrupt:
        print(f"stopped; what was found is in {folder}, and the next call continues with the rest", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
