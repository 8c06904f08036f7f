"""Models of other libraries through `fastvit.compile`, by the check that makes benchmarks/results: outputs and all
gradients against eager mode and float64, and what is fused."""

import json
from pathlib import Path

import pytest
import torch
from library_imports import import_library
from torch import nn

from benchmarks.harness import graph_checks, graph_models, graph_tables

MODELS = {  # attention sites without a mask or a bias
    ("transformers", "ViTForImageClassification"): 2,
    ("transformers", "Dinov2Model"): 2,
    ("transformers", "ViTMAEForPreTraining"): 4,
    ("transformers", "CLIPVisionModel"): 2,
    ("transformers", "SwinModel"): 0,
    ("timm", "vit_tiny_patch16_224"): 2,
    ("timm", "eva02_tiny_patch14_224"): 2,
    ("timm", "beit_base_patch16_224"): 0,
    ("torchvision", "vit_b_16"): 2,
}


@pytest.mark.parametrize(("library", "name"), MODELS, ids="-".join)
def test_compiled_as_accurate_as_eager(library: str, name: str) -> None:
    import_library(library)
    row = graph_models.run(graph_models.candidate(library, name), limit=0)
    assert row.status == "right", row.detail
    fused, all_of_them = graph_tables.counts(vars(row), "attention")
    assert fused == all_of_them == MODELS[library, name], row.sites


HALVES = {  # models all of whose norms but the last are an RMSNorm, a norm of q or k, or one before a projection
    ("transformers", "Aimv2VisionModel"): ("RMSNorm", 4),
    ("transformers", "Sapiens2Model"): ("RMSNorm", 8),
    ("timm", "beit3_base_patch16_224"): ("LayerNorm", 9),
}


@pytest.mark.parametrize(("library", "name"), HALVES, ids=[name for _, name in HALVES])
def test_halves_of_blocks_with_other_norms(library: str, name: str) -> None:
    import_library(library)
    row = graph_models.run(graph_models.candidate(library, name), limit=0)
    assert row.status == "right", row.detail
    assert row.sites["attention"]["fused"] == {"layer_norm_attention": 2}, row.sites
    kind, fused = HALVES[library, name]
    assert graph_tables.counts(vars(row), kind)[0] == fused, row.sites


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).softmax(-1, dtype=torch.float32)


def test_what_computes_something_else_is_wrong() -> None:
    subject = graph_checks.Model(Doubling(), {"x": torch.randn(4, 8)})
    assert subject.exact.evaluated["output"].dtype == torch.float64
    assert subject.check(lambda model: model) < 1
    with pytest.raises(graph_checks.Wrong, match="in evaluation output: error"):
        subject.check(lambda model: lambda x: model(x * 1.001))


def test_only_the_gradient_is_wrong() -> None:
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


def test_one_lucky_run_of_eager_mode_condemns_nothing() -> None:
    torch.manual_seed(0)
    subject = graph_checks.Model(Steep(), {"x": torch.randn(4, 8)})
    lucky = [{name: t.float() for name, t in part.items()} for part in subject.exact]
    subject.eager = [graph_checks.Results(*lucky)]
    with pytest.raises(graph_checks.Wrong, match="in evaluation output: error"):
        subject._judge(subject._results(subject.model, lambda model: model))
    assert subject.check(lambda model: model) < 1
    assert len(subject.eager) == 5
    with pytest.raises(graph_checks.Wrong, match="in evaluation output: error"):  # is no matter of rounding
        subject.check(lambda model: lambda x: model(x * (1 + 1e-5)))


def test_table(tmp_path: Path) -> None:
    sites = {
        "attention": {
            "fused": {"attention": 2},
            "left": {"a bias is added": 1, "k and v of another length than q": 3, "float16": 1},
        },
        "MLP": {"fused": {"layer_norm_mlp": 2}, "left": {}},
        "LayerNorm": {"fused": {"layer_norm_mlp": 1}, "left": {"add behind it": 1}},
        "RMSNorm": {"fused": {"layer_norm_linear": 3}, "left": {}},
    }
    row = vars(graph_models.Row("timm", "vit_x", "vit", "right", graphs=1, sites=sites, share=0.5, eager_runs=5))
    lost = vars(graph_models.Row("timm", "vit_y", "vit", "eager", "ImportError: " + "natten " * 30))
    graph_models.save(tmp_path / "graphs.json", {"timm/vit_x": row, "timm/vit_y": lost})
    assert json.loads((tmp_path / "graphs.json").read_text())["rows"]["timm/vit_x"] == row
    lines = graph_tables.render(tmp_path / "graphs.json")
    assert max(map(len, lines)) <= 100
    assert lines[1] == "0 of 1 with every self-attention fused that has neither mask nor bias"
    assert next(line for line in lines if line.startswith("vit ")).split() == [
        "vit", "1/2", "2/3", "1", "3", "4/5", "2/2", "-", "1", "0.50",
    ]  # fmt: skip
    assert lines[lines.index("  timm vit_x: 0.50") - 1].endswith("away (4 runs), not by those of one run:")
