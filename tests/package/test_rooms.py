"""Imports between the rooms of the package point one way."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each imports those before it. `fastvit` is fastvit/__init__.py, which has the names of all
ROOMS = [
    "_base", "kernels", "reference", "ops.runtime", "ops", "blocks", "report", "modules", "layers", "vit", "distilled",
    "eva", "checkpoints", "zoo", "export", "compiler", "cuda_graphs", "integrations", "study", "warmup", "fastvit",
    "cli", "__main__",
]  # fmt: skip
ALONE = {"kernels": "triton", "reference": "torch"}  # what else they import, next to Python's own modules


def imported(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines and names of all imports in a file, except those for type checkers: "fastvit.ops.mlp"."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"line {child.lineno}: a relative import"
            yield from ((child.lineno, f"{child.module}.{alias.name}") for alias in child.names)
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from imported(child)


def room_of(name: str) -> str:
    inside = name.removeprefix("fastvit.")
    return next((room for room in ROOMS if f"{inside}.".startswith(f"{room}.")), "fastvit")


def test_no_import_points_up_and_two_rooms_import_one_package_alone() -> None:
    wrong = []
    for path in [*ROOT.glob("fastvit/**/*.py"), *ROOT.glob("kernels/*.py")]:
        file = path.relative_to(ROOT)
        room = room_of(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
        for line, name in imported(ast.parse(path.read_text())):
            package, target = name.split(".")[0], room_of(name)
            if package == "fastvit":
                bad = ROOMS.index(target) > ROOMS.index(room)
            else:
                bad = room in ALONE and package not in {ALONE[room], *sys.stdlib_module_names}
            wrong += [f"{file}:{line}: {room} imports {name}"] * bad
    assert not wrong, "\n".join(wrong)
