"""`make peers`: which differences count, and what its plugin puts into other libraries' tests."""

from pathlib import Path
from typing import Any

import pytest
from library_imports import import_timm

from benchmarks.peers import __main__ as command
from benchmarks.peers import plugin


def row(outcome: str, error: str = "", models: int = 1) -> dict[str, Any]:
    return {"outcome": outcome, "error": error, "models": models}


def test_a_test_that_ends_in_another_way_without_fastvit_is_a_difference_unless_meant() -> None:
    own = {"a": row("failed", "E1"), "b": row("failed"), "c": row("skipped"), "d": row("skipped"), "e": row("passed")}
    own |= {"f": row("failed", models=0), "script1": row("failed", "ScriptModule"), "script2": row("failed", "NaN")}
    plain = {"a": row("passed"), "b": row("failed"), "c": row("passed"), "d": row("skipped")}
    meant = [
        {"suite": "timm", "tests": "script*", "error": "ScriptModule", "reason": "is documented"},
        {"suite": "timm", "tests": "g", "error": ".", "reason": "occurs no more"},
        {"suite": "transformers", "tests": "*", "error": ".", "reason": "another suite"},
    ]
    result = command.compare("timm", own, plain, meant)
    assert list(result["differences"]) == ["a", "c", "script2"]
    assert (result["tests"], result["passed"], result["same"]) == (7, 1, 2)
    assert result["deliberate"] == {"script*: is documented": 1, "g: occurs no more": 0}
    text = command.lines(result)
    assert text[0] == "timm accelerate: 7 tests, 1 pass, 2 end as without fastvit, 1 differ on purpose, 3 differ"
    assert "  differs: a: failed: E1" in text
    assert "  not met: g: occurs no more" in text


SUITE = """
import pytest, timm

@pytest.mark.parametrize("model_name", ["test_vit", "test_resnet", "vit_tiny_patch16_224"])
def test_forward(model_name):
    assert "forward" in vars(timm.create_model(model_name).blocks[0]), "is not accelerated"

def test_none():
    pytest.skip("no model")
"""


def test_plugin_and_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of models that are not listed are left out. Counted is what fastvit was put into."""
    import_timm()
    suite = tmp_path / "timm-1" / "tests" / "test_models.py"
    suite.parent.mkdir(parents=True)
    suite.write_text(SUITE)
    (tmp_path / "timm-1" / "pyproject.toml").touch()
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "pinned", lambda name: f"{name}==1")
    (tmp_path / "only").write_text("test_forward[test_vit]\ntest_forward[test_resnet]\ntest_none")
    name = "tests.test_models::test_"
    assert command.run_tests("timm", "--accelerate", "--only", str(tmp_path / "only")) == {
        f"{name}forward[test_vit]": row("passed"),
        f"{name}none": row("skipped", "no model", 0),
    }


def test_an_error_of_ours_is_one_of_a_test_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.Touched, "count", 0)
    with pytest.raises(TypeError):
        plugin.accelerate(None)
    assert plugin.Touched.count == 1
