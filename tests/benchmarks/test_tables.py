"""The tables and pictures of runs, what marks them, and the pages that are made of result files."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import results_file
from benchmarks.harness import conditions, table
from benchmarks.harness.clock import Quantiles
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.record import Provider, Record, environment
from benchmarks.harness.timing import Ceilings
from benchmarks.harness.workloads import workloads
from benchmarks.report import plot, results, speed
from fastvit.study.memory.block import block
from fastvit.study.memory.plot import NAMES
from fastvit.study.sources.model_source import PROVIDERS

CPU, LIMITS = torch.device("cpu"), Ceilings(bytes_per_second=1e10, flops_per_second=1e12)


def a_record(op: str = "attention", N: int = 197, eager_peak: int = 8_000_000, fused_peak: int = 2_000_000) -> Record:
    record = Record(op, f"N{N}", "training", {"B": 1, "H": 12, "N": N}, {}, flops=10**9, moved_bytes=10**6)
    record.providers = {
        "eager": Provider(Quantiles.of([0.012, 0.0123, 0.0126]), eager_peak, 100, 1.0, over_fastvit=(2.9, 3.1)),
        "sdpa": Provider(skipped="does not fit"),
        "fastvit": Provider(Quantiles.of([0.004, 0.0041, 0.0042]), fused_peak, 10, 0.5),
    }
    return record


def table_lines(record: Record) -> list[str]:
    ((_, lines),) = table.render([record], LIMITS)
    return lines


def row(lines: list[str], column: str) -> list[str]:
    """Return the first row of the table that has this column."""
    start = next(i for i, line in enumerate(lines) if f" {column} " in f"{line} ")
    return lines[start + 2].split()


def test_a_table_has_times_peaks_and_remarks():
    record = a_record()
    record.providers["fastvit"].remark = "no graph: refused"
    lines = table_lines(record)
    assert row(lines, "ms") == ["N197", "fwd+bwd", "12.3", "skipped", "4.10", "3.00x", "-", "24%", "0.50"]
    assert row(lines, "MB") == ["N197", "fwd+bwd", "8.00", "-", "2.00", "4.00x", "-"]
    assert lines[-2:] == ["skipped: N197 fwd+bwd, sdpa: does not fit", "N197 fwd+bwd, fastvit: no graph: refused"]
    for interval in ((0.9, 3.1), None):
        record.providers["eager"].over_fastvit = interval
        assert row(table_lines(record), "ms")[5] == "~3.00x", "the rounds do not tell the two apart"
    del record.providers["fastvit"]
    assert row(table_lines(record), "ms")[-4:] == ["-", "-", "-", "-"], "nothing without fastvit's figure"


@pytest.mark.parametrize("width", [30, 60])
def test_a_narrow_table_breaks_no_word_and_leaves_no_figure_out(width):
    record = dataclasses.replace(a_record(), case="vit_small_patch16_224 B1 px224 of a library")
    ((_, wide),) = table.render([record], LIMITS, 1 << 16)
    ((_, narrow),) = table.render([record], LIMITS, width)
    assert max(map(len, wide)) > max(map(len, narrow)) <= width
    words = " ".join(narrow).split()
    cells = {word for line in wide for word in line.split() if set(word) != {"-"}}
    assert cells - {"case"} <= {*words}, "the names are lines of their own, without a head"
    assert words.index("vit_small_patch16_224") < words.index("12.3") < words.index("24%")


def test_a_finished_case_is_a_line():
    assert table.in_a_line(a_record()).split() == ["4.10", "ms", "3.00x", "eager"]
    assert table.in_a_line(a_record("memory, block")).split() == ["2.00", "MB", "4.00x", "eager"]
    record = a_record()
    record.providers["sdpa"] = Provider(Quantiles.of([0.005, 0.0051, 0.0052]), over_fastvit=(0.9, 1.3))
    assert table.in_a_line(record).split() == ["4.10", "ms", "~1.24x", "sdpa"], "the fastest other"
    del record.providers["fastvit"]
    assert table.in_a_line(record).split() == ["-", "ms"]


def test_graphs_have_a_time_as_called_only():
    record = a_record()
    assert "graphs" not in "".join(table_lines(record))
    for name, ms in (("eager", 12.0), ("fastvit", 4.0), ("graphs", 2.0)):
        record.providers.setdefault(name, Provider()).called = Quantiles.of([1e-3 * ms])
    lines = table_lines(record)
    assert row(lines, "called") == ["N197", "fwd+bwd", "12.0", "skipped", "4.00", "2.00", "~3.00x", "-", "~0.50x"]
    assert row(lines, "ms") == row(table_lines(a_record()), "ms")
    assert Record.read(json.loads(json.dumps(dataclasses.asdict(record)))) == record


def test_growth_is_fitted_to_the_largest_sizes_and_drawn(tmp_path):
    """The sizes may run in any order."""
    records = [a_record("memory, attention", n, 4000 * n * n, 64000 * n) for n in (4097, 2305, 1025, 577, 197)]
    assert table.growth_lines(records) == [
        "eager: peak grows as N^2.00 from N = 1025 to 4097",
        "fastvit: peak grows as N^1.00 from N = 1025 to 4097",
    ]
    (line,) = table.growth_lines(records[-2:])
    assert line.startswith("eager, fastvit: no exponent of growth")
    pytest.importorskip("matplotlib")
    assert [path.read_text().count("</svg>") for path in plot.save(records, "a CPU", tmp_path)] == [1, 1]


def test_a_busy_machine_marks_the_run():
    limits = dataclasses.replace(LIMITS, cached_bytes_per_second=2e10)
    calm = conditions.Conditions(limits, dataclasses.replace(limits, bytes_per_second=1.05e10))
    assert not [*conditions.lines(calm, [a_record()], limits)]
    slowed = dataclasses.replace(calm, end=dataclasses.replace(limits, flops_per_second=0.8e12))
    mark, *reasons = conditions.lines(slowed, [a_record()], Ceilings(1e10, 2e11, 2e10))
    assert mark.startswith(conditions.MARK)
    assert reasons[0].strip() == "matmul at the end -20% against the start"
    assert reasons[1].strip() == "attention N197, training, fastvit at 122% of the limits"


def saved(path: Path, lengths: tuple[int, ...], limits: Ceilings, **where: str) -> Path:
    """Write a result file, and return its path."""
    records = [a_record(N=N).as_dict(environment(CPU, torch.bfloat16) | where, limits) for N in lengths]
    run = {"datetime": "2026-01-02T03:04:05", "commit_info": {"id": "0123456789abcdef", "dirty": False}}
    run["conditions"] = dataclasses.asdict(conditions.Conditions(limits, limits))
    path.write_text(json.dumps(run | {"benchmarks": [{"extra_info": record} for record in records]}))
    return path


def test_files_of_one_run_are_one_table(tmp_path):
    second = saved(tmp_path / "b.json", (577, 1025), dataclasses.replace(LIMITS, bytes_per_second=3e12))
    first = saved(tmp_path / "a.json", (17, 50), LIMITS)
    (tmp_path / "cut_off.json").touch()
    text = results.page([tmp_path])
    assert results.render([first, second]) in text
    assert text.count("### attention") == 1
    places = [text.index(f"\nN{N} ") for N in (17, 50, 577, 1025)]
    assert places == sorted(places)
    assert Record.read(json.loads(first.read_text())["benchmarks"][0]["extra_info"]) == a_record(N=17)
    with pytest.raises(ValueError, match="several devices"):
        results.render([first, saved(tmp_path / "c.json", (197,), LIMITS, device="another")])


def test_files_of_another_kind_are_refused(tmp_path):
    (tmp_path / "graphs.txt").write_text('{"rows": {}}\n1.5\n')
    assert results_file.read(tmp_path / "graphs.txt") == []
    with pytest.raises(ValueError, match=r"no benchmark in .*graphs\.txt: pytest benchmarks --benchmark-json"):
        plot.read([tmp_path / "graphs.txt"])
    with pytest.raises(ValueError, match=f"no results in {tmp_path}"):
        results.page([tmp_path])
    with pytest.raises(ValueError, match="at one number of tokens"):
        plot.save([a_record("memory, attention")], "a CPU", tmp_path)
    with pytest.raises(ValueError, match=r"no op 'atention'; did you mean attention"):
        workloads("traffic", ops=("atention",))
    with pytest.raises(ValueError, match="no workload of linear is for traffic; there are: add_layer_norm, attention,"):
        workloads("traffic", ops=("linear",))


def test_the_page_says_where_each_file_comes_from():
    patterns = {pattern for several in results.MADE_BY for pattern in several.split(", ")}
    matched = {
        path: {pattern for pattern in patterns if path.match(f"results/{pattern}")}
        for path in results.RESULTS.rglob("*.*")
    }
    assert [path for path, found in matched.items() if not found] == []
    assert patterns == set().union(*matched.values())


def test_pages_and_pictures_are_those_of_the_result_files():
    """`make results` writes them."""
    assert (results.RESULTS / "README.md").read_text() == results.page()
    readme = (ROOT / "README.md").read_text()
    assert readme == results.with_ops(readme)
    records = results_file.last(results_file.read(results.GPU))
    checks = [r["status"] for r in records if r["kind"] == "correct"]
    assert f"All {checks.count('passed')} checks are right" in readme
    assert {*checks} == {"passed"}
    words = speed.describe(records)
    assert "training, batch 32, as called: SDPA (flash) 1,524," in words, "32 images in 21.0 ms"
    for file in speed.FILES.values():
        assert f"<dc:description>{words}</dc:description>" in (results.RESULTS / file).read_text()


def test_the_picture_of_a_block_has_the_ops_that_run():
    """`make results` draws it."""
    pytest.importorskip("triton")
    costs = [block("vit_base_patch16_224", provider=provider) for provider in PROVIDERS]
    names = [NAMES[provider] for provider in PROVIDERS]
    words = [*names, *(op.name for cost in costs for op in cost.ops)]
    for theme in ("light", "dark"):
        picture = (results.RESULTS / f"block_{theme}.svg").read_text()
        assert sorted(re.findall(r"<!-- (\w+) -->", picture)) == sorted(words)
        assert all(f"<!-- {len(cost.ops)} ops, keep {cost.kept:.1f} -->" in picture for cost in costs)
    counts = ", ".join(f"{name} {len(cost.ops)}" for name, cost in zip(names, costs, strict=True))
    assert f"The ops of a block of ViT-B/16: {counts}" in (ROOT / "README.md").read_text()
