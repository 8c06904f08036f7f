"""Models of other libraries through `fastvit.compile` and `fastvit.accelerate`, by the check that makes
benchmarks/results: outputs and all gradients against eager mode and float64, and no less fused than the results say.

By default a few; FASTVIT_MODELS=all (`make models`) takes all that the results list: two hours of a core.
"""

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from library_imports import import_library
from torch import nn

import fastvit
from benchmarks.coverage import graph_checks, graph_models
from benchmarks.report import graph_tables

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu" / "graphs.json"
ROWS = json.loads(RESULTS.read_text())["rows"]
FULL = os.environ.get("FASTVIT_MODELS") == "all"
FEW = {  # attention halves, attention by itself, and norms, of which the last is left
    "transformers/ViTForImageClassification": (2, 0, 4),
    "transformers/Aimv2VisionModel": (2, 1, 4),  # RMSNorm; pools by attention
    "transformers/Sapiens2Model": (2, 0, 8),  # norms of q and k
    "transformers/EomtForUniversalSegmentation": (2, 0, 4),  # a mask of symbolic sizes after a break of the graph
    "timm/eva02_tiny_patch14_224": (2, 0, 5),
    "timm/vit_5b_patch16_sapiens2": (0, 2, 4),  # heads share keys
    "timm/beit_base_patch16_224": (2, 0, 5),  # relative positions are a bias of the scores
    "torchvision/vit_b_16": (2, 0, 4),
}


@pytest.mark.parametrize("name", ROWS if FULL else FEW)
def test_as_right_and_as_fused_as_the_results_say(name):
    library, _, model = name.partition("/")
    import_library(library)
    row = graph_models.run(graph_models.Candidate(library, model))
    assert row.status == ROWS[name]["status"], row.detail
    for column, kinds in graph_tables.KINDS.items():
        fused, shown = (graph_tables.counts(of, *kinds)[0] for of in (vars(row), ROWS[name]))
        assert fused >= shown, (column, row.sites)
    recorded = ROWS[name]["accelerated"]
    assert row.accelerated.status == recorded["status"], row.accelerated.detail
    assert (row.accelerated.left or 0) <= (recorded["left"] or 0), row.sites
    if name in FEW:
        halves, alone, norms = FEW[name]
        assert row.status == "right", row.detail
        assert row.accelerated.status == "right", row.accelerated.detail
        assert row.sites["attention"]["fused"].get("layer_norm_attention", 0) == halves, row.sites
        assert graph_tables.counts(vars(row), "attention") == (halves + alone, halves + alone), row.sites
        assert graph_tables.counts(vars(row), *graph_tables.KINDS["norms"])[0] == norms, row.sites


def test_attention_that_accelerate_leaves_is_counted(monkeypatch):
    import_library("torchvision")
    monkeypatch.setattr(fastvit, "accelerated", lambda model: contextlib.nullcontext())
    row = graph_models.run(graph_models.Candidate("torchvision", "vit_b_16"))
    assert (row.accelerated.status, row.accelerated.left) == ("right", 2), row.accelerated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x * 1.001, "in evaluation output: error"),
        (lambda x: 2 * x.detach() - x, "gradient of input"),
    ],
)
def test_the_check_finds_wrong_results(change, message):
    subject = graph_checks.Model(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), {"input": torch.randn(4, 8)})
    assert subject.check(lambda model: model) < 1
    with pytest.raises(graph_checks.Wrong, match=message):
        subject.check(lambda model: lambda input: model(change(input)))
