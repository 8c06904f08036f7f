"""Change one thing in a copy of the checkout: a test of its room has to fail.

    python -m tests.mutants                          80 mutants over all rooms
    python -m tests.mutants rotary --count 20        of one room

A room is some files of code and the tests that have to notice a change there (rooms.toml). Changes are those of
cosmic-ray (another number, comparison or operator, a condition turned round, a loop that does not run) and statements
that are left out. What survives is printed: a test is missing, the code is superfluous, or the two mean the same.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import Any

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parents[1]
OPS = sorted(path.parent.name for path in ROOT.glob("fastvit/ops/*/op.py"))
ROOMS: dict[str, dict[str, Any]] = {
    op: {"code": [f"fastvit/ops/{op}/*.py", f"kernels/{op}*.py"], "tests": f"tests/ops tests/kernels -k {op}"}
    for op in OPS
}
ROOMS |= tomllib.loads(Path(__file__).with_name("rooms.toml").read_text())
OPERATORS = [name for name in plugins.operator_names() if not name.startswith("core/Variable")]
LIMIT = 1800.0  # seconds of a room's tests: a mutant that never ends has been noticed
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not nightly")


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _meaning(text: str) -> str:
    """Return the syntax tree without annotations and docstrings, which change nothing that runs."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for name in {"annotation", "returns"} & {*node._fields}:
            setattr(node, name, None)
        if isinstance(node, ast.Expr) and _is_docstring(node):
            node.value = ast.Constant(None)
    return ast.dump(tree)


def _left_out(text: str, statement: ast.stmt) -> str:
    """Return the text with `pass` in the place of a statement."""
    lines = text.splitlines(keepends=True)
    before = [*lines[: statement.lineno - 1], lines[statement.lineno - 1].encode()[: statement.col_offset].decode()]
    end = statement.end_lineno or 0
    return "".join([*before, "pass", lines[end - 1].encode()[statement.end_col_offset :].decode(), *lines[end:]])


def mutants(path: str, chosen: random.Random) -> Iterator[str]:
    """Yield the file's text with one change each, in random order, without those that mean the same."""
    text = (ROOT / path).read_text()
    nodes = [*ast_nodes(get_ast(text))]
    changes: list[Callable[[], str]] = []
    for name in OPERATORS:
        operator = plugins.get_operator(name)()
        count = sum(1 for node in nodes for _ in operator.mutation_positions(node))
        changes += [partial(mutate_code, text, operator, occurrence) for occurrence in range(count)]
    simple = ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.Delete
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, simple) and not _is_docstring(node)]
    changes += [partial(_left_out, text, node) for node in statements]
    chosen.shuffle(changes)
    seen = {_meaning(text)}
    for change in changes:
        after = change()
        try:
            meaning = _meaning(after)
        except SyntaxError:
            continue
        if meaning not in seen:
            seen.add(meaning)
            yield after


def rooms() -> dict[str, str]:
    """Return the room of every file of code. Raises SystemExit for a file or folder that is not there."""
    room_of: dict[str, str] = {}
    for name, room in ROOMS.items():
        named = {pattern: sorted(ROOT.glob(pattern)) for pattern in room["code"]}
        named |= {word: [*ROOT.glob(word)] for word in shlex.split(room["tests"]) if "/" in word}
        if missing := [pattern for pattern, paths in named.items() if not paths]:
            raise SystemExit(f"rooms.toml: no file is named like {missing}")
        for path in (path for pattern in room["code"] for path in named[pattern]):
            room_of.setdefault(path.relative_to(ROOT).as_posix(), name)
    return room_of


def survives(checkout: Path, path: str, after: str, tests: str) -> bool:
    """Whether all tests of the room pass in a copy of the checkout with this change."""
    before = (checkout / path).read_text()
    try:
        (checkout / path).write_text(after)
        environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
        command = (*PYTEST, *shlex.split(tests))
        run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, timeout=LIMIT)
        return run.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        (checkout / path).write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], metavar="room", help=", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chosen = random.Random(arguments.seed)
    room_of = rooms()
    code = [path for path, name in room_of.items() if not arguments.rooms or name in arguments.rooms]
    sizes = [(ROOT / path).stat().st_size for path in code]
    drawn = {path: mutants(path, chosen) for path in code}
    tracked = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, check=True).stdout.decode()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        for name in filter(None, tracked.split("\0")):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
        survivors = tried = 0
        for path in chosen.choices(code, sizes, k=arguments.count):
            if (after := next(drawn[path], None)) is None:
                continue
            tried, room = tried + 1, room_of[path]
            if survives(checkout, path, after, ROOMS[room]["tests"]):
                survivors += 1
                lines = (ROOT / path).read_text().splitlines(), after.splitlines()
                print(f"survived, {room}:", *unified_diff(*lines, path, path, n=0, lineterm=""), sep="\n", flush=True)
    print(f"{tried} mutants, {survivors} survived")


if __name__ == "__main__":
    main()
