"""`make peers`: which differences count, and what its plugin puts into other libraries' tests."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from library_imports import import_timm

import fastvit
from benchmarks.peers import __main__ as command
from benchmarks.peers import compare, models, plugin

RUNS = {f"{suite} {run}" for suite, runs in plugin.RUNS.items() for run in runs}


def row(name: str, outcome: str, error: str = "", models: int = 1) -> dict[str, Any]:
    return {"id": name, "outcome": outcome, "error": error, "models": models}


def compared(own: list[dict[str, Any]], plain: list[dict[str, Any]], *meant: compare.Deliberate) -> dict[str, Any]:
    return compare.compare("timm accelerate", own, {one["id"]: one for one in plain}, meant)


def test_what_ends_in_another_way_without_fastvit_is_a_difference():
    own = [row("a", "failed", "E1"), row("b", "failed"), row("c", "skipped"), row("d", "skipped"), row("e", "passed")]
    own.append(row("f", "failed", models=0))  # nothing of fastvit in it
    plain = [row("a", "passed"), row("b", "failed"), row("c", "passed"), row("d", "skipped")]
    result = compared(own, plain)
    assert [one["id"] for one in result["differences"]] == ["a", "c"]
    assert (result["tests"], result["passed"], result["same"]) == (5, 1, 2)
    assert "  differs: a: failed: E1" in compare.lines(result)


def test_a_deliberate_difference_is_met_by_its_error_and_run_alone():
    meant = compare.Deliberate(("timm accelerate",), "script*", "ScriptModule", "is documented")
    other = compare.Deliberate(("timm create_model",), "*", ".", "another run")
    own = [
        row("script1", "failed", "a ScriptModule"),
        row("script2", "failed", "NaN"),
        row("x", "failed", "ScriptModule"),
    ]
    result = compared(own, [row(one["id"], "passed") for one in own], meant, other)
    assert [one["id"] for one in result["differences"]] == ["script2", "x"]
    assert result["deliberate"] == [{"tests": "script*", "count": 1, "reason": "is documented"}]
    assert result["unmet"] == []
    result = compared([row("script1", "passed")], [], meant, other)
    assert result["unmet"] == ["script*"]
    assert "  deliberate, but not met: script*" in compare.lines(result)


@pytest.mark.parametrize("missing", ["runs", "tests", "error", "reason"])
def test_a_deliberate_difference_needs_all_of_it(missing, tmp_path):
    fields = {"runs": ["timm accelerate"], "tests": "*", "error": "E", "reason": "R"}
    del fields[missing]
    path = tmp_path / "deliberate.toml"
    path.write_text("\n".join(["[[difference]]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]))
    with pytest.raises(ValueError, match=f"needs its {missing}"):
        compare.read_deliberate(path)


def test_the_list_names_runs_that_there_are():
    assert {run for entry in compare.read_deliberate() for run in entry.runs} <= RUNS


def test_unknown_models_are_refused(monkeypatch, capsys):
    import_timm()
    monkeypatch.setattr(models, "find", lambda limit: pytest.fail("looks for others first"))
    with pytest.raises(SystemExit):
        command.main(["--models", "test_vit", "vit_tiny_patch16_244"])
    assert "no such model: vit_tiny_patch16_244\n" in capsys.readouterr().err


def test_fastvit_takes_the_place_of_timm_where_both_have_the_model(monkeypatch):
    timm = import_timm()
    monkeypatch.setattr(plugin.Touched, "count", 0)
    tag = timm.get_pretrained_cfg("test_vit").tag

    def made(*args: Any, **kwargs: Any) -> Any:
        return plugin._of_fastvit(lambda *args, **kwargs: (args, kwargs), *args, **kwargs)

    for name in ("test_vit", f"test_vit.{tag}"):
        model = made(name, False, num_classes=3, pretrained_cfg=None)
        assert isinstance(model, fastvit.vit.VisionTransformer)
        assert model.num_classes == 3
    assert plugin.Touched.count == 2
    for call in (("test_vit", True), ("test_vit.another", False), ("resnet18", False)):
        assert made(*call) == (call, {})
    assert made("test_vit", checkpoint_path="file") == (("test_vit",), {"checkpoint_path": "file"})
    assert plugin.Touched.count == 2


def test_models_count_that_something_was_put_into(monkeypatch):
    timm = import_timm()
    monkeypatch.setattr(plugin.Touched, "count", 0)
    plugin.accelerate(timm.create_model("test_resnet"))
    assert plugin.Touched.count == 0
    model = plugin.accelerate(timm.create_model("test_vit"))
    assert plugin.Touched.count == 1
    assert "forward" in model.blocks[0].__dict__
    with pytest.raises(TypeError):
        plugin.accelerate(None)
    assert plugin.Touched.count == 2  # an error of ours is one of a test that counts


def create_model() -> None: ...


def _makes() -> None:
    [create_model() for _ in range(1)]


def makes_by_another() -> None:
    _makes()


def makes_none() -> None:
    row("a", "passed")


def test_tests_are_chosen_by_the_models_that_they_make():
    def item(function: Any, **params: Any) -> Any:
        return SimpleNamespace(function=function, **({"callspec": SimpleNamespace(params=params)} if params else {}))

    chosen = [
        item(makes_by_another),
        item(makes_none),
        item(makes_none, model_name="vit.tag"),
        item(_makes, model_name="x"),
        item(_makes, size=3),
    ]
    assert [plugin._creates_one_of({"vit"}, one) for one in chosen] == [True, False, True, False, True]


def test_outcomes_are_written_as_they_come(tmp_path):
    recorder = plugin.Recorder(tmp_path / "lines")

    def report(when: str, outcome: str, text: str = "", **properties: int) -> None:
        one = pytest.TestReport("id", ("file", 1, "id"), {}, outcome, text, when, user_properties=[*properties.items()])  # type: ignore[arg-type]
        recorder.pytest_runtest_logreport(one)

    report("call", "failed", "Error: first", models=2)  # a subtest
    report("call", "passed", models=3)
    assert not recorder.path.exists()
    report("teardown", "passed", models=3)
    report("setup", "passed")
    report("call", "passed", models=1)
    report("teardown", "passed", models=1)
    (tmp_path / "lines").write_text("{}\n" + recorder.path.read_text())
    assert compare.read_lines(tmp_path / "lines") == [row("id", "passed")]
    assert json.loads(recorder.path.read_text().splitlines()[1]) == row("id", "failed", "Error: first", models=3)


def test_table(tmp_path):
    result = compared([row("a", "failed", "E1"), row("b", "passed")], [row("a", "passed")])
    found = vars(models.Found(["test_vit"], ["vit_giant"], ["test_vit"], {"ViTConfig": ["ViTModel"]}, 5))
    where = {"suites": ["timm==1.0"], "torch": "2"}
    (tmp_path / "peers.json").write_text(json.dumps({"environment": where, "models": found, "runs": [result]}))
    text = "\n".join(compare.render(tmp_path / "peers.json"))
    assert text.startswith(
        "timm accelerate: 2 tests, 1 pass, 0 end as without fastvit, 0 differ on purpose, 1 differ\n"
    )
    assert "left out as too large: vit_giant" in text
