"""What `pip install` puts where: the package alone, importable from every folder, and no module named `kernels`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("setuptools", "77")

ROOT = Path(__file__).parents[1]

Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds a wheel in a clone, which lies in a folder named `fastvit`, and unpacks it."""
    clone = tmp_path_factory.mktemp("parent") / "fastvit"
    keep = shutil.ignore_patterns("__pycache__")
    for folder in ("fastvit", "kernels"):
        shutil.copytree(ROOT / folder, clone / folder, symlinks=True, ignore=keep)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)

    def build(kind: str) -> Path:
        program = f"import setuptools.build_meta as b; print(b.{kind}({str(clone.parent)!r}))"
        run = subprocess.run([sys.executable, "-c", program], cwd=clone, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        site = clone.parent / kind
        with zipfile.ZipFile(clone.parent / run.stdout.split()[-1]) as wheel:
            wheel.extractall(site)
        return site

    return build


def imported(site: Path, folder: Path, program: str) -> str:
    """What a program prints that was started in a folder and finds packages in `site`, then in this environment."""
    # -S, as the environment's own .pth files may lead to this checkout
    find = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({sysconfig.get_path('purelib')!r})"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", f"{find}\n{program}"]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.slow
def test_an_editable_install_is_imported_from_the_folder_above_the_clone(build: Build) -> None:
    """There the clone's own folder `fastvit` is a namespace package to Python, which a real one has to come before."""
    site = build("build_editable")
    parent = site.parent
    program = "import fastvit; fastvit.create_model; print(fastvit.__file__)"
    for folder in (parent, parent / "fastvit", Path("/")):
        assert Path(imported(site, folder, program)) == parent / "fastvit/fastvit/__init__.py"


def test_an_editable_install_leaves_the_name_kernels_to_its_owner(build: Build) -> None:
    site = build("build_editable")
    (site / "kernels").mkdir()
    (site / "kernels/__init__.py").write_text("owner = 'somebody'")
    assert imported(site, site.parent / "fastvit", "import kernels; print(kernels.owner)") == "somebody"


def test_a_wheel_holds_the_package_and_nothing_else(build: Build) -> None:
    site = build("build_wheel")
    (metadata,) = site.glob("*.dist-info")
    assert {path.name for path in site.iterdir()} == {"fastvit", metadata.name}
    installed = {path.relative_to(site) for path in (site / "fastvit").rglob("*") if path.is_file()}
    ours = {path.relative_to(ROOT) for folder in ("fastvit", "kernels") for path in (ROOT / folder).rglob("*.*")}
    ours = {Path("fastvit") / path if path.parts[0] == "kernels" else path for path in ours}
    assert installed == {path for path in ours if path.suffix != ".pyc"}
