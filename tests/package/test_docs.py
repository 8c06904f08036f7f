"""The API reference: `make docs` renders it without warnings, and everything in it is documented."""

import importlib
import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import fastvit

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", "")
(PAGES,) = re.findall(r"^PAGES := (.+)$", MAKEFILE, re.MULTILINE)
MODULES = {page: importlib.import_module(page) for page in PAGES.split()}
MODULES |= {f"fastvit.{name}": getattr(fastvit, name) for name in fastvit.__all__}
MODULES = {name: value for name, value in MODULES.items() if inspect.ismodule(value)}
# The classes of the reference take the arguments of those that they mirror, and do not repeat their documentation.
DOCUMENTED = {page: module for page, module in MODULES.items() if page != "fastvit.reference"}
EXPORTED = [(page, name) for page, module in DOCUMENTED.items() for name in getattr(module, "__all__", [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Render the pages with the recipe of `make docs` into a temporary folder."""
    pytest.importorskip("pdoc", reason="pdoc is not installed")
    (recipe,) = re.findall(r"^\t\$\(BIN\)/pdoc (.+)$", MAKEFILE, re.MULTILINE)
    arguments = shlex.split(recipe.replace("$(PAGES)", PAGES))
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "pdoc", *arguments, "--output-directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    warnings = [line for line in done.stderr.splitlines() if "fastvit" in line]
    assert not warnings, warnings
    return folder


def test_pages(folder: Path) -> None:
    pages = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.html")}
    assert pages == {*MODULES, "index"}
    for path in folder.rglob("*.html"):
        page = path.read_text()
        assert "<p>Args:" not in page, f"{path}: a section that is not Google's"
        assert "performed at every call" not in page, f"{path}: torch's docstrings"
    for module, name in EXPORTED:
        page = (folder / module.replace(".", "/")).with_suffix(".html").read_text()
        assert f"{module}.{name}" in MODULES or name == "__version__" or f'<section id="{name}">' in page


def arguments_to_document(value: Any) -> list[str]:
    """Dataclasses and exceptions need not document arguments: users read them but do not make them."""
    if not callable(value) or is_dataclass(value) or (inspect.isclass(value) and issubclass(value, Exception)):
        return []
    return list(inspect.signature(value).parameters)


def test_everything_exported_is_documented_with_its_arguments() -> None:
    values = {f"{module}.{name}": getattr(MODULES[module], name) for module, name in EXPORTED}
    assert [name for name, value in values.items() if not value.__doc__] == []
    arguments = [(n, v.__doc__, argument) for n, v in values.items() for argument in arguments_to_document(v)]
    assert [(name, a) for name, text, a in arguments if not re.search(rf"\b{a}\b", text)] == []
