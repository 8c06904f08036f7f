"""Mutation testing: what our operators write, which mutants are drawn, what the summary counts. No cosmic-ray."""

import pytest

from tests.mutation import operators, rooms, summary
from tests.mutation.rooms import Mutant


def mutants(kind: str, text: str) -> list[str]:
    edits = operators.Source(text).edits(operators.OURS[kind])
    return [text[: edit.start] + edit.text + text[edit.end :] for edit in edits]


@pytest.mark.parametrize(
    ("kind", "text", "becomes"),
    [
        ("condition", "if a:\n    b", ["if False:\n    b", "if True:\n    b"]),
        ("condition", "while a: b", ["while False: b"]),
        ("condition", "x = a if c else (b, d)", ["x = ((b, d))", "x = a"]),
        ("condition", "x = a and b == c and d", ["x = ((b == c) and d)", "x = (a and (b == c))", "x = (a and d)"]),
        ("condition", "[a for a in b if a > 1]", ["[a for a in b if True]"]),
        ("operand", "x = (a + b) * c", ["x = (a + b)", "x = c", "x = (a) * c", "x = (b) * c"]),
        ("operand", "é = 'é' + b", ["é = 'é'", "é = b"]),  # columns of `ast` are bytes
        ("call", "y = x.to(t)", ["y = t", "y = x"]),
        ("call", "y = tl.where(m, a, b)", ["y = a", "y = m"]),
        ("call", "f(*x)", []),
        ("call", "f(g(x))", ["f(x)"]),  # `statement` drops f
        ("statement", "f(x)\ny = g(y)\nz = 1", ["f(x)\npass\nz = 1", "pass\ny = g(y)\nz = 1"]),
        ("statement", "x += 1\ndel x", ["pass\ndel x", "x += 1\npass"]),
        ("statement", "x.y = x[0] = z", ["pass"]),
        ("statement", '"""A docstring."""', []),
        ("part", "f(a, b=c, **d)", ["f(a, **d)", "f(a, b=c)"]),
        ("part", "x[a, :]", ["x[:,]", "x[a,]"]),
        ("part", "x = [a, b], {c}", ["x = [a, b],", "x = {c},", "x = [a], {c}", "x = [b], {c}"]),
        ("part", "x = {a, b}", ["x = {a}", "x = {b}"]),
        ("part", "a, b = f()", []),
    ],
)
def test_operators(kind: str, text: str, becomes: list[str]) -> None:
    assert sorted(mutants(kind, text)) == sorted(becomes)


def test_annotations_and_messages_are_left_alone() -> None:
    source = operators.Source("def f(a: int | str = 1) -> None:\n    b: int = 2\n    raise ValueError(3)\n")
    quiet = sorted(source.quiet())
    assert [source.text[start:end] for start, end in quiet] == ["int | str", "None", "int", "raise ValueError(3)"]
    assert [source.position(start) for start, _ in quiet] == [(1, 9), (1, 27), (2, 7), (3, 4)]


def test_changed_lines() -> None:
    diff = """\
diff --git a/x.py b/x.py
--- a/x.py
+++ b/x.py
@@ -3 +3 @@ def f():
-old
+new
@@ -10,0 +11,2 @@
+one
+two
@@ -20,2 +22,0 @@
-one
-two
diff --git a/gone.py b/gone.py
--- a/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-old
"""
    assert rooms.changed_lines(diff) == {"x.py": {3, 11, 12}}


FOUND = [
    Mutant("x.py", kind, kind, i, (i, i), f"line {i % 7}")
    for kind, count in (("number", 30), ("loop", 2))
    for i in range(count)
]


def test_a_draw_is_reproducible_and_kinds_take_turns() -> None:
    drawn = rooms.in_random_order(FOUND, seed=0)
    assert drawn == rooms.in_random_order(reversed(FOUND), seed=0) != rooms.in_random_order(FOUND, seed=1)
    assert sorted(drawn) == sorted(FOUND)
    assert [sum(m.kind == "loop" for m in drawn[:n]) for n in (2, 4)] == [1, 2]


def test_a_change_elsewhere_keeps_the_draw() -> None:
    moved = [m._replace(occurrence=m.occurrence + 1, lines=(m.lines[0] + 5,) * 2) for m in FOUND]
    added = Mutant("x.py", "number", "number", 0, (1, 1), "another line")
    texts = [m.text for m in rooms.in_random_order([added, *moved], seed=0) if m.text != added.text]
    assert texts == [m.text for m in rooms.in_random_order(FOUND, seed=0)]


def test_rooms_name_files_that_exist() -> None:
    assert all(room.code and room.tests for room in rooms.read_rooms().values())


def test_survivors_that_are_equivalent_are_counted_apart() -> None:
    found = [
        summary.Outcome("x.py", "number", "a = 1", "a = 2", "survived"),
        summary.Outcome("x.py", "number", "a = 1", "a = 0", "survived"),
        summary.Outcome("x.py", "call", "f(a)", "a", "killed"),
        summary.Outcome("x.py", "call", "f(b)", "b", "timeout"),
    ]
    files = summary.count(found, {("x.py", "number", "a = 1", "a = 2"): "never read"})
    survivor = {"kind": "number", "line": "a = 1", "becomes": "a = 0"}
    counts = {"mutants": 4, "killed": 1, "timeout": 1, "survived": 1, "equivalent": 1, "survivors": [survivor]}
    assert files == {"x.py": counts}
    assert summary.table(files).splitlines()[-1] == "| all | 4 | 1 | 1 | 1 | 1 |"
    page = summary.page({"about": {"seed": 0}, "files": files})
    assert "seed 0." in page
    assert "- `x.py`, number: `a = 1` -> `a = 0`" in page
