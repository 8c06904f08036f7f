"""Models of other libraries through `fastvit.compile`, by the check that makes benchmarks/results: outputs and all
gradients against eager mode and float64, and no less fused than the results say.

By default a few; FASTVIT_MODELS=all (`make models`) takes all that the results list: an hour of a core.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from library_imports import import_library
from torch import nn

from benchmarks.coverage import graph_checks, graph_models
from benchmarks.report import graph_tables

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu" / "graphs.json"
ROWS = json.loads(RESULTS.read_text())["rows"]
FULL = os.environ.get("FASTVIT_MODELS") == "all"
FEW = {  # attention halves, attention by itself, and norms, of which the last is left
    "transformers/ViTForImageClassification": (2, 0, 4),
    "transformers/Dinov2Model": (2, 0, 4),
    "transformers/CLIPVisionModel": (2, 0, 4),
    "transformers/SwinModel": (0, 4, 5),  # between a norm and a projection are windows
    "transformers/Aimv2VisionModel": (2, 0, 4),  # RMSNorm
    "transformers/Sapiens2Model": (2, 0, 8),  # norms of q and k
    "timm/vit_tiny_patch16_224": (2, 0, 4),
    "timm/eva02_tiny_patch14_224": (2, 0, 5),
    "timm/vit_5b_patch16_sapiens2": (0, 2, 4),  # heads share keys
    "timm/beit_base_patch16_224": (2, 0, 5),  # relative positions are a bias of the scores
    "timm/beit3_base_patch16_224": (2, 0, 9),  # a norm before each projection
    "torchvision/vit_b_16": (2, 0, 4),
    "torchvision/swin_t": (0, 3, 4),
}


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row["same_as"]] if FULL else FEW)
def test_as_right_and_as_fused_as_the_results_say(name):
    library, _, model = name.partition("/")
    import_library(library)
    row = graph_models.run(graph_models.Candidate(library, model))
    assert row.status == ROWS[name]["status"], row.detail
    for column, kinds in graph_tables.KINDS.items():
        fused, shown = (graph_tables.counts(of, *kinds)[0] for of in (vars(row), ROWS[name]))
        assert fused >= shown, (column, row.sites)
    if name in FEW:
        halves, alone, norms = FEW[name]
        assert row.status == "right", row.detail
        assert row.sites["attention"]["fused"].get("layer_norm_attention", 0) == halves, row.sites
        assert graph_tables.counts(vars(row), "attention") == (halves + alone, halves + alone), row.sites
        assert graph_tables.counts(vars(row), *graph_tables.KINDS["norms"])[0] == norms, row.sites


@pytest.mark.parametrize("library", graph_models.LIBRARIES)
def test_the_results_list_every_model(library):
    module = import_library(library)
    shown = json.loads(RESULTS.read_text())["environment"]["libraries"][library]
    if module.__version__ != shown:
        pytest.skip(f"the results are of {library} {shown}")
    assert {str(candidate) for candidate in graph_models.candidates(library)} == {
        name for name in ROWS if name.startswith(f"{library}/")
    }


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).softmax(-1, dtype=torch.float32)


def test_what_computes_something_else_is_wrong():
    subject = graph_checks.Model(Doubling(), {"x": torch.randn(4, 8)})
    assert subject.exact.evaluated["output"].dtype == torch.float64
    assert subject.check(lambda model: model) < 1
    with pytest.raises(graph_checks.Wrong, match="in evaluation output: error"):
        subject.check(lambda model: lambda x: model(x * 1.001))


def test_only_the_gradient_is_wrong():
    subject = graph_checks.Model(Doubling(), {"x": torch.randn(4, 8)})
    with pytest.raises(graph_checks.Wrong, match="gradient of x"):
        subject.check(lambda model: lambda x: model(2 * x.detach() - x))


class Steep(nn.Module):
    """Makes a thousand of a rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1e3 * self.linear(x)).sin()


def test_one_lucky_run_of_eager_mode_condemns_nothing():
    torch.manual_seed(0)
    subject = graph_checks.Model(Steep(), {"x": torch.randn(4, 8)})
    lucky = [{name: t.float() for name, t in part.items()} for part in subject.exact]
    subject.eager = [graph_checks.Results(*lucky)]
    with pytest.raises(graph_checks.Wrong, match="in evaluation output: error"):
        subject._judge(subject._results(subject.model, lambda model: model), 1)
    assert subject.check(lambda model: model) < 1
    assert 1 < len(subject.eager) < 17
    with pytest.raises(graph_checks.Wrong, match="in evaluation output: error"):  # is no matter of rounding
        subject.check(lambda model: lambda x: model(x * (1 + 1e-5)))


def test_table(tmp_path):
    sites = {
        "attention": {
            "fused": {"attention": 2},
            "left": {"a bias is added": 1, "k and v of another length than q": 3, "float16": 1},
        },
        "MLP": {"fused": {"layer_norm_mlp": 2}, "left": {}},
        "LayerNorm": {"fused": {"layer_norm_mlp": 1}, "left": {"add after it": 1}},
        "RMSNorm": {"fused": {"layer_norm_linear": 3}, "left": {}},
    }
    row = vars(graph_models.Row("timm", "vit_x", "vit", "right", graphs=1, sites=sites, share=0.5, eager_runs=5))
    lost = vars(graph_models.Row("timm", "vit_y", "vit", "eager", "ImportError: " + "natten " * 30))
    graph_models.save(tmp_path / "graphs.json", {"timm/vit_x": row, "timm/vit_y": lost})
    assert json.loads((tmp_path / "graphs.json").read_text())["rows"]["timm/vit_x"] == row
    lines = graph_tables.render(tmp_path / "graphs.json")
    assert max(map(len, lines)) <= 100
    assert lines[1] == "0 of 1 with every self-attention fused"
    assert next(line for line in lines if line.startswith("vit ")).split() == [
        "vit", "1/2", "2/4", "3", "4/5", "2/2", "-", "1", "0.50",
    ]  # fmt: skip
    assert lines[lines.index("  timm vit_x: 5") - 1].startswith("right by eager mode's largest error of so many runs")
