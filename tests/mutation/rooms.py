"""Which tests belong to which files, which lines have changed, and which of a file's mutants are drawn."""

from __future__ import annotations

import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Room(NamedTuple):
    """Paths from the root of the checkout."""

    code: list[str]
    tests: list[str]


class Mutant(NamedTuple):
    path: str
    kind: str  # the kind of change: a key of operators.OURS or LIBRARY
    operator: str  # cosmic-ray's name
    occurrence: int  # among all places of the operator in the file
    lines: tuple[int, int]  # first and last, from 1
    text: str  # the first line, stripped


def read_rooms(root: Path = ROOT) -> dict[str, Room]:
    """Read rooms.toml.

    Raises:
        ValueError: a pattern finds no file, or one that an earlier room has.
    """
    taken: set[str] = set()
    rooms = {}
    for name, table in tomllib.loads(Path(__file__).with_name("rooms.toml").read_text()).items():
        code = _find(root, name, table["code"], taken)
        taken.update(code)
        rooms[name] = Room(code, _find(root, name, table["tests"], set()))
    return rooms


def _find(root: Path, room: str, patterns: list[str], taken: set[str]) -> list[str]:
    """Files in the order of their patterns, each once."""
    found: dict[str, None] = {}
    for pattern in patterns:
        paths = sorted(p.relative_to(root).as_posix() for p in root.glob(pattern))
        if not set(paths) - taken - set(found):
            raise ValueError(f"rooms.toml, {room}: {pattern} finds no file that is not in a room already")
        found |= dict.fromkeys(path for path in paths if path not in taken)
    return [*found]


def changed_lines(diff: str) -> dict[str, set[int]]:
    """Lines of each file that a diff of no context (`git diff --unified=0`) adds or changes."""
    lines: dict[str, set[int]] = defaultdict(set)
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ ").removeprefix("b/").rstrip("\t")
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(found[1]), int(found[2] or 1)
            lines[path].update(range(first, first + count))
    return {path: numbers for path, numbers in lines.items() if numbers}


def in_random_order(mutants: Iterable[Mutant], seed: int) -> list[Mutant]:
    """Put a file's mutants into the order in which they are drawn: kinds take turns.

    A mutant's place follows from the seed, its operator and its line's text, so that a change elsewhere in the file
    keeps most of a sample.
    """
    before: Counter[tuple[str, str]] = Counter()
    by_kind: dict[str, list[tuple[str, Mutant]]] = defaultdict(list)
    for mutant in sorted(mutants, key=lambda m: (m.operator, m.occurrence)):
        place = mutant.operator, mutant.text
        digest = sha256(f"{seed} {mutant.path} {place} {before[place]}".encode()).hexdigest()
        before[place] += 1
        by_kind[mutant.kind].append((digest, mutant))
    turns = [(turn, *drawn) for drawn_of_kind in by_kind.values() for turn, drawn in enumerate(sorted(drawn_of_kind))]
    return [mutant for _, _, mutant in sorted(turns)]
