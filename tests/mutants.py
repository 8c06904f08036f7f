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
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from difflib import unified_diff
from functools import partial
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parents[1]
ROOMS = tomllib.loads(Path(__file__).with_name("rooms.toml").read_text())
OPERATORS = [name for name in plugins.operator_names() if not name.startswith("core/Variable")]
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not nightly")


class _WithoutAnnotations(ast.NodeTransformer):
    """What runs: annotations and docstrings are left out."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def _meaning(text: str) -> str:
    return ast.dump(_WithoutAnnotations().visit(ast.parse(text)))


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
    changes += [partial(_left_out, text, node) for node in ast.walk(ast.parse(text)) if isinstance(node, simple)]
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


def files(patterns: list[str], folder: Path) -> list[str]:
    paths = [path.relative_to(folder).as_posix() for pattern in patterns for path in sorted(folder.glob(pattern))]
    if not paths:
        raise SystemExit(f"rooms.toml: no file is named like {patterns}")
    return [*dict.fromkeys(paths)]


def survives(checkout: Path, path: str, after: str, tests: list[str]) -> bool:
    """Whether all tests of the room pass in a copy of the checkout with this change."""
    before = (checkout / path).read_text()
    try:
        (checkout / path).write_text(after)
        environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
        command = (*PYTEST, *files(tests, checkout))
        return subprocess.run(command, cwd=checkout, env=environment, capture_output=True).returncode == 0
    finally:
        (checkout / path).write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], metavar="room", help=", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chosen = random.Random(arguments.seed)
    code = [(name, path) for name in arguments.rooms or ROOMS for path in files(ROOMS[name]["code"], ROOT)]
    sizes = [(ROOT / path).stat().st_size for _, path in code]
    drawn = {place: mutants(place[1], chosen) for place in code}
    tracked = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, check=True).stdout.decode()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        for name in filter(None, tracked.split("\0")):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
        survivors = tried = 0
        for room, path in chosen.choices(code, sizes, k=arguments.count):
            if (after := next(drawn[room, path], None)) is None:
                continue
            tried += 1
            if survives(checkout, path, after, ROOMS[room]["tests"]):
                survivors += 1
                lines = (ROOT / path).read_text().splitlines(), after.splitlines()
                print(f"survived, {room}:", *unified_diff(*lines, path, path, n=0, lineterm=""), sep="\n", flush=True)
    print(f"{tried} mutants, {survivors} survived")


if __name__ == "__main__":
    main()
