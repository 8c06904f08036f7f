"""`make peers`: what its plugin puts into other libraries' tests, and which differences count."""

from pathlib import Path

import pytest
from library_imports import import_timm

from benchmarks.peers import __main__ as command

SUITE = """
import pytest, timm

def accelerated(name):
    return "forward" in vars(timm.create_model(name).blocks[0])

@pytest.mark.parametrize("model_name", ["test_vit", "vit_of_no_list"])
def test_with(model_name):
    assert accelerated(model_name)

def test_different():
    assert not accelerated("test_vit")

def test_fails_without_fastvit():
    assert 0

def test_meant():
    assert not accelerated("test_vit"), "'functools.partial' object has no attribute '__globals__'"
"""


@pytest.mark.nightly
def test_what_passes_without_fastvit_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tests of models that are not listed are left out, and a difference that is meant is none."""
    import_timm()
    suite = tmp_path / "timm-1" / "tests" / "test_models.py"
    suite.parent.mkdir(parents=True)
    suite.write_text(SUITE)
    (tmp_path / "timm-1" / "pyproject.toml").touch()
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "download", lambda name: tmp_path / "timm-1")
    assert command.main(["--suite", "timm"]) == 1
    out = capfd.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("PASSED")] == [
        "PASSED tests/test_models.py::test_different"
    ]
    assert "2 failed, 1 passed, 1 xfailed" in out
