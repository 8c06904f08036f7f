"""The tables of the command at several widths: every number of the data is printed whole."""

import argparse
import re

import pytest

from fastvit.cli import memory, models, terminal, verify
from fastvit.study import MemoryPoint, MemoryStudy, ModelCost, Parts, Setting, Verdict
from fastvit.study.models.hardware import Bound
from fastvit.study.models.parameter_counts import Parameters

pytest.importorskip("rich")
LONG = "vit_mediumd_patch16_rope_reg1_gap_256"
M = 2**20


def print_memory() -> set[str]:
    def point(provider: str, px: int, tokens: int, batch: int, scale: int) -> MemoryPoint:
        parts = Parts(*(n * scale * M for n in (100, 200, 300, 40, 500, 600, 70)))
        return MemoryPoint(provider, (px, px + 14), tokens, batch, parts, 10 * tokens, 0, 12_345 * scale * M)

    sizes = [("eager", 518, 1370, 8, 7), ("fastvit", 518, 1370, 8, 11), ("eager", 2044, 21317, 128, 1013)]
    points = tuple(point(*size) for size in sizes)
    fits = [{"provider": "fastvit", "batch": {"518x532": 1234}, "image_size": {"8": 4321}}]
    memory._print(MemoryStudy(LONG, "cuda", (14, 14), Setting(), points), argparse.Namespace(measured=True), fits)
    numbers = {f"{n * scale:,}" for scale in (11, 1013) for n in (100, 200, 300, 500, 600, 110, 1810, 12_345)}
    return {"518x532", "2044x2058", "1370", "21317", "8", "128", "1234", "4321", *numbers}


def a_cost(name: str, batch: int, plain: bool = True) -> ModelCost:
    parameters = Parameters(1_234_567, 2_345_678, 345_678_901, 4_567_890, 567_890, 678_901, 7_890_123)
    bound, patch = Bound("T4", 0.10926, 0.0432), (14, 14) if plain else None
    return ModelCost(
        name, (518, 532), patch, batch, 5 if plain else None, parameters, 8_765_432_100_000 * batch, 987_654_321, plain,
        1, bound,
    )  # fmt: skip


def print_models() -> set[str]:
    costs = [a_cost(LONG, 1), a_cost("resnet50", 64, plain=False)]
    for kind in models._COLUMNS:
        models._table(costs, kind)
    columns = {"1.2M", "2.3M", "345.7M", "4.6M", "567.9k", "678.9k", "7.9M", "363.0M"}
    return columns | {"518x532/14", "518x532", "1,411", "4.4T", "280.5T", "987.7", "109.26", "1", "64"}


def print_model() -> set[str]:
    models._one(a_cost(LONG, 64))
    counts = (1_234_567, 2_345_678, 345_678_901, 4_567_890, 567_890, 678_901, 7_890_123, 362_963_950)
    flops = 8_765_432_100_000 * 64
    more = {"518x532/14", "1,411", f"{1411**2:,}", f"{1406**2:,}", "1,406", "64", "987.7", "109.26", "95.2%"}
    return {f"{count:,}" for count in (*counts, flops, flops // 2)} | more


def print_verdicts() -> set[str]:
    def verdict(name: str, dtype: str, output: float | None, gradient: float | None) -> Verdict:
        return Verdict(name, dtype, 128, 1536, 4097, "interpreter", output, gradient, "x", output != 1234.5, "")

    dtypes = ("float32", "bfloat16", "float16")
    verdicts = [verdict(LONG, dtype, 0.5 + i / 2, 1.25 + i / 2) for i, dtype in enumerate(dtypes)]
    verify._table([*verdicts, verdict("layer_norm_attention qk_norm", "float32", 1234.5, 0.98)])
    return {"128", "4097", "0.50", "1.25", "1.00", "1.75", "1.50", "2.25", "1.23e+03", "0.98"}


@pytest.mark.parametrize("columns", [60, 200])
@pytest.mark.parametrize("show", [print_memory, print_models, print_model, print_verdicts], ids=lambda f: f.__name__)
def test_no_number_is_cut(show, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    numbers = show()
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    assert "\x1b" not in out
    assert numbers - set(re.split(r"[\s:;]+|, ", out)) == set()
    assert LONG in re.split(r"[\s,]+", out), "a name is broken"


def test_a_table_too_narrow_for_one_number_is_still_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    terminal.print_table(["model", "a", "b"], [["some_name_of_a_model", "123,456,789,012", "1"], [], ["x", "2", "34"]])
    assert {"123,456,789,012", "34"} <= set(capsys.readouterr().out.split())
