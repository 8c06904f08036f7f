"""Run everything that needs a GPU, the most important first.

    make gpu                                        # all that has not passed yet
    make gpu-first                                  # its first nine minutes: is all of it right, and how fast is it?
    python -m benchmarks.gpu --first --out FOLDER
    python -m benchmarks.gpu --list                 # the commands and their status
    python -m benchmarks.gpu --steps tests "bench model" --minutes 9
    python -m benchmarks.gpu --rehearse             # every kind of command in miniature, on a CPU

Every command is a process of its own with a time limit. The results folder, benchmarks/results/<gpu>, then has all that
is to be kept: results.jsonl, every row and what became of every command, a line each, written at once; table.md, made
of it; log/, what each command printed; and the files of the benchmarks. A second call continues with what is missing or
has failed, unless code or device have changed. Exit status: 0 if all is done and right, 1 if not, 2 if the run could
not begin.
"""

from __future__ import annotations

import importlib.util
import math
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import commands, summary
from benchmarks.gpu.results_file import DONE, REHEARSAL, ResultsFile, device_name, results_folder
from benchmarks.gpu.runner import Command, Runner
from benchmarks.harness.program import parser
from benchmarks.harness.provenance import commit, write_text
from benchmarks.harness.record import environment
from fastvit._base.output import not_writable
from fastvit.cli import terminal
from fastvit.study.machine import why_no_gpu

_PACKAGES = ("triton", "pytest", "pytest-benchmark", "rich")


def main(arguments: list[str] | None = None) -> int:
    options = parser("benchmarks.gpu", __doc__)
    options.add_argument("--first", action="store_true", help="only the first nine minutes")
    options.add_argument("--minutes", type=float, help="for all of it; default: 9 with --first, else no limit")
    options.add_argument("--steps", nargs="+", metavar="PREFIX", help='only these commands: tests, or "bench model"')
    options.add_argument("--list", action="store_true", help="print the commands and their status")
    options.add_argument("--rehearse", action="store_true", help="every kind of command in miniature, on a CPU")
    options.add_argument("--out", type=Path, help="results folder; default benchmarks/results/<gpu>")
    chosen = options.parse_args(arguments)
    if not chosen.list and (reason := complaint(rehearse=chosen.rehearse)):
        print(reason, file=sys.stderr)
        return 2
    device = device_name(chosen.rehearse or not torch.cuda.is_available())
    folder = (chosen.out or results_folder(device)).resolve()
    every = commands.rehearsal(folder) if chosen.rehearse else commands.first(folder)
    if not (chosen.rehearse or chosen.first):
        every += commands.rest(folder)
    if chosen.steps and not (every := [c for c in every if c.name.startswith(tuple(chosen.steps))]):
        options.error(f"no command begins with {' or '.join(map(repr, chosen.steps))}")
    if reason := not_writable(folder):
        print(f"{reason}; --out chooses another folder", file=sys.stderr)
        return 2
    results = ResultsFile(folder, device)
    if chosen.list:
        for command in every:
            status = results.status("step", command.name)
            print(f"{status:<10} {command.name:<34} python {' '.join(command.words)}")
        return 0
    seconds = 60 * chosen.minutes if chosen.minutes is not None else commands.FIRST if chosen.first else math.inf
    try:
        return run(results, every, seconds)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"results are in {folder}, and the same command continues") from None


def complaint(*, rehearse: bool) -> str:
    """Return why the run cannot begin, or ""."""
    if not rehearse and (reason := why_no_gpu()):
        return (
            f"make gpu needs a GPU: {reason}, in {sys.executable}.\n"
            "fastvit doctor says more; --rehearse runs every command in miniature without one."
        )
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name.replace("-", "_")) is None]
    words = " ".join(missing)
    return f"make gpu: missing {words}: {sys.executable} -m pip install {words}" if missing else ""


def run(results: ResultsFile, every: Sequence[Command], seconds: float) -> int:
    """Run the commands for at most so many seconds. Return the exit status."""
    runner = Runner(results, seconds)
    runner.say(f"{results.device}, commit {commit()}, sources {results.code}, results in {results.folder}")
    kind = torch.device("cpu" if results.device == REHEARSAL else "cuda")
    facts = environment(kind, torch.bfloat16) | {"device": results.device, "commit": commit()}
    results.add("environment", "machine", "passed", **facts)
    statuses: dict[str, str] = {}
    try:
        statuses = runner.run(every)
    finally:
        records = results.records()
        write_text(results.folder / "table.md", summary.markdown(records))
    counts = Counter(statuses.values()).most_common()
    print(f"{len(statuses)} commands: {', '.join(f'{count} {status}' for status, count in counts)}")
    print(*summary.verdict(records), f"see {results.folder / 'table.md'}", sep="\n", flush=True)
    return int(any(status not in DONE for status in statuses.values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the commands, too
    sys.exit(terminal.guarded(main, name="benchmarks.gpu"))
