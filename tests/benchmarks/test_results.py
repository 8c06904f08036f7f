"""The results page, its picture, and what the README says of the result files."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import journal
from benchmarks.harness import provenance
from benchmarks.harness.record import Provider, Record, environment
from benchmarks.harness.timing import Ceilings
from benchmarks.report import plot, results, speed
from fastvit.tuning.clock import Quantiles


def result(path: Path, lengths: tuple[int, ...], copy: float, device: str = "a GPU") -> Path:
    benchmarks = []
    for N in lengths:
        record = Record("attention", f"N{N}", "inference", {"N": N}, {}, flops=10**9, moved_bytes=10**6)
        record.providers = {
            "eager": Provider(Quantiles.of([0.012] * 3)),
            "fastvit": Provider(Quantiles.of([0.004] * 3)),
        }
        where = environment(torch.device("cpu"), torch.float32) | {"device": device}
        benchmarks.append({"extra_info": record.as_dict(where, Ceilings(copy, 1e12))})
    commit = {"id": "0123456789abcdef", "dirty": False}
    run = {"datetime": "2026-01-02T03:04:05", "commit_info": commit, "benchmarks": benchmarks}
    path.write_text(json.dumps(run))
    return path


def test_one_table_of_several_files(tmp_path):
    second = result(tmp_path / "b.json", (577, 1025), 3e12)
    first = result(tmp_path / "a.json", (17, 50), 1e12)
    text = results.render([first, second])
    assert text.count("### attention") == 1
    places = [text.index(f"\nN{N} ") for N in (17, 50, 577, 1025)]
    assert places == sorted(places)
    assert "large copy 3,000 GB/s" in text, "the best that the machine reached"
    assert "commit 0123456789" in text
    (tmp_path / "cut_off.json").touch()
    assert text in results.page([tmp_path]), "a folder's files of one dtype are one run"
    with pytest.raises(ValueError, match="several devices"):
        results.render([first, result(tmp_path / "c.json", (197,), 1e12, "another GPU")])
    with pytest.raises(ValueError, match="no benchmark"):
        results.render([])


def test_the_page_is_that_of_the_result_files():
    """`python -m benchmarks.report.results` makes it."""
    text = (results.RESULTS / "README.md").read_text()
    assert text == results.page()
    tables = [line for block in text.split("```")[1::2] for line in block.splitlines()]
    assert max(map(len, tables)) <= 100
    for file in plot.FILES.values():
        assert f"cpu/{file}" in text
        assert (results.RESULTS / "cpu" / file).exists()


def test_the_table_and_the_picture_of_a_gpu_are_those_of_its_results():
    """`make results` writes them."""
    assert results.GPU.with_name("table.md").read_text() == results.gpu_page(results.GPU)
    records = journal.last(journal.read(results.GPU))
    words = speed.describe(records)
    assert "training, batch 32, as called: SDPA (flash) 1,414," in words, "32 images in 22,626.3 us"
    for file in speed.FILES.values():
        assert f"<dc:description>{words}</dc:description>" in (results.RESULTS / file).read_text()
    texts = {text.get_text() for panel in speed.draw(records, "dark").axes for text in panel.texts} - {""}
    assert texts >= set(re.findall(r"[\d,]*\d,\d+|\d{3}", words.partition(".")[2])) - {"256"}
    with pytest.raises(ValueError, match="no picture: SDPA \\(flash\\) of model vit_base_patch16_224 B256"):
        speed.describe([])


def test_the_ops_of_the_readme_are_those_of_the_result_file():
    readme = (provenance.ROOT / "README.md").read_text()
    assert readme == results.with_ops(readme)
    assert "| `attention_qkvpacked`, B1 N1025 H12 d64 |" in readme
    assert len(readme.splitlines()) <= 190, "read in one sitting"
    with pytest.raises(ValueError, match="no lines"):
        results.with_ops("a page without marks")


def test_the_gpu_figures_of_the_readme_are_those_of_the_result_file():
    records = journal.last(journal.read(results.GPU))
    readme = " ".join((provenance.ROOT / "README.md").read_text().split())
    checks = [r["status"] for r in records if r["kind"] == "correct"]
    assert {*checks} == {"passed"}
    assert f"All {len(checks)} checks are right" in readme
