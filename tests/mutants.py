"""Deliberate faults, put into a copy of the checkout one at a time: the test named beside each has to fail.

    python tests/mutants.py                   all of faults.toml (make mutants)
    python tests/mutants.py -k attention      those with this in their name or file
    python tests/mutants.py --check           only whether every fault still applies

The same tests have to pass without a fault. Exits 1 if one does not, or if a fault survives or does not apply.
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = multiprocessing.get_context("forkserver")  # every test starts behind the slowest imports
PROCESSES.set_forkserver_preload(["pytest", "torch"])


class Fault(NamedTuple):
    file: str
    name: str
    old: str
    new: str
    test: str

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


FAULTS = [
    Fault(file, name, *rest)
    for file, faults in tomllib.loads(Path(__file__).with_name("faults.toml").read_text()).items()
    for name, rest in faults.items()
]


def misfit(fault: Fault) -> str:
    """Why a fault does not apply to the checkout; empty if it does."""
    path = ROOT / fault.file
    if not path.is_file():
        return "there is no such file"
    count = path.read_text().count(fault.old)
    return "" if count == 1 else f"{count} times there: {fault.old!r}"


def copy_checkout(to: Path) -> None:
    """Tracked files, and those that git does not ignore, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_pytest(checkout: Path, arguments: list[str], output: str) -> None:
    """In a process of its own."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(checkout)
    sys.path[0] = str(checkout)  # which was this file's folder
    sys.exit(pytest.main(arguments))


def run_tests(checkout: Path, tests: list[str]) -> tuple[bool | None, str]:
    """Whether they passed, None if they did not run; and pytest's last line. A test alone may name its cases by -k."""
    arguments = ["-xq", "--tb=no", "-p", "no:cacheprovider"]
    for test in tests:
        node, _, cases = test.partition(" -k ")
        file, _, function = node.partition("::")
        arguments += [f"tests/test_{file}.py::{function}", *(["-k", cases] if cases and len(tests) == 1 else [])]
    output = checkout / "output.txt"
    process = PROCESSES.Process(target=run_pytest, args=(checkout, arguments, str(output)))
    process.start()
    process.join()
    return {0: True, 1: False}.get(process.exitcode), output.read_text().strip().splitlines()[-1]


def try_fault(fault: Fault, checkout: Path) -> tuple[str, str]:
    """-> verdict, explanation"""
    if problem := misfit(fault):
        return "does not apply", problem
    path, text = checkout / fault.file, (ROOT / fault.file).read_text()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        passed, line = run_tests(checkout, [fault.test])
    finally:
        path.write_text(text)
    return {False: "caught", True: "SURVIVED", None: "test did not run"}[passed], line


def run_all(faults: list[Fault], jobs: int) -> list[tuple[str, str]]:
    """Verdicts and what they are about: of every fault, and of each file's tests without one."""
    by_file: dict[str, list[str]] = {}
    for fault in faults:
        by_file.setdefault(fault.test.partition("::")[0], []).append(fault.test)
    checkouts: SimpleQueue[Path] = SimpleQueue()

    def work(what: Fault | str) -> tuple[str, str]:
        checkout, start = checkouts.get(), time.monotonic()  # one that no other worker has
        if isinstance(what, Fault):
            verdict, line = try_fault(what, checkout)
        else:
            passed, line = run_tests(checkout, list(dict.fromkeys(test.partition(" -k ")[0] for test in by_file[what])))
            verdict, what = "pass" if passed else "FAIL WITHOUT A FAULT", f"tests/test_{what}.py"
        checkouts.put(checkout)
        print(f"{verdict:8} {time.monotonic() - start:4.0f} s  {what}", flush=True)
        return verdict, f"{what}\n    {line}"

    with tempfile.TemporaryDirectory(prefix="fastvit-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        for checkout in (Path(folder, str(job)) for job in range(jobs)):
            copy_checkout(checkout)
            checkouts.put(checkout)
        return list(pool.map(work, [*faults, *by_file]))


def main() -> int:
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # none is needed, and some take a second
        "PYTHONDONTWRITEBYTECODE": "1",  # a file that changes twice in a second would be taken from its old bytecode
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="TEXT", help="only faults with this in their name or file")
    parser.add_argument("--list", action="store_true", help="print the faults and the tests that have to fail")
    parser.add_argument("--check", action="store_true", help="only ask whether every fault applies")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.k in str(fault)]
    if options.list:
        print(*(f"{fault}  [{fault.test}]" for fault in faults), sep="\n")
        return 0
    if options.check:
        bad = [f"{fault}: {problem}" for fault in faults if (problem := misfit(fault))]
    else:
        bad = [
            f"{verdict}: {what}" for verdict, what in run_all(faults, options.jobs) if verdict not in ("caught", "pass")
        ]
    print("", *bad, f"{len(faults)} faults, {len(bad)} not as they should be", sep="\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
