"""Kinds of mutants: some of cosmic-ray's operators, and ours for what those do not do.

Ours are functions of a syntax node. Each yields (a node to replace, the source that replaces it). `SourceOperator`
makes such a function an operator of cosmic-ray, and is all here that needs its parser.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

Text = Callable[[ast.AST], str]  # source of a node
Changes = Iterator[tuple[ast.AST, str]]
Position = tuple[int, int]  # line from 1, column from 0, as the parser counts

_ATOMS = (ast.Attribute, ast.Call, ast.Constant, ast.Name, ast.Subscript)


def _atom(node: ast.expr, text: Text) -> str:
    return text(node) if isinstance(node, _ATOMS) else f"({text(node)})"


def condition(node: ast.AST, text: Text) -> Changes:
    """`if a` -> `if False`, `if True`; `a if c else b` -> `a`, `b`; `a and b` -> `a`, `b`."""
    if isinstance(node, ast.If | ast.While):
        yield node.test, "False"
        if isinstance(node, ast.If):
            yield node.test, "True"
    elif isinstance(node, ast.comprehension):
        yield from ((test, "True") for test in node.ifs)
    elif isinstance(node, ast.IfExp):
        yield from ((node, _atom(branch, text)) for branch in (node.body, node.orelse))
    elif isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.And) else " or "
        for dropped in node.values:
            yield node, f"({word.join(_atom(value, text) for value in node.values if value is not dropped)})"


def operand(node: ast.AST, text: Text) -> Changes:
    """`a + b` -> `a`, `b`, for every binary operator."""
    if isinstance(node, ast.BinOp):
        yield from ((node, _atom(side, text)) for side in (node.left, node.right))


def call(node: ast.AST, text: Text) -> Changes:
    """`f(a, b)` -> `a`, `b`; `x.f(a)` -> `x`, `a`: no cast, no mask, no minimum, no rounding."""
    if isinstance(node, ast.Expr):
        return  # `statement` drops it
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            receiver = [child.func.value] if isinstance(child.func, ast.Attribute) else []
            for value in [*receiver, *child.args[:2]]:
                if not isinstance(value, ast.Starred) and not _is_module(value):
                    yield child, _atom(value, text)


def _is_module(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("tl", "torch", "F", "math", "nn", "os", "functools")


def statement(node: ast.AST, text: Text) -> Changes:
    """A call, `x += a`, `x.y = a`, `x = f(x)` or a deletion -> `pass`; a name that would be missing says nothing."""
    if isinstance(node, ast.Assign):
        used = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        targets = [n for n in ast.walk(ast.Tuple(node.targets)) if isinstance(getattr(n, "ctx", None), ast.Store)]
        names = {n.id for n in targets if isinstance(n, ast.Name)}
        deletable = names <= used
    else:
        deletable = isinstance(node, ast.AugAssign | ast.Delete) or _is_discarded_call(node)
    if deletable:
        yield node, "pass"


def _is_discarded_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def part(node: ast.AST, text: Text) -> Changes:
    """`f(a, k=b)` -> `f(a)`; `x, y, z` -> `y, z`, ...: a keyword, or an element of a tuple, list or set, dropped."""
    if isinstance(node, ast.Call):
        for dropped in node.keywords:
            yield node, _called(node, node.args, [k for k in node.keywords if k is not dropped], text)
    elif isinstance(node, ast.Tuple | ast.List | ast.Set) and not isinstance(getattr(node, "ctx", None), ast.Store):
        for dropped in node.elts if len(node.elts) > 1 else ():
            yield node, _listed(node, [e for e in node.elts if e is not dropped], text)


def _called(node: ast.Call, args: Sequence[ast.expr], keywords: Sequence[ast.keyword], text: Text) -> str:
    return f"{_atom(node.func, text)}({', '.join(map(text, [*args, *keywords]))})"


def _listed(node: Any, elements: Sequence[ast.expr], text: Text) -> str:
    """The brackets of `node` around other elements. A tuple may have none: `x[:, None]` takes no others."""
    inside = ", ".join(map(text, elements))
    if not isinstance(node, ast.Tuple):
        return f"[{inside}]" if isinstance(node, ast.List) else f"{{{inside}}}"
    inside += "," * (len(elements) == 1)
    first = node.elts[0]
    bare = (node.lineno, node.col_offset) == (first.lineno, first.col_offset)
    return inside if bare else f"({inside})"


OURS = {function.__name__: function for function in (condition, operand, call, statement, part)}

# cosmic-ray's, by the kind under which they are sampled and counted
LIBRARY = {
    "comparison": [
        f"ReplaceComparisonOperator_{swap}"
        for swap in ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Is_IsNot", "IsNot_Is")
    ],
    "arithmetic": [
        f"ReplaceBinaryOperator_{swap}"
        for swap in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mod", "Mod_FloorDiv")
    ]
    + ["ReplaceUnaryOperator_Delete_USub"],
    "number": ["NumberReplacer"],
    "logic": [
        "AddNot",
        "ReplaceUnaryOperator_Delete_Not",
        *(f"Replace{swap}" for swap in ("AndWithOr", "OrWithAnd", "TrueWithFalse", "FalseWithTrue")),
    ],
    "loop": ["ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"],
}


class Edit(NamedTuple):
    """Characters `start` to `end` of a source become `text`."""

    start: int
    end: int
    text: str


class Source:
    """A file's text, with what finds a syntax node in it."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self._lines = [f"{line}\n" for line in text.split("\n")]
        self._starts = [0, *accumulate(map(len, self._lines))]

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a line (from 1) and a column in characters."""
        return self._starts[line - 1] + column

    def position(self, offset: int) -> Position:
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1]

    def span(self, node: Any) -> tuple[int, int]:
        """Where a node begins and ends; `ast` counts columns in bytes."""
        ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        start, end = (self.offset(n, len(self._lines[n - 1].encode()[:column].decode())) for n, column in ends)
        return start, end

    def segment(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def edits(self, function: Callable[[ast.AST, Text], Changes]) -> list[Edit]:
        changes = (change for node in ast.walk(self.tree) for change in function(node, self.segment))
        return sorted(Edit(*self.span(node), text) for node, text in changes)

    def quiet(self) -> list[tuple[int, int]]:
        """Where a mutant says nothing: annotations, which do not run, and the messages of errors."""
        found: list[ast.AST | None] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg | ast.AnnAssign):
                found.append(node.annotation)
            elif isinstance(node, ast.FunctionDef):
                found.append(node.returns)
            elif isinstance(node, ast.Raise):
                found.append(node)
        return [self.span(node) for node in found if node is not None]


class SourceOperator:
    """One of ours in the form of a cosmic-ray operator: all of a file's changes belong to the root of its tree."""

    def __init__(self, function: Callable[[ast.AST, Text], Changes]) -> None:
        self.function = function

    def mutation_positions(self, node: Any) -> Iterator[tuple[Position, Position]]:
        if node.parent is None:
            source = Source(node.get_code())
            for edit in source.edits(self.function):
                yield source.position(edit.start), source.position(edit.end)

    def mutate(self, node: Any, index: int) -> Any:
        import parso

        text = node.get_code()
        edit = Source(text).edits(self.function)[index]
        return parso.parse(text[: edit.start] + edit.text + text[edit.end :])


PROVIDER = {name: partial(SourceOperator, function) for name, function in OURS.items()}
