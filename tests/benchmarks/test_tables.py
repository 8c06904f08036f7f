"""The tables and the picture of a run, and the conditions that mark it."""

import dataclasses
import json

import pytest
import torch

from benchmarks.harness import conditions, table
from benchmarks.harness.clock import Quantiles
from benchmarks.harness.record import Provider, Record, environment
from benchmarks.harness.timing import Ceilings
from benchmarks.report import plot, read
from fastvit.study.memory.plot import draw

CPU = torch.device("cpu")


def a_record(op: str, N: int, eager_peak: int, fused_peak: int) -> Record:
    record = Record(op, f"N{N}", "training", {"N": N}, {}, flops=10**9, moved_bytes=10**6)
    record.providers = {
        "eager": Provider(Quantiles.of([0.012, 0.0123, 0.0126]), eager_peak, 100, 1.0, over_fastvit=(2.9, 3.1)),
        "sdpa": Provider(skipped="does not fit"),
        "fastvit": Provider(Quantiles.of([0.004, 0.0041, 0.0042]), fused_peak, 10, 0.5),
    }
    return record


def lines_of(record: Record, ceilings: Ceilings | None = None) -> list[str]:
    ((op, lines),) = table.render([record], ceilings)
    assert op == record.op
    return lines


def row(lines: list[str], column: str) -> list[str]:
    """Return the first row of the table that has this column."""
    start = next(i for i, line in enumerate(lines) if f" {column} " in f"{line} ")
    return lines[start + 2].split()


def test_table_shows_times_ratios_and_gaps():
    ceilings = Ceilings(bytes_per_second=1e10, flops_per_second=1e12)
    lines = lines_of(a_record("attention", 197, 8_000_000, 2_000_000), ceilings)
    assert row(lines, "ms") == ["N197", "fwd+bwd", "12.3", "skipped", "4.10", "3.00x", "-", "24%", "0.50"]
    assert row(lines, "MB") == ["N197", "fwd+bwd", "8.00", "-", "2.00", "4.00x", "-"]
    assert "compile" not in "".join(lines)
    assert "skipped: N197 fwd+bwd, sdpa: does not fit" in lines


def test_the_table_has_calls_and_the_gpu_alone():
    record = a_record("attention", 197, 8, 2)
    record.providers["eager"].called, record.providers["eager"].called_over_fastvit = (
        Quantiles.of([0.03] * 3),
        (1.4, 1.6),
    )
    record.providers["fastvit"].called = Quantiles.of([0.02] * 3)
    record.providers["fastvit"].remark = "no graph: refused"
    lines = lines_of(record)
    assert row(lines, "ms")[2:6] == ["12.3", "skipped", "4.10", "3.00x"]
    assert row(lines, "called")[2:6] == ["30.0", "skipped", "20.0", "1.50x"]
    assert "N197 fwd+bwd, fastvit: no graph: refused" in lines


def test_printed_ratios_are_those_of_the_printed_figures():
    """The median of the rounds' own ratios is another one: 1.5 here."""
    record = a_record("attention", 197, 8, 2)
    fused, eager = [1.0, 2.0, 4.0], [1.5, 1.9, 6.0]
    record.providers = {"eager": Provider(Quantiles.of(eager)), "fastvit": Provider(Quantiles.of(fused))}
    assert row(lines_of(record), "ms")[2:5] == ["1,900", "2,000", "~0.95x"]


@pytest.mark.parametrize(
    ("eager", "interval", "apart"),
    [
        (1.2, (1.1, 1.3), True),
        (0.8, (0.7, 0.9), True),
        (1.2, (0.9, 1.3), False),
        (1.2, None, False),
        (1.2, (0.8, 0.9), False),
    ],
)
def test_what_the_rounds_do_not_tell_apart_is_marked(eager, interval, apart):
    """In the last case medians and pairs disagree."""
    record = a_record("attention", 197, 8, 2)
    record.providers = {name: Provider(Quantiles.of([value])) for name, value in (("eager", eager), ("fastvit", 1.0))}
    record.providers["eager"].over_fastvit = interval
    assert record.told_apart("eager") is apart
    assert row(lines_of(record), "ms")[4].startswith("~") is not apart


def test_table_without_fused_has_no_ratios():
    record = a_record("attention", 197, 8, 2)
    del record.providers["fastvit"]
    assert record.memory_ratios() == record.time_ratios() == {}
    assert row(lines_of(record), "ms")[-4:] == ["-", "-", "-", "-"]


def test_tables_fit_a_hundred_columns():
    record = a_record("model", 197, 8, 2)
    record.case = "vit_small_patch16_224 B16 px518 patch_size14"
    record.providers["compile"] = Provider(Quantiles.of([1234.5] * 3), 10**11, 1, 1.0)
    lines = lines_of(record, Ceilings(1e10, 1e12))
    assert max(map(len, lines)) <= 100
    assert "patch_size14" in "".join(lines).replace("\n", ""), "long names are broken, not cut"
    del record.providers["compile"]
    record.case = "interleaved B1 N197 D768 H12"
    ((_, narrow),) = table.render([record], Ceilings(1e10, 1e12), 80)
    assert max(map(len, narrow)) <= 80
    assert row(narrow, "ms")[-3:] == ["-", "24%", "0.50"]


def test_growth_is_fitted_to_the_largest_sizes_and_says_which():
    """The sizes may run in any order."""
    records = [a_record("memory, attention", n, 4 * n * n, 64 * n) for n in (4097, 2305, 1025, 577, 197)]
    assert table.growth_lines(records) == [
        "eager: peak grows as N^2.00 from N = 1025 to 4097",
        "fastvit: peak grows as N^1.00 from N = 1025 to 4097",
    ]
    for few in (records[:2], records[-2:], [a_record("memory, attention", n, n, n) for n in (50, 197, 577)]):
        (line,) = table.growth_lines(few)
        assert line.startswith("eager, fastvit: no exponent of growth")


def test_rows_are_in_order_of_work_and_notes_stand_once():
    records = [a_record(op, N, 8, 2) for op in ("block", "attention") for N in (577, 197)]
    for r in records:
        r.flops, r.note, r.sdpa_backend = r.shape["N"], "on images", "flash"
    sections = dict(table.render(records, None))
    assert list(sections) == ["attention", "block", "notes"]
    assert [line.split()[0] for line in sections["block"] if line.startswith("N")] == ["N197", "N577"] * 2
    assert sections["notes"] == ["block; attention: on images", "block; attention: sdpa runs flash"]


def test_every_column_is_explained():
    record = a_record("attention", 197, 8, 2)
    record.providers["compile"] = record.providers["eager"]
    lines = lines_of(record, Ceilings(1e10, 1e12))
    explained = {word for line in table.LEGEND.splitlines() for word in line[:10].split()}
    assert set(lines[0].split()) | set(lines[1].split()) <= explained
    assert max(map(len, table.LEGEND.splitlines())) <= 80


def test_the_picture_names_every_line_and_its_slope(tmp_path):
    pytest.importorskip("matplotlib")
    records = [a_record("memory, attention", n, 4000 * n * n, 64000 * n) for n in (197, 577, 1025)]
    for r, peak in zip(records, (n * 64100 for n in (197, 577, 1025)), strict=True):
        r.shape |= {"B": 1, "H": 12}
        r.providers["sdpa"] = Provider(peak_bytes=peak)
    (panel,) = draw(table.growth(records), "a CPU", "dark", "peak").axes
    texts = [text.get_text() for text in panel.texts]
    assert [text.split()[0] for text in texts] == ["eager", "SDPA", "fastvit", "the"]
    assert ["{2.00}" in texts[0], "{1.00}" in texts[1], "{1.00}" in texts[2], texts[3]] == [
        *[True] * 3,
        "the lines overlap",
    ]
    for path in plot.save(records, "a CPU", tmp_path):
        assert "<svg" in path.read_text()
    with pytest.raises(ValueError, match="the memory study did not run"):
        plot.save([], "a CPU", tmp_path)


def test_header_says_plainly_that_no_gpu_was_measured():
    text = "\n".join(table.header(environment(CPU, torch.bfloat16), None))
    assert "CPU path (ATen), no GPU measured" in text
    assert "bfloat16" in text
    assert torch.__version__ in text


def test_a_busy_machine_marks_the_run():
    record, limits = a_record("layer_norm", 197, 8, 2), Ceilings(1e10, 1e12, 2e10)
    calm = conditions.Conditions(limits, Ceilings(1.05e10, 1e12, 2e10), 0.1, 2.0, 2)
    assert calm.best == Ceilings(1.05e10, 1e12, 2e10)
    (line,) = conditions.lines(calm, [record], limits)
    assert line == "load of the last minute 0.1 before the run, 2.0 after it, on 2 cores"
    assert conditions.Conditions.read(json.loads(json.dumps(dataclasses.asdict(calm)))) == calm
    slowed = dataclasses.replace(calm, end=Ceilings(1e10, 0.8e12, 2e10))
    _, mark, *reasons = conditions.lines(slowed, [record], Ceilings(1e10, 2e11, 2e10))
    assert mark.startswith(conditions.MARK)
    assert [reason.split(", ")[0] for reason in map(str.strip, reasons)] == [
        "matmul at the end -20% against the start",
        "layer_norm N197",
    ]
    assert reasons[1].endswith("fastvit at 122% of the limits")


def test_what_fits_into_a_cache_is_held_against_a_copy_in_the_cache():
    limits = Ceilings(1e10, 1e12, 4e10)
    assert (limits.least_seconds(0, 1e8), limits.least_seconds(0, 1e9)) == (1e8 / 4e10, 1e9 / 1e10)
    assert Ceilings(1e10, 1e12).least_seconds(0, 1e8) == 1e8 / 1e10
    assert (limits.rate(2e12, 1e9, 0.01), limits.rate(1, 1e10, 5.0)) == ("200 TFLOP/s", "0.002 TB/s")


def test_record_survives_json():
    record = a_record("attention", 197, 8, 2)
    ceilings = Ceilings(1e10, 1e12)
    data = json.loads(json.dumps(record.as_dict(environment(CPU, torch.float32), ceilings)))
    assert data["providers"]["eager"]["time"] == dataclasses.asdict(Quantiles.of([0.012, 0.0123, 0.0126]))
    assert (data["ceilings"], data["environment"]["dtype"]) == (dataclasses.asdict(ceilings), "float32")
    again = read.record(data)
    assert again == record
    for provider in data["providers"].values():
        del provider["over_fastvit"], provider["called_over_fastvit"]
    assert not read.record(data).told_apart("eager"), "a file of before has no intervals"
    assert (again.memory_ratios(), again.time_ratios()) == ({"eager": 4.0}, {"eager": pytest.approx(3.0)})
    assert again.share_of_ceiling("fastvit", ceilings) == pytest.approx(1 / 4.1)
