"""Mutation testing with cosmic-ray: change one thing in a copy of the checkout; a test of its room has to fail.

    python -m tests.mutation.run --list                     rooms and the mutants drawn of their files
    python -m tests.mutation.run dropout kernels/rotary.py  a room and a file; all rooms without a name
    python -m tests.mutation.run --since main               only lines that changed since `main`

A room is some files of code and the tests that have to notice a change there (rooms.toml). Results are kept in out/: a
second call runs only mutants without a result for this file, these tests and their helpers. Other code may change.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkItem, WorkResult

from fastvit._output import write_file
from tests.mutation import operators, summary
from tests.mutation.rooms import ROOT, Mutant, Room, changed_lines, in_random_order, read_rooms

plugins.OPERATOR_PROVIDERS["fastvit"] = operators.PROVIDER
KINDS = {kind: [f"core/{name}" for name in names] for kind, names in operators.LIBRARY.items()}
KINDS |= {kind: [f"fastvit/{kind}"] for kind in operators.OURS}
SESSION = ROOT / "out" / "mutants.sqlite"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not nightly"]


class Job:
    """A mutant that compiles, with its text and a name that holds for this code and these tests."""

    def __init__(self, mutant: Mutant, before: str, after: str, key: str) -> None:
        self.mutant, self.id = mutant, sha256(f"{key} {before} {after}".encode()).hexdigest()
        self.line, self.becomes = _difference(before, after)

    def work_item(self) -> WorkItem:
        path, _, operator, occurrence, (first, last), _ = self.mutant
        return WorkItem.single(self.id, MutationSpec(path, operator, occurrence, (first, 0), (last + 1, 0)))

    def __str__(self) -> str:
        return f"{self.mutant.path}:{self.mutant.lines[0]} {self.mutant.kind}: {self.line} -> {self.becomes}"


def _difference(before: str, after: str) -> tuple[str, str]:
    """The lines that differ, each text on one line."""
    old, new = before.split("\n"), after.split("\n")
    start = next(i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
    shorter = min(len(old), len(new)) - start
    end = next((i for i in range(shorter) if old[-1 - i] != new[-1 - i]), shorter)
    old_lines, new_lines = (" ".join("\n".join(lines[start : len(lines) - end]).split()) for lines in (old, new))
    return old_lines, new_lines


def mutants_of(path: str) -> Iterator[Mutant]:
    """All mutants of a file but those of annotations and errors' messages."""
    source = operators.Source((ROOT / path).read_text())
    nodes, quiet = [*ast_nodes(get_ast(source.text))], source.quiet()
    for kind, names in KINDS.items():
        for name in names:
            operator = plugins.get_operator(name)()
            places = ((node, *place) for node in nodes for place in operator.mutation_positions(node))
            for occurrence, (node, start, end) in enumerate(places):
                at = source.offset(*start)
                keyword_only = getattr(node.parent, "type", "") in ("parameters", "lambdef")  # the * of f(a, *, b)
                if not keyword_only and not any(first <= at < last for first, last in quiet):
                    text = source.text.splitlines()[start[0] - 1].strip()
                    yield Mutant(path, kind, name, occurrence, (start[0], end[0]), text)


def draw(path: str, room: Room, per_file: int, seed: int, command: str, lines: set[int] | None) -> list[Job]:
    """Draw mutants that compile and differ from the code and from each other."""
    text = (ROOT / path).read_text()
    tests = [*map(ROOT.joinpath, room.tests), ROOT / "tests/conftest.py", *sorted(ROOT.glob("tests/helpers/*.py"))]
    key = sha256("".join([command, *(test.read_text() for test in tests)]).encode()).hexdigest()
    found = [m for m in mutants_of(path) if lines is None or not lines.isdisjoint(range(m.lines[0], m.lines[1] + 1))]
    jobs: list[Job] = []
    seen = {ast.dump(ast.parse(text))}
    for mutant in in_random_order(found, seed):
        if len(jobs) == per_file:
            break
        after = mutate_code(text, plugins.get_operator(mutant.operator)(), mutant.occurrence)
        try:
            tree = ast.dump(ast.parse(after))
        except SyntaxError:
            continue
        if tree not in seen:
            seen.add(tree)
            jobs.append(Job(mutant, text, after, f"{path} {key}"))
    return jobs


def copy_checkout(to: Path) -> None:
    """Copy tracked files, and those that git does not ignore, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        if name and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def _enter_copy(folder: str) -> None:
    """Make a worker work in a copy of its own."""
    checkout = Path(folder, str(os.getpid()))
    copy_checkout(checkout)
    os.chdir(checkout)
    os.environ |= {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # none is needed, and some take a second
        "PYTHONDONTWRITEBYTECODE": "1",  # a file that changes twice in a second would be taken from its old bytecode
    }


def _try_tests(command: str) -> tuple[bool, str, float]:
    """Whether they pass without a mutant, their output, and how long they take."""
    start = time.monotonic()
    outcome, output = run_tests(command, 3600)
    return outcome is TestOutcome.SURVIVED, output, time.monotonic() - start


def _try_mutant(item: WorkItem, command: str, timeout: float) -> tuple[WorkResult, float]:
    start = time.monotonic()
    return mutate_and_test(item.mutations, command, timeout), time.monotonic() - start


def outcome_of(result: WorkResult) -> str:
    if result.test_outcome is TestOutcome.SURVIVED:
        return "survived"
    if result.test_outcome is not TestOutcome.KILLED:
        raise RuntimeError(f"a mutant could not be tried: {result.output}")
    return "timeout" if result.output == "timeout" else "killed"


def run_room(name: str, jobs: list[Job], command: str, db: WorkDB, pool: ProcessPoolExecutor) -> None:
    """Run what has no result yet.

    Raises:
        RuntimeError: the room's tests fail without a mutant.
    """
    done, known = {job_id for job_id, _ in db.results}, {item.job_id for item in db.work_items}
    pending = [job for job in jobs if job.id not in done]
    db.add_work_items(job.work_item() for job in pending if job.id not in known)
    if not pending:
        return
    passed, output, seconds = pool.submit(_try_tests, command).result()
    if not passed:
        raise RuntimeError(f"{name}: its tests fail without a mutant\n{output}")
    print(f"{name}: {len(pending)} mutants; its tests take {seconds:.0f} s", flush=True)
    running = {pool.submit(_try_mutant, job.work_item(), command, max(60, 4 * seconds)): job for job in pending}
    for future in as_completed(running):
        result, seconds = future.result()
        print(f"{outcome_of(result):8} {seconds:4.0f} s  {running[future]}", flush=True)
        db.set_result(running[future].id, result)


def write_results(files: dict[str, dict], about: dict[str, object]) -> None:
    """Put these files' results in the place of their earlier ones; files that are gone go."""
    old = json.loads(RESULTS.read_text())["files"] if RESULTS.exists() else {}
    merged = {path: file for path, file in sorted((old | files).items()) if (ROOT / path).is_file()}
    data = {"about": about, "files": merged}
    write_file(RESULTS, json.dumps(data, indent=1) + "\n")
    write_file(RESULTS.with_suffix(".md"), summary.page(data))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help="names of rooms, or paths of code; all rooms without one")
    parser.add_argument(
        "--since", metavar="REF", help="only lines that changed since a branch or commit; writes no results"
    )
    parser.add_argument("--per-file", type=int, default=15, metavar="N", help="mutants drawn of a file (15)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--all-cases", action="store_true", help="run tests with all their cases, not with one each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time (one a core)")
    parser.add_argument("--list", action="store_true", help="print rooms and mutants, and run nothing")
    return parser


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    lines = None
    if options.since:
        lines = changed_lines(git("diff", "--merge-base", "--unified=0", "--no-ext-diff", options.since))
    rooms = read_rooms()
    if unknown := set(options.rooms) - rooms.keys() - {path for room in rooms.values() for path in room.code}:
        parser.error(f"no such room or file in rooms.toml: {', '.join(sorted(unknown))}")
    SESSION.parent.mkdir(exist_ok=True)
    outcomes: list[summary.Outcome] = []
    with (
        use_db(SESSION) as db,
        tempfile.TemporaryDirectory(prefix="fastvit-mutants-") as folder,
        ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), _enter_copy, (folder,)) as pool,
    ):
        for name, room in rooms.items():
            paths = [p for p in room.code if not options.rooms or {name, p} & {*options.rooms}]
            paths = [p for p in paths if lines is None or p in lines]
            if not paths:
                continue
            command = shlex.join([*PYTEST, *(() if options.all_cases else ("--one-case",)), *room.tests])
            jobs = [
                job
                for path in paths
                for job in draw(path, room, options.per_file, options.seed, command, lines and lines[path])
            ]
            if options.list:
                print(f"{name}: {len(jobs)} mutants of {len(paths)} files", *jobs, sep="\n    ")
                continue
            run_room(name, jobs, command, db, pool)
            results = dict(db.results)
            outcomes += [
                summary.Outcome(job.mutant.path, job.mutant.kind, job.line, job.becomes, outcome_of(results[job.id]))
                for job in jobs
            ]
    if options.list:
        return 0
    equivalents, stale = summary.read_equivalents(ROOT)
    files = summary.count(outcomes, equivalents)
    for path in files:
        files[path]["commit"] = git("log", "-1", "--format=%h", "--", path).strip()
    print(summary.table(files), *(f"equivalent.toml matches nothing: {entry}" for entry in stale), sep="\n")
    if not options.since:
        about = {"cosmic-ray": version("cosmic-ray"), "seed": options.seed, "mutants per file": options.per_file}
        write_results(files, about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
