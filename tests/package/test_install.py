"""Files and requirements of an installed package, on every platform."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fastvit

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
LINUX = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}
MAC = {"platform_system": "Darwin", "sys_platform": "darwin", "platform_machine": "arm64"}
WINDOWS = {"platform_system": "Windows", "sys_platform": "win32", "platform_machine": "AMD64"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout to a folder named `fastvit`, with symbolic links as text files, as git writes them on
    Windows."""
    clone = tmp_path_factory.mktemp("parent") / "fastvit"
    for folder in ("fastvit", "kernels"):
        shutil.copytree(ROOT / folder, clone / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [path for path in clone.rglob("*") if path.is_symlink()]:
        target = path.readlink().as_posix()
        path.unlink()
        path.write_text(target)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    return clone


@pytest.fixture(scope="module")
def build(clone: Path) -> Build:
    """Return a function that builds a wheel in the clone and unpacks it."""

    def build(kind: str) -> Path:
        program = f"import hatchling.build as b; print(b.{kind}({str(clone.parent)!r}))"
        run = subprocess.run([sys.executable, "-c", program], cwd=clone, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        site = clone.parent / kind
        with zipfile.ZipFile(clone.parent / run.stdout.split()[-1]) as wheel:
            wheel.extractall(site)
        return site

    return build


def imported(site: Path, folder: Path, program: str) -> str:
    """Return what a program prints that starts in `folder` and finds packages in `site`, then in this environment."""
    # -S: the .pth files of this environment may lead to this checkout
    find = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({sysconfig.get_path('purelib')!r})"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", f"{find}\n{program}"]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_an_editable_install_is_imported_from_the_folder_above_the_clone(build: Build) -> None:
    """There, Python takes the clone's folder `fastvit` for a namespace package. The real package has to precede it."""
    site = build("build_editable")
    parent = site.parent
    program = "import fastvit; fastvit.create_model; print(fastvit.__file__)"
    assert Path(imported(site, parent, program)) == parent / "fastvit/fastvit/__init__.py"
    # and the name `kernels` is its owner's
    (site / "kernels").mkdir()
    (site / "kernels/__init__.py").write_text("owner = 'another package'")
    assert imported(site, parent / "fastvit", "import kernels; print(kernels.owner)") == "another package"


@pytest.mark.parametrize("kind", ["checkout", "build_wheel"])
def test_kernels_are_imported_from_a_clone_without_symbolic_links(kind: str, clone: Path, build: Build) -> None:
    site = clone if kind == "checkout" else build(kind)
    folder = {"build_wheel": site / "fastvit"}.get(kind, clone)
    program = "import fastvit.kernels._configs as module; print(module.__file__)"
    assert Path(imported(site, Path("/"), program)) == folder / "kernels/_configs.py"


def test_a_wheel_holds_the_package_and_nothing_else(build: Build) -> None:
    site = build("build_wheel")
    (metadata,) = site.glob("*.dist-info")
    assert {path.name for path in site.iterdir()} == {"fastvit", metadata.name}
    installed = {path.relative_to(site) for path in (site / "fastvit").rglob("*") if path.is_file()}
    ours = {path.relative_to(ROOT) for folder in ("fastvit", "kernels") for path in (ROOT / folder).rglob("*.*")}
    ours -= {Path("fastvit/kernels/__init__.py")}  # only in a checkout, where it points at kernels/
    ours = {Path("fastvit") / path if path.parts[0] == "kernels" else path for path in ours}
    assert installed == {path for path in ours if path.suffix != ".pyc"}


def test_triton_is_required_only_where_it_has_wheels() -> None:
    markers = [Requirement(text).marker for text in EXTRAS["triton"] if "triton" in text]
    required = [any(m is None or m.evaluate(platform) for m in markers) for platform in (LINUX, MAC, WINDOWS)]
    assert required == [True, False, False]


def test_every_extra_that_a_message_or_a_document_names_exists() -> None:
    files = [ROOT / "README.md", ROOT / "benchmarks/README.md", *(ROOT / "fastvit").rglob("*.py")]
    named = re.findall(r"""(?:fastvit|["'`]\.)\[([a-z,]+)\]""", "".join(path.read_text() for path in files))
    assert {"study", "weights", "triton", "bench"} <= set(",".join(named).split(",")) <= set(EXTRAS)


def test_a_name_that_the_package_lacks():
    with pytest.raises(AttributeError, match=r"^module 'fastvit' has no attribute 'Transformer'$"):
        fastvit.Transformer  # noqa: B018
