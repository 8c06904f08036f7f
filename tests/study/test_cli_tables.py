"""The tables of the command at several widths: every number of the data is printed whole."""

import argparse
import re

import pytest

from fastvit.cli import memory, models, verify
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


def print_verdicts() -> set[str]:
    rows = [(LONG, "float32", 0.5, 1.25), ("layer_norm_attention qk_norm", "bfloat16", 1234.5, 0.98)]
    verify._table([Verdict(*row[:2], 128, 1536, 4097, "interpreter", *row[2:], "x", True, "") for row in rows])
    return {"128", "4097", "0.50", "1.25", "1.23e+03", "0.98"}


@pytest.mark.parametrize("columns", [60, 200])
@pytest.mark.parametrize("show", [print_memory, print_models, print_verdicts], ids=lambda f: f.__name__)
def test_no_number_is_cut(show, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    numbers = show()
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    assert "\x1b" not in out
    assert numbers - set(re.split(r"[\s:;]+|, ", out)) == set()
    assert LONG in re.split(r"[\s,]+", out), "a name is broken"
